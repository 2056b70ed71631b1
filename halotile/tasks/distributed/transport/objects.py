"""Objects on the workers: packed as a pickle beside files of their tensors, loaded once, and called often."""

from __future__ import annotations

import builtins
import functools
import hashlib
import io
import os
import pickle
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import is_
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from halotile.errors import HalotileError, WrongKind
from halotile.tasks.distributed.transport.tensors import (
    Draw,
    dtype_name,
    global_generators,
    seeded,
    to_array,
    to_tensor,
    version_of,
)
from halotile.tasks.user_code import names_in

# Packages whose objects are not searched, except networks: their contents are internal.
OPAQUE = {*sys.stdlib_module_names, "torch", "numpy", "dask", "distributed"}
CONTAINERS = (list, dict, set, deque)


def contents_of(*objects: Any) -> list[Any]:
    """List the tensors, generators, networks, containers and cells that objects hold, each once.

    The attributes of an object count as a container, but for frozen dataclasses: what those hold besides
    fields is a cache.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> [type(held).__name__ for held in contents_of([layer]) if isinstance(held, torch.Tensor)]
    ['Parameter']
    """
    found: dict[int, Any] = {}
    pending = list(objects)
    while pending:
        value = pending.pop()
        if id(value) not in found and (inside := direct_contents(value)) is not None:
            found[id(value)] = value
            pending += inside
    return list(found.values())


def wants_gradients(value: Any) -> bool:
    """Return True for an object that holds a tensor which wants a gradient.

    >>> wants_gradients(torch.nn.Linear(1, 1)), wants_gradients([torch.ones(1)])
    (True, False)
    """
    return any(isinstance(held, torch.Tensor) and held.requires_grad for held in contents_of(value))


def direct_contents(value: Any) -> Iterable[Any] | None:
    """Return the direct contents of an object; None if it holds nothing of interest."""
    if isinstance(value, torch.Tensor | torch.Generator):
        return ()
    if isinstance(value, dict):
        return None if value is vars(builtins) else value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, CellType):
        return (cell_content(value),)
    if isinstance(value, FunctionType):
        return _function_contents(value)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return _attributes(value)


def _attributes(value: Any) -> Iterable[Any] | None:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | ModuleType):
        return None
    if type(value).__module__.split(".")[0] in OPAQUE and not isinstance(value, torch.nn.Module):
        return None
    is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    return attributes.values() if is_frozen else (attributes,)


