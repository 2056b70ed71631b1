"""One block on one worker: read, compute, write, with the next read and the last write during the computation."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

from halotile.errors import InputError, OutputRefused
from halotile.storage.disk.durable import is_full
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.sharded.output import FileLayout, WrittenBlock
from halotile.tasks.devices.device import cpu_kind


class Prefetch:
    """Read one block ahead and write one block behind, or do both in turn where threads do not pay.

    With every core busy computing, a second thread only gets in the way (15 % slower when storage
    is fast); with spare cores, slow storage or a GPU it hides the input and output.

    ``overlap``: whether reads and writes get threads of their own.
    """

    def __init__(self, overlap: bool) -> None:
        self._reader = ThreadPoolExecutor(1, "halotile-read") if overlap else None
        self._writer = ThreadPoolExecutor(1, "halotile-write") if overlap else None
        self._pending: tuple[Block, Future[None]] | None = None
        self._written: list[tuple[Block, BaseException | None]] = []

    def ahead(self, blocks: Iterable[Block], read: Callable[[Block], Any]) -> Iterator[tuple[Block, Callable[[], Any]]]:
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


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that could not be computed, with the reason."""

    number: int
    index: tuple[int, ...]
    region: Region
    error: str
    traceback: str
    kind: str  # `input` (refused data: a retry does not help), `damaged` (input), `disk` (no space), or `task`


@dataclass(slots=True)
class Receipt:
    """The report of a worker on its blocks: a few hundred bytes, never pixels."""

    done: list[int] = field(default_factory=list)
    # By block, the digests of what was written to its images, concatenated.
    digests: dict[int, bytes] = field(default_factory=dict)
    bad: list[BadBlock] = field(default_factory=list)
    pixels: int = 0
    holes: int = 0  # pixels that were left as they are, because they hold no measurement or a mask keeps them
    defects: int = 0  # pixels that were replaced before anything was computed
    not_finite: int = 0  # NaN and infinities that were taken for measurements
    spoiled: int = 0  # NaN and infinities of the results of blocks that read such
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    write_seconds: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    device_peak_bytes: int = 0  # peak memory of tensors on a GPU
    batch: int = 0
    worker: str = ""  # address of the worker, which runs on `host`
    host: str = ""
    # Everything that decides on the last bits: see cpu_kind; then the name of
    # the GPU.
    cpu_kind: str = ""
    # By shape, the digest of a GPU's result for a fixed batch: see
    # finish.
    bits: dict[str, str] = field(default_factory=dict)
    # Seconds that the computing thread took for each block that is done.
    took: dict[int, float] = field(default_factory=dict)
    # Sums over each block, by block and name: one number for each shard.
    sums: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def enter(self, number: int, written: Iterable[WrittenBlock]) -> None:
        """Note what was written for a block, to each of its images."""
        digests = []
        for part in written:
            self.written_bytes += part.size_bytes
            digests.append(part.digest)
        self.digests[number] = b"".join(digests)


class BlockTask(Protocol):
    """Everything a worker needs to process any block of a job; pickles to a few kilobytes."""

    @property
    def grid(self) -> Grid:
        """The blocks."""

    @property
    def overlap(self) -> bool:
        """True if the next read and the last write run during the computation."""

    @property
    def io_threads(self) -> int:
        """Threads that read and write the chunks of a block in parallel."""

    @property
    def batch(self) -> int:
        """Tiles that are computed at once at first."""

    def stages(self) -> BlockStages:
        """The stages of a block, with the models loaded; called once on each worker."""


class BlockStages(Protocol):
    """The three stages of a block. Each adds its numbers to the receipt."""

    def check(self) -> None:
        """Refuse a denoiser that cannot be tiled, before the first block."""

    def read(self, block: Block) -> Any:
        """Read the inputs of the block; perhaps on an io thread, while another block is computed."""

    def compute(self, block: Block, what_was_read: Any, receipt: Receipt) -> Any:
        """Compute the result to write."""

    def write(self, block: Block, result: Any, receipt: Receipt) -> None:
        """Write the result durably; perhaps on an io thread."""

    def finish(self, receipt: Receipt) -> None:
        """Add the figures of the device to the receipt of several blocks."""


