"""Objects that are loaded once and called often: every call finds them as they were loaded."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from operator import is_
from types import CellType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halotile.tasks.distributed.transport.contents import (
    CONTAINERS,
    cell_content,
    contents_of,
    running_statistics,
)
from halotile.tasks.distributed.transport.random_state import Draw, global_generators, seeded

if TYPE_CHECKING:
    from halotile.tasks.distributed.transport.calls import RemoteObject

_lock = threading.RLock()
"""Held by calls that may draw torch's random numbers or change an object: processes have several threads."""


class LoadedObject:
    """An object of this process, with its state at the time it was loaded.

    Parameters
    ----------
    value : object
        The object.
    """

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

    Parameters
    ----------
    value : object
        The object.

    Examples
    --------
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
        ignored = {
            id(b) for net in networks for _, layer in running_statistics(net) for b in layer._buffers.values()
        }
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
    draw: Draw | None,
    tensors: Sequence[torch.Tensor],
    *sources: RemoteObject | None,
    is_alone: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs of a call, and objects for one call in the state in which they were loaded, whatever earlier calls did to them.

    In a process with several threads, calls of objects that draw random numbers or change run one at a time.

    Parameters
    ----------
    draw : Draw, optional
        Random numbers of the call; None leaves the generators as they are.
    tensors : sequence of Tensor
        The inputs, followed by the tensors that the objects are given anew, one object after the other.
    *sources : Packed, FactoryObject or None
        Sources of the objects; None yields None.
    is_alone : bool
        The call changes the objects for as long as it lasts.
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
