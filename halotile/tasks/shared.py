"""Images that several readers share while one block is processed: read once, and counted."""

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
    """The context in which one block is processed. What is read in it is kept until it ends.

    ``cells``: the shards of the block's core: sums are reported for each of them, so that they do not depend on how shards are grouped into blocks.

    Attributes
    ----------
    read_bytes : int
        Bytes read from shared images.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory
    >>> image = Shared(InMemory(np.arange(100.0).reshape(10, 10)), margin=2)
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
        """The images computed for the block so far, by their place in the output."""
        self.at: int | None = None
        """The cell being computed, where each is computed by itself: notes for other cells are dropped."""
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
        """The scope of the block that this thread processes."""
        return _scope.get()

    def note(self, name: str, cell: int, part: int, value: float) -> None:
        """Note one part of a sum over one cell. Noting it again replaces it."""
        if self.at is None or self.at == cell:
            self._notes.setdefault(name, {})[cell, part] = value

    def sums(self) -> dict[str, list[float]]:
        """Every noted sum for each cell, its parts added in order."""
        return {
            name: [sum(notes[key] for key in sorted(notes) if key[0] == cell) for cell in range(len(self.cells))]
            for name, notes in self._notes.items()
        }

    def read(self, image: Shared, region: Region) -> Pixels:
        """Return a region of a shared image; do not write to it."""
        for there, pixels in self._parts.get(id(image), ()):
            if region.inside(there):
                return pixels[region.relative_to(there).slices]
        wide = region.widen(image.margin).clip(Region.whole(image.shape))
        return self.hold(image, wide)[region.relative_to(wide).slices]

    def hold(self, image: Shared, region: Region) -> Pixels:
        """Read exactly this region of a shared image now, and keep it."""
        pixels = image.source.read(region)
        self.read_bytes += 0 if image.computed else pixels.nbytes
        self._parts.setdefault(id(image), []).append((region, pixels))
        if image.computed:
            self._computed.add(id(image))
        return pixels

    def forget_computed(self) -> None:
        """Drop computed pixels, so that the next region is computed independently of earlier ones."""
        for number in self._computed:
            del self._parts[number]
        self._computed.clear()


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@dataclass(frozen=True, eq=False)
class Shared:
    """An image with several readers: inside a :class:`Scope` each region is read once."""

    source: Readable  # image
    # extra pixels read on each side of the last two axes: the operators of a stack read nearly the same window one
    # after the other, and a periodic one reads a slab on either side
    margin: int = 0
    computed: bool = False  # whether the image is computed when it is read: then it does not count as read

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; do not write to them."""
        scope = Scope.current()
        return self.source.read(region) if scope is None else scope.read(self, region)

    def hold(self, region: Region) -> None:
        """Read ``region`` into the current scope now, so that no part of it is read again."""
        scope = Scope.current()
        assert scope is not None
        scope.hold(self, region)
