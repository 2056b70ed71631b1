"""What many ask for while one block is processed: read once, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable


class Scope:
    """The time in which one block is processed, as a context. What is read in it is kept to its end.

    Parameters
    ----------
    cells : sequence of Region
        The shards of the block's core: sums are reported for each of them, so that they do not depend on
        how shards are grouped into blocks.

    Attributes
    ----------
    read_bytes : int
        What was read of shared images.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory
    >>> image = Shared(InMemory(np.arange(100.0).reshape(10, 10)), slack=2)
    >>> with Scope([]) as scope:
    ...     first = image.read(Region((4, 4), (5, 6)))
    ...     second = image.read(Region((3, 3), (4, 5)))
    >>> first.tolist(), second.tolist(), scope.read_bytes
    ([[44.0, 45.0]], [[33.0, 34.0]], 240)
    """

    def __init__(self, cells: Sequence[Region] = ()) -> None:
        self.cells = tuple(cells)
        self.read_bytes = 0
        self.written: dict[int, tuple[Region, Pixels]] = {}
        """What the block has made so far, by its place among what it writes."""
        self.at: int | None = None
        """The cell that is computed now, where each is computed for itself: what is noted of others is not theirs."""
        self._parts: dict[int, list[tuple[Region, Pixels]]] = {}
        self._computed: set[int] = set()
        self._notes: dict[str, dict[tuple[int, int], float]] = {}
        self._tokens: list[Token[Scope | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_scope.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._tokens.pop())

    @staticmethod
    def current() -> Scope | None:
        """The scope of the block that this thread is at."""
        return _scope.get()

    def note(self, name: str, cell: int, part: int, value: float) -> None:
        """Enter what one part of a sum comes to over one cell. Twice the same is once."""
        if self.at is None or self.at == cell:
            self._notes.setdefault(name, {})[cell, part] = value

    def sums(self) -> dict[str, list[float]]:
        """Every sum that was noted, for each cell: its parts added in their order."""
        return {
            name: [
                sum(notes[key] for key in sorted(notes) if key[0] == cell) for cell in range(len(self.cells))
            ]
            for name, notes in self._notes.items()
        }

    def read(self, image: Shared, region: Region) -> Pixels:
        """A region of a shared image; not to be written to."""
        for there, pixels in self._parts.get(id(image), ()):
            if region.inside(there):
                return pixels[region.relative_to(there).slices]
        axes = len(image.shape)
        wide = region.grow(((0, 0),) * (axes - 2) + ((image.margin, image.margin),) * min(2, axes))
        wide = wide.clip(Region.whole(image.shape))
        return self.hold(image, wide)[region.relative_to(wide).slices]

    def hold(self, image: Shared, region: Region) -> Pixels:
        """A region of a shared image, read now, no wider than that."""
        pixels = image.source.read(region)
        self.read_bytes += 0 if image.computed else pixels.nbytes
        self._parts.setdefault(id(image), []).append((region, pixels))
        if image.computed:
            self._computed.add(id(image))
        return pixels

    def forget_computed(self) -> None:
        """Let go of what was computed: what is asked for next is computed for itself, whatever came before."""
        for held in self._computed:
            del self._parts[held]
        self._computed.clear()


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@dataclass(frozen=True, eq=False)
class Shared:
    """An image that many read from: inside a :class:`Scope`, once.

    Parameters
    ----------
    source : Readable
        The image.
    margin : int
        Pixels more that are read on each side of the last two axes: operators of a stack ask for nearly the same
        window, one after the other, and a periodic one asks for a slab on either side.
    computed : bool
        Whether reading it is computing, not reading: then it does not count as read.
    """

    source: Readable
    margin: int = 0
    computed: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.source.shape

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; not to be written to."""
        scope = Scope.current()
        return self.source.read(region) if scope is None else scope.read(self, region)

    def hold(self, region: Region) -> None:
        """Have the scope at hand read ``region`` now: what lies in it will not be read again."""
        scope = Scope.current()
        assert scope is not None
        scope.hold(self, region)
