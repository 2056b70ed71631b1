"""Threads that read and write the shards of a block in parallel; by default the caller's own thread does the work.

A CPU that computes has no core to spare for them. A GPU is faster than one decoding and one encoding thread.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class IoThreads:
    """The I/O threads of a process.

    >>> io_threads = IoThreads()
    >>> list(io_threads.map(abs, [-1, 2, -3]))
    [1, 2, 3]
    >>> io_threads.resize(2)
    >>> list(io_threads.map(abs, [-1, 2, -3]))
    [1, 2, 3]
    >>> io_threads.resize(1)
    """

    def __init__(self) -> None:
        self.count = 1
        self._pool: ThreadPoolExecutor | None = None

    def resize(self, count: int) -> None:
        """Set the number of threads; with one, the caller's thread does the work."""
        if count == self.count:
            return
        # Threads of the old pool finish the work that was already submitted.
        self.count = count
        self._pool = ThreadPoolExecutor(count, "halotile-io") if count > 1 else None

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield ``work(item)`` for each item in order, computing a few items ahead of the consumer.

        When the consumer stops early, or ``work`` fails, submitted work ends before this returns.
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

    def run_all(self, work: Callable[[T], Any], items: Iterable[T]) -> None:
        """Call ``work`` on every item."""
        deque(self.map(work, items), maxlen=0)


IO_THREADS = IoThreads()  # the I/O threads of this process
