"""Objects that are loaded once and called often: every call finds them as they were loaded."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from types import CellType
from typing import Any, Protocol

import numpy as np
import torch

from halotile.tasks.distributed.transport.contents import CONTAINERS, contents_of, running_statistics
from halotile.tasks.distributed.transport.random_state import Draw, global_generators, seeded

_turn = threading.RLock()
"""Whose random numbers torch gives, and whose attributes may change, where several threads work in a process."""


class Place(Protocol):
    """Where an object is loaded from."""

    def loaded(self) -> Loaded:
        """The object, loaded when this process first asks for it."""
        ...

    def forget(self) -> None:
        """Load it anew next time."""
        ...


class Loaded:
    """An object of this process, and how it was when it was loaded.

    Parameters
    ----------
    thing : object
        The object.
    """

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.is_quiet = False
        """Whether it was called, and no call drew random numbers or changed it."""
        self._is_loud = False

    @cached_property
    def origin(self) -> Origin:
        """How it was; asked for before its first call."""
        return Origin(self.thing)

    def tell(self, was_quiet: bool) -> None:
        """Take note of what a call did."""
        self._is_loud |= not was_quiet
        self.is_quiet = not self._is_loud


class Origin:
    """What was in the containers of an object, and in which state its tensors and generators were.

    Parameters
    ----------
    thing : object
        The object.

    Examples
    --------
    >>> layer = torch.nn.Linear(1, 1)
    >>> origin = Origin(layer)
    >>> layer.seen = 5
    >>> origin.restore(), hasattr(layer, "seen"), origin.restore()
    (True, False, False)
    """

    def __init__(self, thing: Any) -> None:
        found = contents_of(thing)
        networks = [each for each in found if isinstance(each, torch.nn.Module)]
        # In training mode nothing depends on them, and each call changes them.
        idle = {
            id(b) for net in networks for _, layer in running_statistics(net) for b in layer._buffers.values()
        }
        containers = [each for each in found if isinstance(each, CONTAINERS)]
        self._containers = [(each, each.copy()) for each in containers if each]
        self._empty = [each for each in containers if not each]  # most of those of a network
        self._cells = [(each, _content(each)) for each in found if isinstance(each, CellType)]
        self._versions = [
            (each, each._version)
            for each in found
            if isinstance(each, torch.Tensor) and id(each) not in idle and not each.is_inference()
        ]
        self._generators = [
            (each, state, _digest(state))
            for each, state in ((g, g.get_state()) for g in found if isinstance(g, torch.Generator))
        ]

    @property
    def draws(self) -> bool:
        """Whether it has generators of its own."""
        return bool(self._generators)

    def seed(self, draw: Draw | None) -> None:
        """Let its own generators begin where this draw says; with None, where they were."""
        if draw is not None:
            for generator, _, digest in self._generators:
                generator.manual_seed(draw.key_after(digest))

    def restore(self) -> bool:
        """Put back what was in its attributes and containers; whether anything had changed."""
        for generator, state, _ in self._generators:
            generator.set_state(state)
        changed = any(self._empty)
        for container in self._empty if changed else ():
            container.clear()
        for container, before in self._containers:
            if not _is_same(container, before):
                _refill(container, before)
                changed = True
        for cell, content in self._cells:
            if _content(cell) is not content:
                cell.cell_contents = content
                changed = True
        return changed

    @property
    def is_spoilt(self) -> bool:
        """Whether a tensor was written to: what it was is not kept."""
        return any(tensor._version != version for tensor, version in self._versions)


@contextmanager
def lent(draw: Draw | None, *places: Place | None) -> Iterator[tuple[Any, ...]]:
    """Objects for one call, which finds them as they were loaded, whatever calls before it did to them.

    In a process with several threads those that draw random numbers or change wait for one another.

    Parameters
    ----------
    draw : Draw, optional
        What random numbers the call has; with None, whatever comes.
    *places : Place or None
        Where the objects are loaded from; None for None.
    """
    held = [(place, place.loaded()) for place in places if place is not None]
    objects = iter(held)
    things = tuple(None if place is None else next(objects)[1].thing for place in places)
    if not _turn.acquire(blocking=not all(loaded.is_quiet for _, loaded in held)):
        yield things
        return
    try:
        with seeded(draw):
            for _, loaded in held:
                loaded.origin.seed(draw)
            before = _drawn_so_far()
            try:
                yield things
            finally:
                has_drawn = not torch.equal(before, _drawn_so_far())
                for place, loaded in held:
                    _take_back(place, loaded, has_drawn)
    finally:
        _turn.release()


def _take_back(place: Place, loaded: Loaded, has_drawn: bool) -> None:
    """Leave an object as it was loaded, after a call."""
    has_changed = loaded.origin.restore()
    is_spoilt = loaded.origin.is_spoilt
    loaded.tell(was_quiet=not (has_drawn or has_changed or is_spoilt or loaded.origin.draws))
    if is_spoilt:
        place.forget()


def _drawn_so_far() -> torch.Tensor:
    """What random numbers change."""
    return torch.cat([generator.get_state() for generator in global_generators()])


def _digest(state: torch.Tensor) -> int:
    """A number for the state of a generator."""
    words = np.ascontiguousarray(state.numpy()).tobytes()
    return int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little")


def _content(cell: CellType) -> Any:
    """What is in a cell; the cell itself where nothing is."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _is_same(container: Any, before: Any) -> bool:
    """Whether the very same things are in it, in their order."""
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