class BlockRunner:
    """Process blocks of one job in this process, with its models loaded once."""

    def __init__(self, task: BlockTask) -> None:
        self.grid = task.grid
        self.stages = task.stages()
        self.prefetch = Prefetch(overlap=task.overlap)

    def run(
        self,
        numbers: Iterable[int],  # blocks
        # called before each block; once it returns False, no further block begins. The receipt lists the blocks that
        # are done
        is_wanted: Callable[[], bool] = lambda: True,
        limit_seconds: float | None = None,  # time after which no further block begins, except the first
    ) -> Receipt:
        """Process these blocks. One that fails is reported; the others go on."""
        began = time.perf_counter()
        receipt = Receipt()
        blocks = (self.grid.block_at(number) for number in numbers)
        last = began
        late = began + (math.inf if limit_seconds is None else limit_seconds)
        for place, (block, fetched) in enumerate(self.prefetch.ahead(blocks, self.stages.read)):
            if not is_wanted() or (place and time.perf_counter() > late):
                break
            try:
                result = self.stages.compute(block, self._timed(receipt, fetched), receipt)
            except Exception as error:
                receipt.bad.append(self._bad(block, error))
                last = time.perf_counter()
                continue
            self.prefetch.behind(block, partial(self._write, block, result, receipt))
            del result  # else it would stay in memory until the next one is computed
            now = time.perf_counter()
            receipt.took[block.number], last = now - last, now
            self._collect(receipt)
        self.prefetch.finish()
        self._collect(receipt)
        receipt.seconds = time.perf_counter() - began
        receipt.peak_memory_bytes = peak_memory_bytes()
        receipt.cpu_kind = cpu_kind()
        self.stages.finish(receipt)
        return receipt

    def _write(self, block: Block, result: Any, receipt: Receipt) -> None:
        began = time.perf_counter()
        self.stages.write(block, result, receipt)
        receipt.write_seconds += time.perf_counter() - began

    def _collect(self, receipt: Receipt) -> None:
        """Note the blocks whose write has ended."""
        for block, error in self.prefetch.written():
            if error is None:
                receipt.done.append(block.number)
            else:
                receipt.bad.append(self._bad(block, error))

    @staticmethod
    def _timed(receipt: Receipt, fetched: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return fetched()
        finally:
            receipt.read_seconds += time.perf_counter() - began

    @staticmethod
    def _bad(block: Block, error: BaseException) -> BadBlock:
        if isinstance(error, InputError):
            # Bytes that could not be read may be readable later; refused data will be refused again.
            kind = "damaged" if isinstance(error, OSError) else "input"
        elif isinstance(error, OSError) and is_full(error):
            kind = "disk"
        else:
            kind = "task"
        lines = traceback.format_exception(error)
        return BadBlock(block.number, block.index, block.core, f"{type(error).__name__}: {error}", "".join(lines), kind)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process.

    From the kernel's VmHWM: ``ru_maxrss`` would include the memory of the parent when it started this process.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            mark = next(line for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resident_bytes()
    return int(mark.split()[1]) * 1024


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


ONE_BLOCK = Grid((1,), (1,), ((0, 0),))


@dataclass(frozen=True)
class WriteFile:
    """Writes a result, as a task of one block, whose stages are its own."""

    encode: Callable[[], bytes]  # returns the content of the file; called on a worker
    path: Path  # file to write
    layout: FileLayout
    grid: Grid = ONE_BLOCK
    overlap: bool = False
    io_threads: int = 1
    batch: int = 1

    def stages(self) -> Self:
        return self

    def check(self) -> None:
        """Nothing can be refused."""

    def read(self, block: Block) -> bytes:
        return self.encode()

    def compute(self, block: Block, what_was_read: bytes, receipt: Receipt) -> bytes:
        return what_was_read

    def write(self, block: Block, result: bytes, receipt: Receipt) -> None:
        """Write the file, unless another program has put one there."""
        with suppress(FileNotFoundError):
            if (present := self.path.read_bytes()) not in (b"", result):
                raise OutputRefused(
                    f"{self.path} has {len(present):,} bytes that no run wrote. Move it away and run again to write the result."
                )
        receipt.enter(block.number, [WrittenBlock(*self.layout.write(self.path, result))])

    def finish(self, receipt: Receipt) -> None:
        """There is no device."""
