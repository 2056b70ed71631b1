"""A block of a denoising job: read core and halo, denoise the tiles, write the core once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from halotile.errors import InputError
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window, source_positions
from halotile.storage.sharded.layout import avoid_value
from halotile.storage.sharded.output import ShardWriter, WrittenBlock, to_dtype
from halotile.storage.views import PlaneValues, axes_of_side, side_at
from halotile.tasks.block import Receipt
from halotile.tasks.denoisers.base import Denoiser, Pixelwise, PlaneFilter
from halotile.tasks.denoisers.common.photon_denoiser import PhotonDenoiser
from halotile.tasks.devices.device import Device, all_finite, unless_lost
from halotile.tasks.devices.gpu import open_device
from halotile.tasks.holes import Holes, Valid, fill_from_nearest, measured_at
from halotile.tasks.image_task import keep_on_gpus
from halotile.tasks.inner_tiles import FilteredCore, PlaneRunner, QueuedCore, Roles, StagedBlock, TileRunner, Tiling
from halotile.tasks.noise.defects import Defects, Places, Repaired
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.stripes import WithoutStripes
from halotile.tasks.trials.probe import check_purity
from halotile.tasks.trials.provenance import build_sealed

_LINES = {"y": "row", "x": "column"}


def check_image(pixels: Pixels, source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> None:
    """Refuse NaN and infinity in a window of the image."""
    if not all_finite(pixels):
        where = describe(~np.isfinite(pixels), source, window, rim, axes)
        raise InputError(
            f"the input holds NaN or infinity in {where}. Repair the image, or write run.on_nan: propagate."
        )


def check_side(
    name: str,
    pixels: NDArray[Any],
    source: Readable,
    window: Region,
    rim: Rim,
    axes: Sequence[str],
    values: tuple[float, float] | None = None,
) -> None:
    """Refuse NaN and infinity in a window of a side input, and negative noise.

    Where the image is mapped from ``values`` to 0..1, noise above 1 is refused as well: it is in the units of the
    stored pixels then.
    """
    if name == "sigma" and values is not None and pixels.size and pixels.max() > 1:
        raise InputError(
            f"the side input sigma holds {float(pixels.max()):g}. {describe_range(values)} "
            f"Divide the map by {values[1] - values[0]:g}."
        )
    noise = name == "sigma" and pixels.dtype.kind in "if"
    if all_finite(pixels) and not (noise and pixels.min() < 0):
        return
    bad = ~np.isfinite(pixels) | (pixels < 0 if noise else False)
    what = "NaN, infinity or negative values" if noise else "NaN or infinity"
    where = describe(bad, source, window, rim, axes)
    raise InputError(f"the side input {name} holds {what} in {where}. Repair input.sides.{name}.")


def describe_range(values: tuple[float, float], what: str = "noise") -> str:
    """The unit of a noise level or a strength where the image is mapped from a range of values."""
    return f"The image's {values[0]:g} to {values[1]:g} are denoised as 0 to 1, and {what} is in units of that range."


def describe(bad: NDArray[Any], source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> str:
    """Name the part of an image that a window covers, and its first bad pixel."""
    inside = window.clip(Region.whole(source.shape))
    part = ", ".join(
        f"{_LINES.get(axis, axis)}{'s' if axis in _LINES else ''} {a}–{b - 1}"
        for axis, a, b in zip(axes, inside.start, inside.stop, strict=True)
    )
    first = np.unravel_index(int(bad.argmax()), bad.shape)
    # Pixels beyond the edge of the image are those that the rim rule took from inside.
    at = [
        int(source_positions(a, b, n, rule)[i])
        for a, b, n, rule, i in zip(window.start, window.stop, source.shape, rim.rules, first, strict=True)
    ]
    place = ", ".join(f"{_LINES.get(axis, axis)} {i}" for axis, i in zip(axes, at, strict=True))
    return f"{part}; the first is at {place}"


@dataclass(frozen=True)
class DenoiseTask:
    """A denoising job, as a worker needs it for any block."""

    source: Readable
    sides: dict[str, Readable]
    writer: ShardWriter
    grid: Grid
    rim: Rim
    roles: Roles
    denoiser: Denoiser
    tiling: Tiling
    channels_out: int
    device: str
    precision: str
    on_nan: str
    overlap: bool
    holes: Holes | None = None  # values without a measurement; None if every value is one
    defects: Defects | None = None  # pixels that are replaced before anything is computed
    channels_last: bool = False
    io_threads: int = 1  # threads that read and write the chunks of a block in parallel
    records: bool = False  # true if a GPU records the launches of a batch: see `Gpu`
    # digests of the files and the code that the denoiser must be built from: see `seals_of`
    seals: Mapping[str, str] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.tiling.batch

    @property
    def parts(self) -> tuple[DenoiseTask, ...]:
        """This task alone."""
        return (self,)

    def changed(self, change: Callable[[DenoiseTask], DenoiseTask]) -> DenoiseTask:
        """The task, changed."""
        return change(self)

    def at(self, region: Region) -> DenoiseTask:
        """The task that computes a region."""
        return self

    def stages(self) -> DenoiseStages:
        return DenoiseStages(self)

    def plane_filter(self) -> PlaneFilter | None:
        """The denoiser as a filter of planes, which needs no torch; None where blocks are cut into tiles."""
        is_plain = (self.device, self.precision, self.tiling.work_dtype) == ("cpu", "float32", "float32")
        if not is_plain or len(self.roles.spatial) != 2 or not isinstance(self.denoiser, Pixelwise):
            return None
        return self.denoiser.plane_filter()

    def measured(self, region: Region, pixels: Pixels) -> Valid:
        """True where pixels of a region were measured."""
        return measured_at(self.holes, self.sides.get("mask"), self.roles.spatial, region, pixels)

    def repaired(self) -> Readable:
        """The image with other values in the place of its defects."""
        if self.defects is None:
            return self.source
        return Repaired(self.source, self.roles.spatial, self.holes, self.sides.get("mask"), self.defects)


def has_noise_map(task: DenoiseTask) -> bool:
    """True where a job has a noise level for each pixel."""
    return "sigma" in task.sides and not isinstance(task.sides["sigma"], PlaneValues)


def noise_at(task: DenoiseTask, region: Region, level: ArrayLike) -> PhotonNoise:
    """The noise at a region in the units of the file: that of photons, or the map of the job, NaN where it is 0, or else of a level."""
    if "gain" in task.sides:
        return PhotonNoise.from_values(
            *(task.sides[name].read(region).astype(np.float64) for name in ("gain", "variance"))
        )
    if isinstance(task.denoiser, PhotonDenoiser):
        return task.denoiser.noise
    sigma = np.asarray(level)
    if has_noise_map(task):
        side, (low, high) = task.sides["sigma"], task.tiling.range or (0.0, 1.0)
        sigma = side_at(side, axes_of_side(side, task.roles.spatial, len(region.start)), region).astype(np.float64)
        sigma *= high - low
    return PhotonNoise(np.zeros(()), np.zeros(()), np.where(sigma > 0, sigma, np.nan))


@dataclass(frozen=True)
class ChannelsTask:
    """The tasks of channels with denoisers of their own: each reads and writes the whole image, and computes some channels of it."""

    parts: tuple[DenoiseTask, ...]
    of_channel: Mapping[int, int]  # place of the task of each channel

    @property
    def grid(self) -> Grid:
        return self.parts[0].grid

    @property
    def overlap(self) -> bool:
        return self.parts[0].overlap

    @property
    def io_threads(self) -> int:
        return self.parts[0].io_threads

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    def changed(self, change: Callable[[DenoiseTask], DenoiseTask]) -> ChannelsTask:
        """The same with every task changed."""
        return replace(self, parts=tuple(map(change, self.parts)))

    def at(self, region: Region) -> DenoiseTask:
        """The task that computes a region of one channel."""
        return self.parts[self.of_channel[region.start[self.parts[0].roles.axes.index("c")]]]

    def stages(self) -> ChannelStages:
        return ChannelStages(self)


AnyDenoiseTask = DenoiseTask | ChannelsTask


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """The staged pixels of a block, their size in bytes, and the arranged image with its holes if there are any."""

    staged: StagedBlock
    size: int
    holed: tuple[Pixels, Valid] | None
    # NaN and infinities of the core that are taken for measurements; None where the window has none.
    not_finite: int | None
    # Places of the defects of the core, from its start, and their values; None where defects are not looked for.
    defects: tuple[Places, Pixels] | None


@dataclass(frozen=True, slots=True)
class CoreImage:
    """A core to be written, and the arranged image with its holes if there are any."""

    computed: QueuedCore | FilteredCore
    holed: tuple[Pixels, Valid] | None
    not_finite: int | None
    defects: tuple[Places, Pixels] | None


class DenoiseStages:
    """Read, denoise, write."""

    def __init__(self, task: DenoiseTask, device: Device | None = None) -> None:
        self.task = task
        keep_on_gpus(())

        def make_tiles() -> TileRunner:
            return TileRunner(
                build_sealed(task.denoiser, task.seals),
                device or open_device(task.device, task.precision, task.channels_last, task.records),
                task.tiling,
                task.denoiser.title,
            )

        filter_plane, dtype = None if device else task.plane_filter(), task.writer.layout.dtype
        self.tiles = PlaneRunner(filter_plane, make_tiles, task.tiling, dtype) if filter_plane else make_tiles()
        self.tiles.device.reset_peak()

    def check(self) -> None:
        task = self.task
        if isinstance(self.tiles, PlaneRunner):
            return
        dims, dtype = len(task.roles.spatial), task.tiling.work_dtype
        check_purity(task.denoiser, dims, self.tiles.cpu_model, task.sides, dtype)

    def read(self, block: Block) -> ReadBlock:
        """Read the window of the image and of each side input, and stage them."""
        task, roles = self.task, self.task.roles
        image = task.repaired()
        pixels = read_window(image, block.window, task.rim, self.tiles.device.allocate)
        if task.on_nan == "fail":
            check_image(pixels, task.source, block.window, task.rim, roles.axes)
        given = original = roles.arrange(pixels)
        mask = self._read_side("mask", task.sides["mask"], block) if "mask" in task.sides else None
        valid = self._valid(original, None if mask is None else self._arrange_side(mask))
        sides = {name: self._read_side(name, side, block, valid) for name, side in task.sides.items() if name != "mask"}
        size = pixels.nbytes + sum(side.nbytes for side in (*sides.values(), mask) if side is not None)
        arranged = {name: self._arrange_side(side) for name, side in sides.items()}
        if valid is not None:
            original = self.tiles.device.owned(original)
            given = self._without_holes(original, valid)
            if task.denoiser.takes_valid:
                arranged["valid"] = valid.astype(np.uint8)
        not_finite = None
        if task.on_nan != "fail" and not (task.holes and task.holes.nan) and not all_finite(pixels):
            core = block.core.relative_to(task.rim.reach(block.window, task.grid.shape))
            not_finite = int(np.count_nonzero(~np.isfinite(pixels[core.slices])))
        with unless_lost(self.tiles.device):
            staged = self.tiles.stage(given, arranged)
        defects = image.defects_of(block.core) if isinstance(image, Repaired) else None
        if defects and task.defects and task.defects.are_kept and isinstance(task.source, WithoutStripes):
            defects = defects[0], task.source.source.read(block.core)[tuple(defects[0].T)]  # as they are stored
        return ReadBlock(staged, size, None if valid is None else (original, valid), not_finite, defects)

    def _valid(self, pixels: Pixels, mask: Pixels | None) -> Valid | None:
        """The pixels of a block that were measured and are not masked; None where all are."""
        valid = self.task.holes.valid(pixels) if self.task.holes else None
        if mask is None or mask.all():
            return valid
        kept = np.broadcast_to(np.asarray(mask != 0), pixels.shape)
        return kept if valid is None else np.logical_and(valid, kept)

    def _without_holes(self, pixels: Pixels, valid: Valid) -> Pixels:
        """A copy whose holes are 0, for a denoiser that leaves them out, or else filled."""
        if self.task.denoiser.takes_valid:
            return np.where(valid, pixels, pixels.dtype.type(0))
        mean = self.task.holes.mean if self.task.holes else 0.0
        return fill_from_nearest(pixels, valid, len(self.task.roles.spatial), mean)

    def compute(self, block: Block, what_was_read: ReadBlock, receipt: Receipt) -> CoreImage:
        """Denoise the core; on a GPU, without waiting for the result."""
        task, roles = self.task, self.task.roles
        reach = task.rim.reach(block.window, task.grid.shape)
        channels = task.channels_out if roles.channel is not None else 1
        with unless_lost(self.tiles.device):
            computed = self.tiles.launch(
                what_was_read.staged, roles.spatial_part(reach), roles.spatial_part(block.core), channels
            )
        receipt.pixels += block.core.size
        receipt.read_bytes += what_was_read.size
        return CoreImage(computed, what_was_read.holed, what_was_read.not_finite, what_was_read.defects)

    def write(self, block: Block, result: CoreImage, receipt: Receipt) -> None:
        with unless_lost(self.tiles.device), result.computed.borrowed() as pixels:
            receipt.compute_seconds += result.computed.seconds
            receipt.enter(block.number, [self.written(block, pixels, result, receipt)])

    def written(self, block: Block, pixels: Pixels, result: CoreImage, receipt: Receipt) -> WrittenBlock:
        """Write the computed pixels of a core."""
        task, roles = self.task, self.task.roles
        nodata = task.writer.layout.nodata
        are_kept = task.defects is not None and task.defects.are_kept
        if nodata is not None or result.holed is not None or are_kept:  # else the writer converts shard by shard
            pixels = to_dtype(pixels, task.writer.layout.dtype)
        if nodata is not None:
            avoid_value(pixels, nodata)
        if result.holed is not None:
            original, valid = result.holed
            reach = roles.spatial_part(task.rim.reach(block.window, task.grid.shape))
            inner: tuple[Any, ...] = (..., *roles.spatial_part(block.core).relative_to(reach).slices)
            receipt.holes += self._restore_holes(pixels, original[inner], valid[inner])
        if result.defects is not None:
            places, values = result.defects
            receipt.defects += len(places)
            if are_kept:
                roles.restore(pixels)[tuple(places.T)] = to_dtype(values, pixels.dtype)
        region = roles.output_region(block.core, task.tiling.scale, task.channels_out)
        if result.not_finite is not None:
            receipt.not_finite += result.not_finite
            receipt.spoiled += int(np.count_nonzero(~np.isfinite(pixels)))
        return task.writer.write(region, roles.restore(pixels))

    def finish(self, receipt: Receipt) -> None:
        with unless_lost(self.tiles.device):
            self.tiles.finish(receipt)

    def _restore_holes(self, result: Pixels, original: Pixels, valid: Valid) -> int:
        """Restore the pixels of holes, or mark them if the result has another shape; return their number in the image."""
        holes = ~valid
        if result.shape == original.shape:
            result[holes] = to_dtype(original[holes], result.dtype)
        else:
            holes = np.asarray(holes.any(axis=len(self.task.roles.looped), keepdims=True))
            for axis in range(-len(self.task.roles.spatial), 0):
                holes = holes.repeat(self.task.tiling.scale, axis)
            value = self.task.holes.value if self.task.holes else None
            marked = np.array([math.nan if value is None else value])
            result[np.broadcast_to(holes, result.shape)] = to_dtype(marked, result.dtype)
        return int(np.count_nonzero(~valid))

    def _read_side(self, name: str, side: Readable, block: Block, valid: Valid | None = None) -> Pixels:
        """Read a side input, which has the shape of the image or of its tiled axes alone, or a number for each plane; 0 in holes."""
        if isinstance(side, PlaneValues):
            return side.read(block.core)
        window, rim, axes = block.window, self.task.rim, self.task.roles.axes
        if len(side.shape) != len(self.task.grid.shape):
            spatial = self.task.roles.spatial
            window = self.task.roles.spatial_part(window)
            rim = Rim(tuple(rim.rules[i] for i in spatial))
            axes = tuple(axes[i] for i in spatial)
        pixels = read_window(side, window, rim)
        if valid is not None:
            leading = tuple(range(valid.ndim - len(self.task.roles.spatial)))
            is_full = len(side.shape) == len(self.task.grid.shape)
            measured = self.task.roles.restore(valid) if is_full else valid.any(axis=leading)
            pixels = np.where(measured, pixels, pixels.dtype.type(0))
        check_side(name, pixels, side, window, rim, axes, self.task.tiling.range)
        return pixels

    def _arrange_side(self, side: Pixels) -> NDArray[Any]:
        roles = self.task.roles
        if side.ndim == len(roles.axes):
            return roles.arrange(side)
        return side[(None,) * (len(roles.looped) + 1)]


class ChannelStages:
    """The stages of an image whose channels have tasks of their own: a block is one of a single channel."""

    def __init__(self, task: ChannelsTask) -> None:
        self.task = task
        devices: dict[bool, Device] = {}
        self._stages: dict[int, DenoiseStages] = {}
        for part in task.parts:
            stages = self._stages[id(part)] = DenoiseStages(part, devices.get(part.channels_last))
            if isinstance(stages.tiles, TileRunner):
                devices[part.channels_last] = stages.tiles.device

    def check(self) -> None:
        for stages in self._stages.values():
            stages.check()

    def read(self, block: Block) -> tuple[DenoiseStages, Block, ReadBlock]:
        task = self.task.at(block.core)
        stages, own = self._stages[id(task)], replace(block, window=task.grid.window_of(block.core))
        return stages, own, stages.read(own)

    def compute(self, block: Block, what_was_read: Any, receipt: Receipt) -> tuple[DenoiseStages, Block, CoreImage]:
        stages, own, read = what_was_read
        return stages, own, stages.compute(own, read, receipt)

    def write(self, block: Block, result: Any, receipt: Receipt) -> None:
        stages, own, core = result
        stages.write(own, core, receipt)

    def finish(self, receipt: Receipt) -> None:
        for stages in reversed(self._stages.values()):  # the batch is the first one's
            stages.finish(receipt)
