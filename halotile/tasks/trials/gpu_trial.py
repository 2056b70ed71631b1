"""Trials of a device with the model of a job: the fastest tile and batch, their memory, and the cost of each precision."""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import BlockFailed, HalotileError, MemoryRefused
from halotile.storage.grid import Block, Region
from halotile.tasks.block import resident_bytes
from halotile.tasks.denoise_block import DenoiseStages, DenoiseTask
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import open_device
from halotile.tasks.inner_tiles import QueuedCore, StagedBlock, TileRunner, cut_evenly, windows_of

SECONDS = 20.0  # time after which no other tile or batch is tried
COMPARE_SECONDS = 60.0  # time after which no other precision is tried
WHOLE_SECONDS = 1.0  # a block that takes longer is not computed; its time is extrapolated from the first batch
LATE_SECONDS = 90.0  # time after which no variant of the best is tried
# Launching a batch takes a few milliseconds at most: if it computes longer than this, a recording saves nothing.
LAUNCH_SECONDS = 0.05
GAIN = 0.03  # smaller gains are noise: of two sizes this close the one that needs less memory is taken
PATIENCE = 2  # number of batches without a gain after which no larger one is tried
DEEP = 1.25  # tiles with this much more redundancy than the best are tried only if no other fits in memory
COMPARED = 256  # edge of the tile on which precisions are compared, small enough for a CPU
ROOM = 0.9  # fraction of the free memory that is planned with: the allocator needs the rest
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class TrialRequest:
    """Options of a trial."""

    tiles: tuple[tuple[int, ...], ...]  # edges of the tiles to try, on the tiled axes, in pixels
    batch: int | None = None  # only batch to try
    sharing: int = 1  # number of processes that share the device
    layouts: bool = False  # whether to try the other memory layout
    compare: bool = False  # whether to try all precisions


@dataclass(frozen=True)
class TileTrial:
    """Time and memory of a tile and batch."""

    tile: tuple[int, ...]
    batch: int
    seconds: float  # time for one block, including its halo and the padding of its last batch
    batch_bytes: int  # peak memory of a batch on the device, without the block and the model


@dataclass(frozen=True)
class Precision:
    """Time and error of a precision."""

    name: str  # as in a job
    seconds: float | None = None  # time for one block; None if it does not run here
    # largest difference from float32 on a CPU, relative to the largest pixel; None if unknown
    error: float | None = None
    why_not: str = ""  # reason if it does not run here, or has no error


