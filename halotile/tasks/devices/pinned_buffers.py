"""Pinned memory, used again and again: a few pieces in turn, each free once what was in it has arrived."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Protocol

COUNT = 2
"""One is filled while the other is on its way."""


class Mark(Protocol):
    """A place in a stream of work."""

    def synchronize(self) -> None:
        """Wait until all that stands before it is done."""


class Buffers:
    """A few pieces of memory. Whoever takes one gives it back.

    Parameters
    ----------
    allocate : callable
        ``allocate(bytes)``: memory of that size.
    count : int
        How many pieces there are. With all of them taken, the next waits.

    Examples
    --------
    >>> buffers = Buffers(bytearray, count=1)
    >>> first = buffers.take(3)
    >>> buffers.give(first)
    >>> buffers.take(2) is first
    True
    """

    def __init__(self, allocate: Callable[[int], Any], count: int = COUNT) -> None:
        self._allocate = allocate
        self._free: queue.SimpleQueue[tuple[Any, Mark | None]] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((None, None))

    def take(self, size: int) -> Any:
        """A piece of at least so many bytes, that nobody reads any more."""
        memory, mark = self._free.get()
        if mark is not None:
            mark.synchronize()
        if memory is not None and len(memory) >= size:
            return memory
        del memory  # there is to be one piece, not a small one beside a large one
        try:
            return self._allocate(size)
        except BaseException:
            self._free.put((None, None))
            raise

    def give(self, memory: Any, mark: Mark | None = None) -> None:
        """Give a piece back; with a mark, it is free once that is reached."""
        self._free.put((memory, mark))
