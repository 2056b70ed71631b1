"""Two io threads next to the computing thread: the next read and the last write overlap with the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from halotile.storage.grid import Block


class Prefetch:
    """Read one block ahead and write one block behind, or do both in turn where threads do not pay.

    With every core busy computing, a second thread only gets in the way (15 % slower when storage
    is fast); with spare cores, slow storage or a GPU it hides the input and output.

    Parameters
    ----------
    overlap : bool
        Whether reads and writes get threads of their own.
    """

    def __init__(self, overlap: bool) -> None:
        self._reader = ThreadPoolExecutor(1, "halotile-read") if overlap else None
        self._writer = ThreadPoolExecutor(1, "halotile-write") if overlap else None
        self._pending: tuple[Block, Future[None]] | None = None
        self._written: list[tuple[Block, BaseException | None]] = []

    def ahead(
        self, blocks: Iterable[Block], read: Callable[[Block], Any]
    ) -> Iterator[tuple[Block, Callable[[], Any]]]:
        """Yield each block with a function that returns what was read for it, or raises."""
        if self._reader is None:
            for block in blocks:
                yield block, lambda block=block: read(block)  # type: ignore[misc]
            return
        previous: tuple[Block, Future[Any]] | None = None
        for block in blocks:
            current = (block, self._reader.submit(read, block))
            if previous is not None:
                yield previous[0], previous[1].result
            previous = current
        if previous is not None:
            yield previous[0], previous[1].result

    def behind(self, block: Block, write: Callable[[], None]) -> None:
        """Write a block, at once or in the background; at most one write is in flight."""
        self.finish()
        if self._writer is not None:
            self._pending = (block, self._writer.submit(write))
            return
        error: BaseException | None = None
        try:
            write()
        except Exception as failure:
            error = failure
        self._written.append((block, error))

    def finish(self) -> None:
        """Wait for the write that is in flight."""
        if self._pending is not None:
            block, future = self._pending
            self._pending = None
            self._written.append((block, future.exception()))

    def written(self) -> list[tuple[Block, BaseException | None]]:
        """Return the blocks whose write has ended since the last call, with the error of each that failed."""
        written, self._written = self._written, []
        return written
