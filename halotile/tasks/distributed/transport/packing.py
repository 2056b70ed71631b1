"""Objects packed as a small pickle beside files that hold their tensors."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from halotile.errors import HalotileError, WrongKind
from halotile.tasks.distributed.transport.loaded_objects import LoadedObject
from halotile.tasks.distributed.transport.tensors import tensor_kind_of, to_array, to_tensor, version_of

CACHE_BYTES = 2**30
"""Size of the objects that a process keeps loaded."""

_cache: OrderedDict[Packed, LoadedObject] = OrderedDict()
_cache_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Packed:
    """The files of an object, which travel in place of the object."""

    folder: str  # folder of the files
    digest: str  # digest of the content, and name of the pickle
    tensors: tuple[str, ...]  # digests of the tensors
    device: str = "cpu"  # device that the tensors are loaded to
    size_bytes: int = 0  # size of tensors and pickle
    live: int = 0  # number of tensors that are in no file, because each call is given them anew

    def get(self) -> Any:
        """Return the object for uses that do not call it."""
        return self.load().value

    def discard(self) -> None:
        """Drop the object, so that it is loaded again on next use."""
        with _cache_lock:
            _cache.pop(self, None)

    def load(self, live: Sequence[torch.Tensor] = ()) -> LoadedObject:
        """Return the object: loaded on first use in this process, or made of the ``live`` tensors of one call."""
        if self.live:
            return LoadedObject(_Reader(self, live).load())
        with _cache_lock:
            if self not in _cache:
                _cache[self] = LoadedObject(_Reader(self).load())
                while len(_cache) > 1 and sum(packed.size_bytes for packed in _cache) > CACHE_BYTES:
                    _cache.popitem(last=False)
            _cache.move_to_end(self)
            return _cache[self]


class Packer:
    """Packs one object, again whenever it has changed.

    Parameters
    ----------
    value : object
        A physics, a network, a function: anything that cloudpickle accepts. Its tensors become files.
    folder : path
        Folder of the files: one of its own, unless the object never changes.
    device : str
        Device of its tensors on a worker.
    keeps_live : bool
        Leave tensors that want gradients out of the files: they are in ``live``, in the order in which calls
        are given them, and the others in ``constant``, with their versions.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layer = torch.nn.Linear(2, 1)
    ...     packer = Packer(layer, folder)
    ...     before = packer.pack()
    ...     with torch.no_grad():
    ...         _ = layer.bias.fill_(3)
    ...     packer.pack() == before, packer.pack().get().bias.item()
    (False, 3.0)
    """

    def __init__(
        self, value: Any, folder: str | os.PathLike[str], device: str = "cpu", keeps_live: bool = False
    ) -> None:
        self.value = value
        self.keeps_live = keeps_live
        self.live: tuple[torch.Tensor, ...] = ()
        self.constant: tuple[tuple[torch.Tensor, int | None], ...] = ()
        self.device = device
        self.folder = Path(folder)
        self._last: Packed | None = None

    def pack(self) -> Packed:
        """Write the object as it is now to disk."""
        stream = io.BytesIO()
        writer = _Writer(stream, self.folder, self.keeps_live)
        try:
            writer.dump(self.value)
        except HalotileError:
            raise
        except (pickle.PicklingError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise WrongKind(
                f"an object of type {type(self.value).__name__} cannot be sent to the workers: {error}. Remove what belongs "
                "to this process, such as locks and open files, or write a factory (index, device, shared), which makes "
                "physics and fidelities on the workers."
            ) from error
        data = stream.getvalue()
        digest = hashlib.sha256(data).hexdigest()[:32]
        size_bytes = len(data) + writer.size_bytes
        self.live = tuple(writer.live.values())
        self.constant = tuple((tensor, version_of(tensor)) for tensor in writer.constant.values())
        current = Packed(
            str(self.folder), digest, tuple(sorted(writer.digests)), self.device, size_bytes, len(self.live)
        )
        if current != self._last:
            # Renamed into place, so that a worker never reads half of it.
            partial = self.folder / f"{digest}.partial"
            partial.write_bytes(data)
            partial.replace(self.folder / f"{digest}.pkl")
            self._delete_last(keep=current)
            self._last = current
        return current

    def _delete_last(self, keep: Packed) -> None:
        """Delete the files of the last version: training would leave the weights of every step."""
        if self._last is not None:
            if self._last.digest != keep.digest:
                (self.folder / f"{self._last.digest}.pkl").unlink(missing_ok=True)
            for digest in set(self._last.tensors) - set(keep.tensors):
                (self.folder / f"{digest}.npy").unlink(missing_ok=True)


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles everything except tensors, which go to files of their own, or stay where they are."""

    def __init__(self, stream: io.BytesIO, folder: Path, keeps_live: bool) -> None:
        super().__init__(stream)
        self.folder = folder
        self.keeps_live = keeps_live
        self.live: dict[int, torch.Tensor] = {}
        self.digests: set[str] = set()
        self.size_bytes = 0
        self.constant: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> Any:
        """Identify a tensor by the digest of its values, with its other properties."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if self.keeps_live and value.requires_grad:
            self.live.setdefault(id(value), value)
            return list(self.live).index(id(value)), isinstance(value, torch.nn.Parameter)
        array = to_array(value)
        numbers = np.ascontiguousarray(array) if array.ndim else array
        head = f"{array.shape}{array.dtype}".encode()
        digest = hashlib.blake2b(head + b"|", digest_size=16)
        digest.update(numbers.reshape(-1).view(np.uint8).data)
        name = digest.hexdigest()
        path = self.folder / f"{name}.npy"
        if not path.exists():
            partial = self.folder / f"{name}.partial.npy"
            np.save(partial, numbers, allow_pickle=False)
            partial.replace(path)
        self.size_bytes += 0 if name in self.digests else numbers.nbytes
        self.digests.add(name)
        # A tensor that occurs twice, as where layers share weights, is loaded as one tensor.
        self.constant.setdefault(id(value), value)
        serial = list(self.constant).index(id(value))
        is_parameter = isinstance(value, torch.nn.Parameter)
        return serial, name, tensor_kind_of(value), is_parameter, bool(value.requires_grad)


class _Reader(pickle.Unpickler):
    """Unpickles the output of a writer."""

    def __init__(self, packed: Packed, live: Sequence[torch.Tensor] = ()) -> None:
        self.live = live
        self.folder = Path(packed.folder)
        super().__init__(io.BytesIO((self.folder / f"{packed.digest}.pkl").read_bytes()))
        self.device = packed.device
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, name: tuple[int, bool] | tuple[int, str, str, bool, bool]) -> torch.Tensor:
        """Return the tensor of this identity; the same one each time."""
        if len(name) == 2:
            live, is_parameter = self.live[name[0]], name[1]
            if is_parameter:
                # A new Parameter would be another leaf. Modules ask isinstance, which asks this.
                live._is_param = True
            return live
        serial, digest, kind, is_parameter, requires_grad = name
        if serial not in self._tensors:
            numbers = np.load(self.folder / f"{digest}.npy", allow_pickle=False)
            tensor = to_tensor(numbers, kind, self.device)
            made = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            self._tensors[serial] = made.requires_grad_(requires_grad)
        return self._tensors[serial]
