"""One block on one worker: read, compute, write, the next read and the last write beside the computation."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import psutil

from halotile.errors import InputError
from halotile.storage.disk.durable import is_full
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.sharded.output import WrittenBlock
from halotile.tasks.devices.cpu_kind import cpu_kind
from halotile.tasks.devices.prefetch import Prefetch


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that could not be computed, and why."""

    number: int
    index: tuple[int, ...]
    region: Region
    error: str
    traceback: str
    kind: str
    """``input`` (refused data: no retry helps), ``damaged`` (of the input), ``disk`` (no space), or ``task``."""


@dataclass(slots=True)
class Receipt:
    """What a worker reports of the blocks it was given: a few hundred bytes, never pixels."""

    done: list[int] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)
    """By block, the digest of what was written of it; of several images those, one after the other."""
    bad: list[BadBlock] = field(default_factory=list)
    pixels: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    write_seconds: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    device_peak_bytes: int = 0
    """The most that tensors held on a GPU."""
    batch: int = 0
    worker: str = ""
    cpu_kind: str = ""
    """What decided on the last bits: see :func:`~halotile.tasks.devices.cpu_kind.cpu_kind`."""
    took: dict[int, float] = field(default_factory=dict)
    """How long the computing thread was at each block that is done, in seconds."""
    sums: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """What was added up over each block, by block and name: one number for each shard."""

    def enter(self, number: int, written: Iterable[WrittenBlock]) -> None:
        """Note what was written of a block, to each of its images."""
        digests = []
        for each in written:
            self.written_bytes += each.size_bytes
            digests.append(each.digest)
        self.digests[number] = b"".join(digests)


class BlockTask(Protocol):
    """Everything a worker must know to process any block of a job; pickles to a few kilobytes."""

    @property
    def grid(self) -> Grid:
        """The blocks."""
        ...

    @property
    def overlap(self) -> bool:
        """Whether the next read and the last write go on beside the computation."""
        ...

    @property
    def io_threads(self) -> int:
        """Threads that read and write the pieces of a block side by side."""
        ...

    @property
    def batch(self) -> int:
        """Tiles that are computed at once, to begin with."""
        ...

    def stages(self) -> Stages:
        """What is done to a block, with the models loaded; called once on each worker."""
        ...


class Stages(Protocol):
    """The three stages of a block. Each adds what it has to tell to the receipt."""

    @property
    def batch(self) -> int:
        """Tiles that are computed at once, by now."""
        ...

    @property
    def device_peak_bytes(self) -> int:
        """The most that they held on a GPU; 0 where there is none."""
        ...

    def check(self) -> None:
        """Refuse what cannot be tiled, before the first block."""
        ...

    def read(self, block: Block) -> Any:
        """What the block needs; perhaps on a thread of its own, while another block is computed."""
        ...

    def compute(self, block: Block, what_was_read: Any, receipt: Receipt) -> Any:
        """What is to be written."""
        ...

    def write(self, block: Block, result: Any, receipt: Receipt) -> None:
        """Write it, durably; perhaps on a thread of its own."""
        ...


class BlockRunner:
    """Processes blocks of one job in this process; what the job needs is loaded once."""

    def __init__(self, task: BlockTask) -> None:
        self.grid = task.grid
        self.stages = task.stages()
        self.prefetch = Prefetch(overlap=task.overlap)

    def run(
        self,
        numbers: Iterable[int],
        is_wanted: Callable[[], bool] = lambda: True,
        limit_seconds: float | None = None,
    ) -> Receipt:
        """Process these blocks. One that fails is reported; the others go on.

        Parameters
        ----------
        numbers : iterable of int
            The blocks.
        is_wanted : callable
            Asked before each block: once it says no, none is begun any more. What is done is in the receipt.
        limit_seconds : float, optional
            After so long no block is begun either, but for the first.
        """
        began = time.perf_counter()
        receipt = Receipt()
        blocks = (self.grid.block_at(number) for number in numbers)
        turned = began
        late = began + (math.inf if limit_seconds is None else limit_seconds)
        for place, (block, fetched) in enumerate(self.prefetch.ahead(blocks, self.stages.read)):
            if not is_wanted() or (place and time.perf_counter() > late):
                break
            try:
                result = self.stages.compute(block, self._timed(receipt, fetched), receipt)
            except Exception as error:
                receipt.bad.append(self._bad(block, error))
                turned = time.perf_counter()
                continue
            self.prefetch.behind(block, partial(self._write, block, result, receipt))
            del result  # it would be held until the next one is there
            now = time.perf_counter()
            receipt.took[block.number], turned = now - turned, now
            self._collect(receipt)
        self.prefetch.finish()
        self._collect(receipt)
        receipt.seconds = time.perf_counter() - began
        receipt.peak_memory_bytes = peak_memory_bytes()
        receipt.device_peak_bytes = self.stages.device_peak_bytes
        receipt.batch = self.stages.batch
        receipt.cpu_kind = cpu_kind()
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
            # Bytes that could not be had may be there at another try; what is refused once is refused again.
            kind = "damaged" if isinstance(error, OSError) else "input"
        elif isinstance(error, OSError) and is_full(error):
            kind = "disk"
        else:
            kind = "task"
        lines = traceback.format_exception(error)
        return BadBlock(
            block.number, block.index, block.core, f"{type(error).__name__}: {error}", "".join(lines), kind
        )


def peak_memory_bytes() -> int:
    """The most resident memory this process has had.

    The kernel's own mark for it: ``ru_maxrss`` would count what the parent had when it started us.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            mark = next(line for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resident_bytes()
    return int(mark.split()[1]) * 1024


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(psutil.Process().memory_info().rss)