def cell_content(cell: CellType) -> Any:
    """Return the content of a closure cell, or the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _function_contents(function: FunctionType) -> Iterable[Any]:
    """Return closure cells, defaults and, unless a function is importable, the globals it uses."""
    held: list[Any] = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]
    module = sys.modules.get(function.__module__)
    if module is None or function.__globals__ is not vars(module):
        return [*held, function.__globals__]  # unpickled by value: it has globals of its own
    if module.__name__ == "__main__" or getattr(module, function.__qualname__, None) is not function:
        held += [function.__globals__[n] for n in names_in(function.__code__) if n in function.__globals__]
    return held


def running_statistics(value: Any) -> list[tuple[str, torch.nn.Module]]:
    """List the layers of a network that update running statistics in training mode, with their names.

    >>> layer = torch.nn.BatchNorm2d(1)
    >>> running_statistics(torch.nn.Sequential(layer))[0][0], running_statistics(layer.eval())
    ('0', [])
    """
    if not isinstance(value, torch.nn.Module):
        return []
    return [
        (name or type(layer).__name__, layer)
        for name, layer in value.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase) and layer.training and layer.running_mean is not None
    ]


CACHE_BYTES = 2**30  # size of the objects that a process keeps loaded
CACHE_COUNT = 1024  # number of objects that a process keeps loaded
ARGUMENTS_FOLDER = "arguments"  # folder of the arguments of calls
LiveTensors = tuple[torch.Tensor, ...]  # tensors of an object that want gradients: each call is given them anew
Versions = tuple[tuple[torch.Tensor, int | None], ...]  # other tensors of an object, with their versions

_cache: OrderedDict[RemoteObject, LoadedObject] = OrderedDict()
_cache_lock = threading.RLock()


class RemoteObject(ABC):
    """A small value that travels in place of an object, which a worker makes on first use."""

    live: int  # number of tensors that each call is given anew
    size_bytes: int = 0

    @abstractmethod
    def make(self, live: Sequence[torch.Tensor]) -> Any:
        """Make the object, of the ``live`` tensors of one call if it has any."""

    def load(self, live: Sequence[torch.Tensor] = ()) -> LoadedObject:
        """Return the object: made on first use in this process, or of the ``live`` tensors of one call."""
        if self.live:
            return LoadedObject(self.make(live))
        with _cache_lock:
            if self not in _cache:
                _cache[self] = LoadedObject(self.make(()))
                while len(_cache) > 1 and (
                    len(_cache) > CACHE_COUNT or sum(each.size_bytes for each in _cache) > CACHE_BYTES
                ):
                    _cache.popitem(last=False)
            _cache.move_to_end(self)
            return _cache[self]

    def discard(self) -> None:
        """Drop the object, so that it is made again on next use."""
        with _cache_lock:
            _cache.pop(self, None)


@dataclass(frozen=True)
class Packed(RemoteObject):
    """The files of an object."""

    folder: str  # folder of the files
    digest: str  # digest of the content, and name of the pickle
    tensors: tuple[str, ...]  # digests of the tensors
    device: str = "cpu"  # device that the tensors are loaded to
    size_bytes: int = 0  # size of tensors and pickle
    live: int = 0  # number of tensors that are in no file

    def make(self, live: Sequence[torch.Tensor]) -> Any:
        """Read the object from its files."""
        return _Reader(self, live).load()


@dataclass(frozen=True)
class FactoryObject(RemoteObject):
    """An object that a factory makes from a number."""

    factory: Packed  # `factory(index, device, shared)`, with `shared`
    index: int  # number of the object
    device: str = "cpu"  # device of its tensors
    kind: str | None = None  # name of the class of `deepinv.physics` that it must be an instance of
    live: int = 0  # number of tensors of the factory and its shared values that want gradients

    def make(self, live: Sequence[torch.Tensor]) -> Any:
        """Call the factory."""
        factory, shared = self.factory.load(live).value
        made = factory(self.index, torch.device(self.device), shared)
        if self.kind:
            import deepinv.physics

            if not isinstance(made, getattr(deepinv.physics, self.kind)):
                raise ValueError(
                    f"the factory must return {self.kind} instances, and returned a {type(made).__name__}. "
                    "Write type_object='physics' for operators that are not linear."
                )
        return made


class Packer:
    """Packs one object, again whenever it has changed.

    ``value``: a physics, a network, a function: anything that cloudpickle accepts. Its tensors become files; ``folder``: folder of the files: one
    of its own, unless the object never changes; ``device``: device of its tensors on a worker; ``keeps_live``: leave tensors that want gradients
    out of the files: they are in ``live``, in the order in which calls are given them, and the others in ``constant``, with their versions.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layer = torch.nn.Linear(2, 1)
    ...     packer = Packer(layer, folder)
    ...     before = packer.pack()
    ...     with torch.no_grad():
    ...         _ = layer.bias.fill_(3)
    ...     packer.pack() == before, packer.pack().load().value.bias.item()
    (False, 3.0)
    """

    def __init__(
        self, value: Any, folder: str | os.PathLike[str], device: str = "cpu", keeps_live: bool = False
    ) -> None:
        self.value = value
        self.keeps_live = keeps_live
        self.live: LiveTensors = ()
        self.constant: Versions = ()
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


def make_packer(value: Any, parent: str | os.PathLike[str], device: Any, keeps_live: bool = False) -> Packer:
    """Return a packer for an object, with a folder of its own."""
    return Packer(value, tempfile.mkdtemp(dir=parent), str(device), keeps_live)


def pack_arguments(
    arguments: Any, parent: Path, device: Any, keeps_live: bool = True
) -> tuple[Packed | None, LiveTensors]:
    """Pack arguments of a call, equal ones once, None if there are none; return those tensors that want gradients as well."""
    if not arguments:
        return None, ()
    folder = parent / ARGUMENTS_FOLDER
    folder.mkdir(exist_ok=True)
    packer = Packer(arguments, folder, str(device), keeps_live)
    return packer.pack(), packer.live


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
        return serial, name, dtype_name(value), is_parameter, bool(value.requires_grad)


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


# Held by calls that may draw torch's random numbers or change an object: processes have several threads.
_lock = threading.RLock()


class LoadedObject:
    """An object of this process, with its state at the time it was loaded."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_pure = False
        """True once it was called, if no call drew random numbers or changed it."""
        self._has_state = False

    @cached_property
    def snapshot(self) -> Snapshot:
        """Its state when it was loaded; first read before its first call."""
        return Snapshot(self.value)

    def reset(self, has_drawn: bool) -> bool:
        """Restore the state after a call, and return False if that is impossible."""
        has_changed = self.snapshot.restore()
        is_spoiled = self.snapshot.has_modified_tensors
        self._has_state |= has_drawn or has_changed or is_spoiled or self.snapshot.has_generators
        self.is_pure = not self._has_state
        return not is_spoiled