@dataclass(frozen=True)
class Tuned:
    """Result of a trial."""

    device: str  # name of the device
    tile: tuple[int, ...]  # tile, batch: fastest
    batch: int
    channels_last: bool  # whether activations are faster channels last
    records: bool  # whether recording the launches of a batch pays
    megapixels_per_second: float  # speed of a block with these, without reading and writing
    # peak memory of a worker on the device: model, blocks in flight, one batch. 0 for a CPU
    device_bytes: int
    free_bytes: int | None  # memory that a worker may take on the device; None on a CPU
    host_bytes: int  # resident memory of a process that has opened the device and loaded the model
    block_pixels: int
    tried: tuple[TileTrial, ...]  # all tiles and batches that were tried
    precisions: tuple[Precision, ...] = ()  # all precisions, if they were compared

    @property
    def seconds_per_block(self) -> float:
        """Time for a block, without reading and writing."""
        return self.block_pixels / 1e6 / self.megapixels_per_second

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore the result from :meth:`to_json`.

        >>> tuned = Tuned("this CPU", (64, 64), 2, True, False, 9.5, 0, None, 10**9, 4096, (TileTrial((64, 64), 2, 0.1, 0),))
        >>> import json
        >>> Tuned.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned
        True
        """
        tried = tuple(TileTrial(**each | {"tile": tuple(each["tile"])}) for each in values["tried"])
        precisions = tuple(Precision(**each) for each in values["precisions"])
        return cls(**values | {"tile": tuple(values["tile"]), "tried": tried, "precisions": precisions})


def tune(task: DenoiseTask, request: TrialRequest, device: Device | None = None) -> Tuned:
    """Try tiles and batches on a block from the middle of the image.

    ``task``: job, with any tile; ``request``: tiles to try, and options; ``device``: by default that of the job.
    """
    trial = _Trial(task, device)
    tried = list(trial.search(request))
    if not tried:
        shared = f", shared with {request.sharing - 1} other workers" if request.sharing > 1 else ""
        raise MemoryRefused(
            f"{trial.device.title} has no memory for one tile of {' × '.join(map(str, request.tiles[-1]))} pixels"
            f"{shared}. Write a smaller tile.size or fewer run.workers, or stop other programs that use the device."
        )
    fastest = min(each.seconds for each in tried)
    best = min((each for each in tried if each.seconds <= (1 + GAIN) * fastest), key=lambda each: each.batch_bytes)
    precisions = tuple(trial.compare(best)) if request.compare else ()
    if request.layouts:
        best = trial.other_layout(best, request.sharing) or best
    # Last: a process whose recording failed may be unable to allocate any more.
    recorded = trial.recorded(best, request.sharing)
    best = recorded or best
    pixels = trial.block.core.size
    return Tuned(
        device=trial.device.title,
        tile=best.tile,
        batch=best.batch,
        channels_last=trial.device.channels_last,
        records=recorded is not None,
        megapixels_per_second=pixels / 1e6 / best.seconds,
        device_bytes=trial.planned(best.batch_bytes, records=recorded is not None),
        free_bytes=trial.free_bytes(request.sharing),
        host_bytes=trial.host_bytes,
        block_pixels=pixels,
        tried=tuple(tried),
        precisions=precisions,
    )


class _Trial:
    """A block on the device, and a model to try on it."""

    def __init__(self, task: DenoiseTask, device: Device | None) -> None:
        self.task = task
        self.began = time.perf_counter()
        opened = device or open_device(task.device, task.precision, task.channels_last, task.records)
        stages = DenoiseStages(task, opened)
        assert isinstance(stages.tiles, TileRunner)
        self.runner = stages.tiles
        self.device = self.runner.device
        self.device.warm_up()
        self.host_bytes = resident_bytes()
        self.idle_bytes = self.device.allocated_bytes()
        self.free = self.device.free_bytes()
        self.block = task.grid.middle
        self.staged = _staged(stages, self.block)
        roles = task.roles
        self.reach = roles.spatial_part(task.rim.reach(self.block.window, task.grid.shape))
        self.core = roles.spatial_part(self.block.core)
        self.planes = tuple(self.block.core.shape[i] for i in roles.looped)
        self.channels = task.channels_out if roles.channel is not None else 1
        self.window_bytes = self.device.allocated_bytes() - self.idle_bytes
        pixels = math.prod(self.planes) * self.channels * self.core.size
        size: int = np.dtype(task.tiling.work_dtype).itemsize
        self.result_bytes = pixels * int(task.tiling.scale ** len(self.core.shape)) * size

    def free_bytes(self, sharing: int) -> int | None:
        """Memory that each of ``sharing`` workers may take on the device."""
        return None if self.free is None else int(ROOM * (self.idle_bytes + self.free) / sharing)

    def planned(self, batch_bytes: int, *, records: bool = False) -> int:
        """Peak memory of a worker on the device; 0 for a CPU."""
        if self.free is None:
            return 0
        # What copies used comes back a moment after them: of the block before, it may still be there.
        if not self.task.overlap:
            return self.idle_bytes + 2 * (self.window_bytes + self.result_bytes) + batch_bytes
        # A block is queued long before it is computed. While its batches run, only the window before it is still in memory; the
        # next one comes when they are done. Two results: its own, and the one that is being copied back.
        # A recording keeps the memory of its batch all the time.
        before = 3 if records else 2
        windows = max(before * self.window_bytes + batch_bytes, 3 * self.window_bytes)
        return self.idle_bytes + windows + 2 * self.result_bytes

    def search(self, request: TrialRequest) -> Iterator[TileTrial]:
        """Try larger and larger batches of each tile, until they gain nothing or do not fit in memory."""
        found, failure = 0, None
        tiles = sorted(request.tiles, key=self._redundancy)  # those with the fewest computed pixels first
        for tile in tiles:
            if found and self._redundancy(tile) > DEEP * self._redundancy(tiles[0]):
                return
            fastest, idle = math.inf, 0
            for batch in self._batches(tile, request.batch):
                if found and self.seconds > SECONDS:
                    return
                try:
                    tried = self.time(tile, batch)
                except HalotileError:
                    raise
                except Exception as error:  # such as a limit of a library on the size of an image
                    if self.device.is_lost():
                        raise
                    failure = error
                    break
                if tried is None or not self._fits(tried, request.sharing):
                    break
                yield tried
                found += 1
                idle = 0 if tried.seconds < (1 - GAIN) * fastest else idle + 1
                fastest = min(fastest, tried.seconds)
                if idle >= PATIENCE:
                    break
        if failure is not None and not found:
            raise failure

    @property
    def seconds(self) -> float:
        """Time since the trial began."""
        return time.perf_counter() - self.began

    def _redundancy(self, tile: tuple[int, ...]) -> float:
        """Computed pixels for each pixel of a block, with this tile."""
        axes = zip(self.core.start, self.core.stop, tile, self.task.tiling.align, strict=True)
        counts = [len(cut_evenly(*axis)) for axis in axes]
        grown = zip(self.core.shape, counts, self.task.tiling.depth, strict=True)
        return math.prod(1 + count * (before + after) / n for n, count, (before, after) in grown)

    def _batches(self, tile: tuple[int, ...], only: int | None) -> Iterator[int]:
        if only is not None:
            yield only
            return
        most = self._count(tile)
        yield from itertools.takewhile(lambda batch: batch < most, (2**k for k in range(30)))
        yield most

    def _count(self, tile: tuple[int, ...]) -> int:
        """Number of tiles of a block, over all its planes."""
        tiling = replace(self.task.tiling, tile=tile)
        return sum(1 for _ in windows_of(self.core, self.reach, self.planes, tiling))

    def _fits(self, tried: TileTrial, sharing: int, *, records: bool = False) -> bool:
        free = self.free_bytes(sharing)
        return free is None or self.planned(tried.batch_bytes, records=records) <= free

    def time(self, tile: tuple[int, ...], batch: int, device: Device | None = None) -> TileTrial | None:
        """Measure the time of a block and the memory of a batch; None if memory runs out."""
        device = device or self.device
        runner = self._runner(tile, batch, device)
        first = next(windows_of(self.core, self.reach, self.planes, runner.tiling)).core
        before = device.allocated_bytes()
        device.reset_peak()
        planes = math.prod(self.planes)
        batches = -(-self._count(tile) // batch) / -(-planes // batch)
        try:
            self._compute(runner, first)  # the first call loads libraries and chooses algorithms
            one = self._compute(runner, first)
            seconds = one * (batches if device.one_shape else self._count(tile) / planes)
            result_bytes = self.result_bytes * first.size // self.core.size
            if seconds < WHOLE_SECONDS:  # twice: the first call meets new margins
                seconds = min(self._compute(runner, self.core) for _ in range(2))
                result_bytes = self.result_bytes
            batch_bytes = max(0, device.peak_bytes() - before - result_bytes)
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            device.release_cache()
            return None
        return TileTrial(tile, batch, seconds, batch_bytes) if runner.batch == batch else None

    def other_layout(self, best: TileTrial, sharing: int) -> TileTrial | None:
        """Try the best in the other memory layout, and keep that if it is faster; else None."""
        device = self.device.with_layout(not self.device.channels_last)
        tried = self._time_variant(best, device)
        if tried is None or tried.seconds >= (1 - GAIN) * best.seconds or not self._fits(tried, sharing):
            return None
        self.device = device
        return tried

    def recorded(self, best: TileTrial, sharing: int) -> TileTrial | None:
        """Try the best with recording; None if that does not pay."""
        device = self.device.with_recording()
        batches = -(-self._count(best.tile) // best.batch)
        if device is None or best.seconds / batches > LAUNCH_SECONDS:
            return None
        tried = self._time_variant(best, device)
        pays = tried is not None and device.records and tried.seconds < (1 - GAIN) * best.seconds
        return tried if tried is not None and pays and self._fits(tried, sharing, records=True) else None

    def _time_variant(self, best: TileTrial, device: Device) -> TileTrial | None:
        """As :meth:`time`, but None for any failure: the best is known already."""
        if self.seconds > LATE_SECONDS:
            return None
        try:
            return self.time(best.tile, best.batch, device)
        except Exception:
            return None

    def _runner(self, tile: tuple[int, ...], batch: int, device: Device) -> TileRunner:
        tiling = replace(self.task.tiling, tile=tile, batch=batch)
        return TileRunner(self.runner.model, device, tiling, self.runner.name)

    def _compute(self, runner: TileRunner, core: Region) -> float:
        computed = runner.launch(self.staged, self.reach, core, self.channels)
        _pixels(computed)
        return max(computed.seconds, 1e-9)

    def compare(self, best: TileTrial) -> Iterator[Precision]:
        """Compare each precision with float32 on a CPU, on the first tile of the block."""
        small = tuple(-(-min(t, COMPARED) // k) * k for t, k in zip(best.tile, self.task.tiling.align, strict=True))
        windows = windows_of(self.core, self.reach, self.planes, replace(self.task.tiling, tile=small))
        core = next(windows).core
        exact = self._compute_on_cpu(core, small)
        began = time.perf_counter()
        for name in PRECISIONS:
            if time.perf_counter() - began > COMPARE_SECONDS:
                yield Precision(name, why_not=f"not tried: {COMPARE_SECONDS:.0f} s had passed")
                continue
            if name != "float32" and not self.task.denoiser.convolutional:
                yield Precision(name, why_not="for networks only: this denoiser computes in float32")
                continue
            if name == "tf32" and self.device.kind == "cpu":
                yield Precision(name, why_not="on GPUs only")
                continue
            device = self.device.with_precision(name)
            try:
                tried = self.time(best.tile, best.batch, device)
                runner = self._runner(small, 1, device)
                pixels = _pixels(runner.launch(self.staged, self.reach, core, self.channels))
            except Exception as failure:  # an entry in the table
                yield Precision(name, why_not=f"{type(failure).__name__}: {failure}".partition("\n")[0])
                continue
            if tried is None:
                yield Precision(name, why_not="not enough memory")
                continue
            error = _difference(pixels, exact)
            yield Precision(name, tried.seconds, error, "some pixels are NaN or infinite" if error is None else "")

    def _compute_on_cpu(self, core: Region, tile: tuple[int, ...]) -> NDArray[Any]:
        stages = DenoiseStages(self.task, Device("cpu", "float32", self.device.channels_last))
        assert isinstance(stages.tiles, TileRunner)
        tiling = replace(self.task.tiling, tile=tile, batch=1)
        runner = TileRunner(stages.tiles.model, stages.tiles.device, tiling, self.runner.name)
        return _pixels(runner.launch(_staged(stages, self.block), self.reach, core, self.channels))


def _staged(stages: DenoiseStages, block: Block) -> StagedBlock:
    """Read and stage a block, or random pixels if it cannot be read: the run reports damaged blocks."""
    with suppress(HalotileError, OSError):
        return stages.read(block).staged
    task, roles = stages.task, stages.task.roles
    shape = task.rim.reach(block.window, task.grid.shape).shape
    low, high = task.tiling.range or (0.0, 1.0)
    pixels = (low + (high - low) * np.random.default_rng(0).random(shape)).astype(task.source.dtype)
    level = np.full((*(1 for _ in (*roles.looped, 0)), *(shape[i] for i in roles.spatial)), 0.1, np.float32)
    return stages.tiles.stage(roles.arrange(pixels), {name: level for name in task.sides if name != "mask"})


def _pixels(computed: QueuedCore) -> NDArray[Any]:
    """Collect the pixels, or infinity where a run would refuse them."""
    with suppress(BlockFailed):
        return computed.collect()
    return np.array([np.inf])


def _difference(pixels: NDArray[Any], exact: NDArray[Any]) -> float | None:
    """The largest difference, relative to the largest pixel; None if a pixel is NaN or infinite.

    >>> _difference(np.array([1.0, 2.0]), np.array([1.0, 2.5])), _difference(np.array([np.inf]), np.array([1.0]))
    (0.2, None)
    """
    finite = np.isfinite(exact)
    if pixels.shape != exact.shape or not np.isfinite(pixels[finite]).all():
        return None
    largest = np.abs(exact[finite]).max(initial=0.0)
    return float(np.abs(pixels - exact)[finite].max(initial=0.0) / (largest or 1.0))
