"""Hands that read and write the pieces of a block side by side: the caller's own two, unless a worker is given more.

A CPU that computes has no core to spare for them. A GPU outruns one thread that decodes and one that encodes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class IoThreads:
    """Threads of this process.

    Examples
    --------
    >>> hands = Hands()
    >>> list(hands.each(abs, [-1, 2, -3]))
    [1, 2, 3]
    >>> hands.employ(2)
    >>> list(hands.each(abs, [-1, 2, -3]))
    [1, 2, 3]
    >>> hands.employ(1)
    """

    def __init__(self) -> None:
        self.count = 1
        self._pool: ThreadPoolExecutor | None = None

    def employ(self, count: int) -> None:
        """From now on there are so many; with one, whoever has work does it."""
        if count == self.count:
            return
        # Those that are at work for somebody end with that.
        self.count = count
        self._pool = ThreadPoolExecutor(count, "halotile-hands") if count > 1 else None

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """What becomes of each item, in their order. Items are drawn a few ahead of whoever takes what becomes of them.

        When that ends early, or work fails, no work goes on beyond this.
        """
        pool = self._pool
        if pool is None:
            yield from map(work, items)
            return
        ahead: deque[Future[R]] = deque()
        source = iter(items)
        try:
            ahead.extend(pool.submit(work, item) for item in itertools.islice(source, self.count))
            while ahead:
                done = ahead.popleft().result()
                ahead.extend(pool.submit(work, item) for item in itertools.islice(source, 1))
                yield done
        finally:
            for future in ahead:
                future.cancel()
            wait(ahead)

    def all(self, work: Callable[[T], Any], items: Iterable[T]) -> None:
        """Do all of it."""
        for _ in self.each(work, items):
            pass


IO_THREADS = IoThreads()
"""Those of this process."""