class Snapshot:
    """The contents of an object's containers, and the state of its tensors and generators.

    >>> layer = torch.nn.Linear(1, 1)
    >>> snapshot = Snapshot(layer)
    >>> layer.seen = 5
    >>> snapshot.restore(), hasattr(layer, "seen"), snapshot.restore()
    (True, False, False)
    """

    def __init__(self, value: Any) -> None:
        found = contents_of(value)
        networks = [held for held in found if isinstance(held, torch.nn.Module)]
        # In training mode running statistics have no effect, and each call changes them.
        ignored = {id(b) for net in networks for _, layer in running_statistics(net) for b in layer._buffers.values()}
        containers = [held for held in found if isinstance(held, CONTAINERS)]
        self._containers = [(held, held.copy()) for held in containers if held]
        self._empty = [held for held in containers if not held]  # most of those of a network
        self._cells = [(held, cell_content(held)) for held in found if isinstance(held, CellType)]
        self._versions = [
            (held, held._version)
            for held in found
            if isinstance(held, torch.Tensor) and id(held) not in ignored and not held.is_inference()
        ]
        self._generators = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]

    @property
    def has_generators(self) -> bool:
        """True if the object has random number generators of its own."""
        return bool(self._generators)

    def seed(self, draw: Draw | None) -> None:
        """Seed the object's own generators for a draw; with None, leave them."""
        if draw is not None:
            for generator, state in self._generators:
                content = np.ascontiguousarray(state.numpy()).tobytes()
                digest = hashlib.blake2b(content, digest_size=16).digest()
                generator.manual_seed(draw.generator_seed(int.from_bytes(digest, "little")))

    def restore(self) -> bool:
        """Restore attributes and containers, and return True if anything had changed."""
        for generator, state in self._generators:
            generator.set_state(state)
        changed = any(self._empty)
        for container in self._empty if changed else ():
            container.clear()
        for container, before in self._containers:
            if not _is_same(container, before):
                _refill(container, before)
                changed = True
        for cell, content in self._cells:
            if cell_content(cell) is not content:
                cell.cell_contents = content
                changed = True
        return changed

    @property
    def has_modified_tensors(self) -> bool:
        """True if a tensor was written to, which cannot be restored."""
        return any(tensor._version != version for tensor, version in self._versions)


@contextmanager
def load_for_call(
    draw: Draw | None, tensors: Sequence[torch.Tensor], *sources: RemoteObject | None, is_alone: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs of a call, and objects for one call in the state in which they were loaded, whatever earlier calls did to them.

    In a process with several threads, calls of objects that draw random numbers or change run one at a time.

    ``draw``: random numbers of the call; None leaves the generators as they are; ``tensors``: the inputs, followed by the tensors that the objects
    are given anew, one object after the other; ``*sources``: the objects; None yields None; ``is_alone``: the call changes the objects for as long
    as it lasts.
    """
    count = len(tensors) - sum(source.live for source in sources if source is not None)
    rest = iter(tensors[count:])
    loaded = [None if source is None else source.load(tuple(islice(rest, source.live))) for source in sources]
    pairs = [(s, o) for s, o in zip(sources, loaded, strict=True) if s is not None and o is not None]
    values = (tensors[:count], *(None if entry is None else entry.value for entry in loaded))
    if not _lock.acquire(blocking=is_alone or not all(entry.is_pure for _, entry in pairs)):
        yield values
        return
    try:
        with seeded(draw):
            for _, entry in pairs:
                entry.snapshot.seed(draw)
            before = _random_state()
            try:
                yield values
            finally:
                has_drawn = not torch.equal(before, _random_state())
                for source, entry in pairs:
                    if not entry.reset(has_drawn):
                        source.discard()
    finally:
        _lock.release()


def _random_state() -> torch.Tensor:
    """State of torch's global generators."""
    return torch.cat([generator.get_state() for generator in global_generators()])


def _is_same(container: Any, before: Any) -> bool:
    """Return True if a container holds the identical objects in the same order."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict) and not all(map(is_, container.values(), before.values())):
        return False
    return container == before if isinstance(container, set) else all(map(is_, container, before))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)
