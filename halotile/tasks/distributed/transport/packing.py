"""An object as a small pickle beside files that hold its tensors."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from halotile.errors import HalotileError, WrongKind
from halotile.tasks.distributed.transport.loaded_objects import Loaded
from halotile.tasks.distributed.transport.tensors import kind_of, to_array, to_tensor

KEPT_BYTES = 2**30
"""Tensors of objects that a process keeps loaded."""

_loaded: OrderedDict[Packed, Loaded] = OrderedDict()
_guard = threading.Lock()


@dataclass(frozen=True, slots=True)
class Packed:
    """Where an object lies: what travels in its place.

    Parameters
    ----------
    folder : str
        Of its files.
    digest : str
        Of its content: the name of its pickle.
    tensors : tuple of str
        The digests of its tensors.
    device : str
        Where its tensors are put.
    size_bytes : int
        Of its tensors and its pickle.
    """

    folder: str
    digest: str
    tensors: tuple[str, ...]
    device: str = "cpu"
    size_bytes: int = 0

    def get(self) -> Any:
        """The object itself, for what does not call it."""
        return self.loaded().thing

    def forget(self) -> None:
        """Load it anew next time."""
        with _guard:
            _loaded.pop(self, None)

    def loaded(self) -> Loaded:
        """The object, loaded when this process first asks for it."""
        with _guard:
            if self not in _loaded:
                _loaded[self] = Loaded(_Reader(self).load())
                while len(_loaded) > 1 and sum(each.size_bytes for each in _loaded) > KEPT_BYTES:
                    _loaded.popitem(last=False)
            _loaded.move_to_end(self)
            return _loaded[self]


class Packer:
    """Carries one object, anew when it has changed since.

    Parameters
    ----------
    thing : object
        A physics, a network, a function: whatever cloudpickle takes. Its tensors become files.
    folder : path
        Where they lie: a folder of its own, unless the object never changes.
    device : str
        Where its tensors are put on a worker.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layer = torch.nn.Linear(2, 1)
    ...     first = Carrier(layer, folder)
    ...     before = first.carried()
    ...     with torch.no_grad():
    ...         _ = layer.bias.fill_(3)
    ...     first.carried() == before, first.carried().get().bias.item()
    (False, 3.0)
    """

    def __init__(self, thing: Any, folder: str | os.PathLike[str], device: str = "cpu") -> None:
        self.thing = thing
        self.device = device
        self.folder = Path(folder)
        self._last: Packed | None = None

    def packed(self) -> Packed:
        """The object as it is now, on the disk.

        Raises
        ------
        WrongKind
            When it cannot be pickled.
        """
        stream = io.BytesIO()
        writer = _Writer(stream, self.folder)
        try:
            writer.dump(self.thing)
        except HalotileError:
            raise
        except (pickle.PicklingError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise WrongKind(
                f"an object of type {type(self.thing).__name__} cannot be sent to the workers: {error}. Take out what belongs to this process, such "
                "as locks and open files. A factory (index, device, shared) makes physics and fidelities on the workers."
            ) from error
        data = stream.getvalue()
        digest = hashlib.sha256(data).hexdigest()[:32]
        current = Packed(
            str(self.folder),
            digest,
            tuple(sorted(writer.digests)),
            self.device,
            len(data) + writer.size_bytes,
        )
        if current != self._last:
            _write(self.folder / f"{digest}.pkl", data)
            self._forget(keep=current)
            self._last = current
        return current

    def _forget(self, keep: Packed) -> None:
        """Remove what the object was before: a network that is trained would leave its weights of every step."""
        if self._last is not None:
            if self._last.digest != keep.digest:
                (self.folder / f"{self._last.digest}.pkl").unlink(missing_ok=True)
            for digest in set(self._last.tensors) - set(keep.tensors):
                (self.folder / f"{digest}.npy").unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """In one step: a worker never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles everything but tensors, which it writes beside."""

    def __init__(self, stream: io.BytesIO, folder: Path) -> None:
        super().__init__(stream)
        self.folder = folder
        self.digests: set[str] = set()
        self.size_bytes = 0
        self._serials: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> Any:
        """A tensor by the digest of its numbers, and what else makes it."""
        if not isinstance(thing, torch.Tensor) or type(thing) not in (torch.Tensor, torch.nn.Parameter):
            return None
        array = to_array(thing)
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
        # One that is met twice, as where layers share their weights, is one on the other side as well.
        serial = self._serials.setdefault(id(thing), len(self._serials))
        is_parameter = isinstance(thing, torch.nn.Parameter)
        return serial, name, kind_of(thing), is_parameter, bool(thing.requires_grad)


class _Reader(pickle.Unpickler):
    """Unpickles what a writer wrote, with tensors of its own."""

    def __init__(self, packed: Packed) -> None:
        self.folder = Path(packed.folder)
        super().__init__(io.BytesIO((self.folder / f"{packed.digest}.pkl").read_bytes()))
        self.device = packed.device
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, name: tuple[int, str, str, bool, bool]) -> torch.Tensor:
        """The tensor of this name; the same one each time."""
        serial, digest, kind, is_parameter, requires_grad = name
        if serial not in self._tensors:
            numbers = np.load(self.folder / f"{digest}.npy", allow_pickle=False)
            tensor = to_tensor(numbers, kind, self.device)
            made = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            self._tensors[serial] = made.requires_grad_(requires_grad)
        return self._tensors[serial]
