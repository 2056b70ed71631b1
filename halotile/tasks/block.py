"""One block on one worker: read core and halo, denoise the tiles, write the core once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputError
from halotile.storage.disk import is_full
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.output import ShardWriter, to_dtype
from halotile.storage.rim import Pixels, Readable, Rim, read_window
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.device import Device
from halotile.tasks.lanes import Lanes
from halotile.tasks.roles import Roles
from halotile.tasks.sound import check_picture, check_side
from halotile.tasks.window import TileRunner, Tiling


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
    bad: list[BadBlock] = field(default_factory=list)
    pixels: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    write_seconds: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    batch: int = 0
    worker: str = ""


@dataclass(frozen=True)
class BlockTask:
    """Everything a worker must know to process any block of a job; pickles to a few kilobytes."""

    source: Readable
    sides: dict[str, Readable]
    writer: ShardWriter
    grid: Grid
    rim: Rim
    roles: Roles
    denoiser: Denoiser
    tiling: Tiling
    channels_out: int
    precision: str
    on_nan: str
    overlap: bool


class BlockRunner:
    """Processes blocks of one job in this process; the model is loaded once."""

    def __init__(self, task: BlockTask, device: str = "cpu") -> None:
        self.task = task
        spatial = len(task.roles.spatial)
        channels_last = task.denoiser.convolutional and spatial == 2
        self.tiles = TileRunner(
            task.denoiser.build(),
            Device(device, task.precision, channels_last),
            task.tiling,
            task.denoiser.title,
        )
        self.lanes = Lanes(overlap=task.overlap)

    def run(self, numbers: Iterable[int], is_wanted: Callable[[], bool] = lambda: True) -> Receipt:
        """Process these blocks. One that fails is reported; the others go on.

        Parameters
        ----------
        numbers : iterable of int
            The blocks.
        is_wanted : callable
            Asked before each block: once it says no, none is begun any more. What is done is in the receipt.
        """
        began = time.perf_counter()
        receipt = Receipt()
        blocks = (self.task.grid.block_at(number) for number in numbers)
        for block, fetched in self.lanes.ahead(blocks, self._read):
            if not is_wanted():
                break
            try:
                pixels, sides = self._timed(receipt, "read_seconds", fetched)
                result = self._denoise(block, pixels, sides, receipt)
            except Exception as error:
                receipt.bad.append(self._bad(block, error))
                continue
            receipt.read_bytes += pixels.nbytes + sum(side.nbytes for side in sides.values())
            del pixels, sides
            self.lanes.behind(block, partial(self._write, block, result, receipt))
            self._collect(receipt)
        self.lanes.finish()
        self._collect(receipt)
        receipt.seconds = time.perf_counter() - began
        receipt.peak_memory_bytes = peak_memory_bytes()
        receipt.batch = self.tiles.batch
        return receipt

    def _read(self, block: Block) -> tuple[Pixels, dict[str, Pixels]]:
        task = self.task
        pixels = read_window(task.source, block.window, task.rim)
        if task.on_nan == "fail":
            check_picture(pixels, task.source, block.window, task.rim, task.roles.axes)
        return pixels, {name: self._read_side(name, side, block) for name, side in task.sides.items()}

    def _read_side(self, name: str, side: Readable, block: Block) -> Pixels:
        """A side input of the picture's shape, or of its tiled axes alone."""
        window, rim, axes = block.window, self.task.rim, self.task.roles.axes
        if len(side.shape) != len(self.task.grid.shape):
            spatial = self.task.roles.spatial
            window = self.task.roles.spatial_part(window)
            rim = Rim(tuple(rim.rules[i] for i in spatial))
            axes = tuple(axes[i] for i in spatial)
        pixels = read_window(side, window, rim)
        check_side(name, pixels, side, window, rim, axes, self.task.tiling.range)
        return pixels

    def _denoise(
        self, block: Block, pixels: Pixels, sides: dict[str, Pixels], receipt: Receipt
    ) -> NDArray[Any]:
        task, roles = self.task, self.task.roles
        began = time.perf_counter()
        written = roles.output_region(block.core, task.tiling.scale, task.channels_out)
        result = np.empty(written.shape, task.writer.layout.dtype)
        reach = task.rim.reach(block.window, task.grid.shape)
        arranged = {name: self._arrange_side(side) for name, side in sides.items()}
        mask = arranged.pop("mask", None)
        self.tiles(
            roles.arrange(pixels),
            roles.spatial_part(reach),
            roles.spatial_part(block.core),
            roles.arrange(result),
            arranged,
        )
        if mask is not None:
            inner: tuple[Any, ...] = (
                ...,
                *roles.spatial_part(block.core).relative_to(roles.spatial_part(reach)).slices,
            )
            _keep_masked(roles.arrange(result), roles.arrange(pixels)[inner], mask[inner])
        receipt.compute_seconds += time.perf_counter() - began
        receipt.pixels += block.core.size
        return result

    def _arrange_side(self, side: Pixels) -> NDArray[Any]:
        roles = self.task.roles
        if side.ndim == len(roles.axes):
            return roles.arrange(side)
        return side[(None,) * (len(roles.looped) + 1)]

    def _write(self, block: Block, result: NDArray[Any], receipt: Receipt) -> None:
        began = time.perf_counter()
        region = self.task.roles.output_region(block.core, self.task.tiling.scale, self.task.channels_out)
        receipt.written_bytes += self.task.writer.write(region, result)
        receipt.write_seconds += time.perf_counter() - began

    def _collect(self, receipt: Receipt) -> None:
        """Note the blocks whose write has ended."""
        for block, error in self.lanes.written():
            if error is None:
                receipt.done.append(block.number)
            else:
                receipt.bad.append(self._bad(block, error))

    def _timed(self, receipt: Receipt, phase: str, fetched: Any) -> Any:
        began = time.perf_counter()
        try:
            return fetched()
        finally:
            setattr(receipt, phase, getattr(receipt, phase) + time.perf_counter() - began)

    @staticmethod
    def _bad(block: Block, error: BaseException) -> BadBlock:
        if isinstance(error, InputError):
            kind = "damaged" if isinstance(error, DamagedData) else "input"
        elif isinstance(error, OSError) and is_full(error):
            kind = "disk"
        else:
            kind = "task"
        lines = traceback.format_exception(error)
        return BadBlock(
            block.number, block.index, block.core, f"{type(error).__name__}: {error}", "".join(lines), kind
        )


def _keep_masked(result: NDArray[Any], original: NDArray[Any], mask: NDArray[Any]) -> None:
    """Where the mask is 0, the pixel stays as it was."""
    kept = np.broadcast_to(mask == 0, result.shape)
    result[kept] = to_dtype(original[kept], result.dtype)


def peak_memory_bytes() -> int:
    """The most resident memory this process has had.

    The kernel's own mark for it: ``ru_maxrss`` would count what the parent had when it started us.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            mark = next(line for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)
    return int(mark.split()[1]) * 1024
