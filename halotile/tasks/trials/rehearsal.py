"""Rehearsal of a network: small images of random pixels are denoised in tiles and as a whole, which must agree.

A probe changes one pixel at a time, in windows of round lengths. Effects of other lengths on a network,
such as padding to a multiple, appear only here. For each axis there is an image that is long on it and narrow on the others.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Block, Depth, Region, align_outward, valid_part
from halotile.tasks.convolution.stable import FEW
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import NARROW, ROUNDING, CoreModel, Denoiser, Model
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.devices.device import Device, torch_threads
from halotile.tasks.inner_tiles import TileRunner, Tiling, Window, cut_evenly, respanned, windows_of
from halotile.tasks.lazy import torch
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.trials.trial import Sample, Trial, TrialImage, compare, failing_as, quarters

TRIED_WHOLE = 2**18  # images of up to this many pixels, or of a single tile, are tried as a whole
LEAST_COMPARED = 16  # least number of compared pixels on an axis
SEED, LEVEL, DEVIATION = 0, np.float32(0.5), np.float32(0.1)  # parameters of the noise


class ReferenceFailed(ConfigError):
    """The denoiser fails on the images that its tiles would be compared with."""


def tile_difference(task: DenoiseTask, *, at_once: bool = True) -> float:
    """The largest difference between tiles and the whole image, relative to the largest pixel, on the CPU.

    A library may choose another algorithm for another size, which rounds differently; at which sizes depends on the CPU, so the trial runs on the
    CPU in question. A small image is tried as a whole, against all of its tiles that differ in shape or place. For a larger image, a tile
    from its middle is compared with windows of about half as many pixels that are longer on one axis, and begin before the tile.

    ``task``: job. Its image is not read; ``at_once``: whether tiles and references are computed in parallel, by a thread each: in half the time, with
    twice the memory.
    """
    tiling, middle, title = task.tiling, _middle_tile(task), task.denoiser.title
    image = _padded_image(task)
    is_small = image.size <= max(TRIED_WHOLE, middle.reach.size)
    references = [image] if is_small else _long_windows(middle.reach, tiling)
    tiles = _representatives(_tiles(task)) if is_small else [middle]
    corner = tuple(map(min, zip(middle.reach.start, *(r.start for r in references), strict=True)))
    device = Device("cpu", "float32", task.channels_last)
    noise = partial(_noise, task.denoiser.channels[0], corner)

    # Built one after the other: weights may be drawn from a random generator that all threads share.
    model = device.place(Trial.for_denoiser(task.denoiser, len(tiling.image)).model)
    reference = device.place(
        task.denoiser.reference() if is_small else Trial.for_denoiser(task.denoiser, len(tiling.image)).model
    )

    pairs = list(itertools.product(tiles, sorted({1, tiling.batch})))

    def compute_tiles() -> list[tuple[Window, torch.Tensor]]:
        with device.computing(), failing_as(f"{title} failed on a tile of noise"):
            return [(tile, _tile(device, model, tile, noise(tile.reach), count)) for tile, count in pairs]

    def compute_references() -> list[torch.Tensor]:
        with device.computing(), failing_as(f"{title} failed on noise larger than a tile", ReferenceFailed):
            return [device.run(reference, noise(region), {}) for region in references]

    with torch_threads(), ThreadPoolExecutor(1) as pool:
        future = pool.submit(compute_references)
        # A compiler has settings for the whole process, and some functions return the same module at each call.
        if not at_once or _modules(model) & _modules(reference) or "torch._dynamo" in sys.modules:
            wait([future])
        computed, whole = compute_tiles(), future.result()
    differences = (
        _difference(tile, pixels, region, there, tiling)
        for (tile, pixels), (region, there) in itertools.product(computed, zip(references, whole, strict=True))
    )
    largest = max(float(there.abs().max()) for there in whole) or 1.0
    return max(math.inf if math.isnan(difference) else difference for difference in differences) / largest


def _padded_image(task: DenoiseTask) -> Region:
    """The image with its continuation by the rim rule, which begins where a tile may begin: a network that pools sees the same groups of pixels."""
    image = Region.whole(task.grid.shape)
    padded = task.roles.spatial_part(task.rim.reach(image.grow(task.grid.depth), task.grid.shape))
    start = (n // align * align for n, align in zip(padded.start, task.tiling.align, strict=True))
    return Region(tuple(start), padded.stop)


def _middle_tile(task: DenoiseTask) -> Window:
    tiles = list(_tiles_of(task, task.grid.middle))
    return tiles[len(tiles) // 2]


def _tiles(task: DenoiseTask) -> Iterator[Window]:
    """Yield the tiles of all blocks in one plane."""
    planes = [task.grid.middle.core.start[i] for i in task.roles.looped]
    for block in task.grid:
        if [block.core.start[i] for i in task.roles.looped] == planes:
            yield from _tiles_of(task, block)


def _tiles_of(task: DenoiseTask, block: Block) -> Iterator[Window]:
    reach = task.rim.reach(block.window, task.grid.shape)
    core = task.roles.spatial_part(block.core)
    yield from windows_of(core, task.roles.spatial_part(reach), (), task.tiling)


def _representatives(tiles: Iterable[Window]) -> list[Window]:
    """Choose tiles that cover all window shapes, and all positions of a core in its window on each axis."""
    by_features = {_features(tile): tile for tile in tiles}
    every = frozenset[Hashable]().union(*by_features)
    chosen, covered = [], frozenset[Hashable]()
    while covered < every:
        best = max(by_features, key=lambda features: len(features - covered))
        chosen.append(by_features.pop(best))
        covered |= best
    return chosen


def _features(tile: Window) -> frozenset[Hashable]:
    """Properties of a tile by which a library may choose an algorithm: window shape, and position of the core on each axis."""
    core, lengths = tile.core.relative_to(tile.reach), tile.reach.shape
    return frozenset([lengths, *enumerate(zip(core.start, core.stop, lengths, strict=True))])


def _long_windows(tile: Region, tiling: Tiling) -> list[Region]:
    """For each axis a window of half as many pixels as the tile or more, long on that axis and short on the others.

    A third of a long window is before the tile, if there is as much: a network may look backwards, or cut its image
    into parts that begin at its first pixel.
    """
    short = [
        min(max(before + after + max(LEAST_COMPARED, k), n // 3), n)
        for (before, after), k, n in zip(tiling.depth, tiling.align, tile.shape, strict=True)
    ]
    windows = []
    for axis, length in enumerate(tiling.image):
        lengths = list(short)
        room = max(tile.size // 2, TRIED_WHOLE) // math.prod(n for i, n in enumerate(short) if i != axis)
        lengths[axis] = min(length, max(room, tile.shape[axis]))
        start = [a + (n - s) // 2 for a, n, s in zip(tile.start, tile.shape, lengths, strict=True)]
        before = max(min(0, tile.start[axis]), tile.start[axis] - lengths[axis] // 3)
        start[axis] = min(before, length - lengths[axis])
        stop = tuple(a + n for a, n in zip(start, lengths, strict=True))
        windows.append(align_outward(Region(tuple(start), stop), tiling.align, tiling.image))
    return windows


def _noise(channels: int, corner: tuple[int, ...], region: Region) -> torch.Tensor:
    """A window of an image of noise with this first corner, as a batch."""
    place = region.shift(tuple(-a for a in corner))
    inside = Region((0, *place.start), (channels, *place.stop))
    drawn = RandomImage(inside.stop, np.dtype("float32"), SEED).read(inside)
    return torch.from_numpy(LEVEL + DEVIATION * drawn)[None]


def _tile(device: Device, model: Model, tile: Window, noise: torch.Tensor, batch: int) -> torch.Tensor:
    """Compute a tile as a worker does, in a batch: its core, or its whole window."""
    core = partial(model.core, margin=tile.margin) if isinstance(model, CoreModel) else model
    return device.run(core, noise.expand(batch, *noise.shape[1:]).contiguous(), {})[:1]


def _modules(model: Model) -> set[int]:
    """Addresses of the modules of a model; two models may share some."""
    return {id(part) for part in (model.modules() if isinstance(model, torch.nn.Module) else [model])}


def _difference(tile: Window, computed: torch.Tensor, region: Region, whole: torch.Tensor, tiling: Tiling) -> float:
    """The largest difference between the core of a tile and the part of a region that its ends do not affect."""
    # A tile may see the continuation of the image past its end, where the region has an end.
    ends = tuple(map(max, tiling.image, tile.reach.stop))
    both = tile.core.clip(valid_part(region, tiling.depth, ends))
    if not both.size:
        return 0.0
    if not computed.isfinite().all():
        return math.nan
    is_core = computed.shape[2:] == tile.core.scale((tiling.scale,) * len(tiling.image)).shape
    mine = computed.numpy(), tile.core if is_core else tile.reach
    return compare(both, mine, (whole.numpy(), region), tiling.scale)


CORE = {1: FEW, 2: 128, 3: 32}  # length of the tiles on the axis that is cut
# A shortened image keeps its lengths modulo this, which the multiples that networks pad to divide.
PERIOD = {1: 192, 2: 192, 3: 48}
FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DARKEST = 0.05  # brightness of an image at its first end, relative to that at its last
LARGEST = 64  # the largest alignment to try
# Lengths that windows at the far end lack to a multiple of LARGEST, in alignments; padding shows at the
# smallest.
MISSING = (0, 1, 2, 24)


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal."""

    alignment: int  # the alignment with which tiles and whole agree best
    difference: float  # the largest difference, relative to the largest pixel of the whole

    @property
    def agrees(self) -> bool:
        """True if no seam would be visible."""
        return self.difference <= ROUNDING


def rehearse(
    denoiser: Denoiser, depth: Depth, image: tuple[int, ...], *, search: bool, is_cut: bool = True
) -> Rehearsal:
    """Denoise an image in tiles and as a whole.

    ``denoiser``: with its known alignment; ``depth``: halo on each tiled axis; ``image``: lengths of the tiled axes of the real image; ``search``:
    whether to try larger alignments if the tiles do not agree; ``is_cut``: whether the image ends where windows are cut. Else it is continued by a
    boundary rule, and the denoiser never sees its ends: pixels near them are not compared.
    """
    model = Trial.for_denoiser(denoiser, len(image)).model
    stages = [_Stage.for_axis(denoiser, model, depth, image, axis, is_cut) for axis in range(len(image))]
    if not denoiser.convolutional:
        with torch_threads():
            return _rehearse(stages, search)
    found = _rehearse(stages, search)
    # The last bits, which depend on the number of threads, are compared separately, at the sizes of the job.
    return replace(found, difference=0.0) if found.agrees else found


def _rehearse(stages: list[_Stage], search: bool) -> Rehearsal:
    denoiser = stages[0].denoiser
    first = denoiser.alignment
    best = Rehearsal(first, math.inf)
    for factor in FACTORS if search else (1,):
        alignment, difference = first * factor, 0.0
        if factor > 1 and alignment > LARGEST:
            break
        for stage in stages:
            difference = max(difference, stage.difference(alignment))
        found = Rehearsal(alignment, difference)
        best = min(best, found, key=lambda rehearsal: rehearsal.difference)
        if found.agrees:
            return found
    if not all(stage.repeats() for stage in stages):
        raise ConfigError(
            f"{denoiser.title} returned two results for one image, with others in between: it keeps state or draws random "
            "numbers, so the result would depend on the order of tiles. Write a function whose result depends on its input alone."
        )
    return best


def sample_difference(denoiser: Denoiser, depth: Depth, samples: Sequence[Sample], *, is_cut: bool = True) -> float:
    """The largest difference between the quarters of samples of the image and the whole samples, relative to the largest pixel.

    ``denoiser``: with its known alignment. Channels that a sample lacks are random: its side inputs; ``depth``: halo on each tiled axis; ``samples``:
    of shape (channels, *spatial); ``is_cut``: whether the image ends where windows are cut.
    """
    images: list[TrialImage] = []
    if isinstance(denoiser, ArrayDenoiser):  # each channel is an image
        images += (TrialImage(denoiser, depth, image, is_cut) for sample in samples for image in sample)
    else:
        model = Trial.for_denoiser(denoiser, len(depth)).model
        for sample in samples:
            missing = denoiser.channels[0] - len(sample)
            random = Trial.for_denoiser(denoiser, len(depth), model).noise(sample.shape[1:]).numpy()[0, :missing]
            images.append(_Stage(denoiser, depth, np.concatenate([sample, random]), is_cut, model))
    with torch_threads():
        cores = ((image, core) for image in images for core in quarters(image.lengths, denoiser.alignment))
        return max((image.tile_difference(core, denoiser.alignment) for image, core in cores), default=0.0)


def sample_error(title: str, difference: float, depth: Depth) -> ConfigError:
    """The error for code whose tiles do not agree with a larger part of the image itself."""
    return ConfigError(
        f"{title} gives other pixels in tiles than on a larger part of this image: they differed by {difference:.2g} of the largest "
        f"pixel, with a halo of {max(map(max, depth))} pixels, where dark and bright places were in one image. It goes by the whole image, "
        "such as its least, mean or most frequent value or the size of connected regions, or looks farther than its halo. Write one that needs only "
        "the pixels near each pixel, or a larger depth; or, if you want each tile by itself, tile.seams: allow."
    )


def tiling_error(denoiser: Denoiser, found: Rehearsal, image: tuple[int, ...]) -> ConfigError:
    """The error for a network whose tiles do not agree with the whole."""
    sides = " × ".join(map(str, image))
    return ConfigError(
        f"{denoiser.title} gives other pixels in tiles than on a whole image with sides like those of {sides}: they differed by "
        f"{found.difference:.2g} of the largest pixel in a trial. It may pad the image at its start as well as at its end, which "
        "tiles cannot reproduce: let it pad at the end only, or pad the image itself to a multiple of 64; with circular padding "
        "write tile.boundary: periodic. Or it looks farther than the probe found, pads to a multiple of a number such as 7, or "
        "resizes to the size of another layer: write receptive_field and alignment, if you know them."
    )


@dataclass(frozen=True)
class _Stage(TrialImage):
    """The same for a network; in a rehearsal, the random image of one axis."""

    model: Model
    axis: int = 0

    @classmethod
    def for_axis(
        cls, denoiser: Denoiser, model: Model, depth: Depth, image: tuple[int, ...], axis: int, is_cut: bool
    ) -> _Stage:
        dims = len(image)
        core, (before, after) = CORE[dims], depth[axis]
        # Narrow, but for windows that would be small.
        narrow = max(NARROW[dims], math.ceil((FEW / (core + before + after)) ** (1 / max(1, dims - 1))) + 1)
        ends = (0,) * dims if is_cut else tuple(map(sum, depth))
        lengths = [
            _shorten(n, narrow + around, math.lcm(NARROW[dims], denoiser.alignment))
            for n, around in zip(image, ends, strict=True)
        ]
        least = 3 * core // 2 + LARGEST + (1 if is_cut else 2) * (before + after)
        lengths[axis] = _shorten(image[axis], least, math.lcm(PERIOD[dims], denoiser.alignment))
        trial = Trial.for_denoiser(denoiser, dims, model)
        pixels = trial.noise(tuple(lengths)).numpy()[0]
        # Tiles differ in brightness, for code that goes by that of its whole input.
        pixels *= np.linspace(DARKEST, 1, lengths[axis], dtype=np.float32)[:, *[None] * (dims - 1 - axis)]
        return cls(denoiser, depth, pixels, is_cut, model, axis)

    def repeats(self) -> bool:
        """Return whether the image has the same result once more."""
        return np.array_equal(self.denoised(Region.whole(self.lengths)), self.whole, equal_nan=True)

    def difference(self, alignment: int) -> float:
        """The largest difference of tiles and of windows at the far end, relative to the largest pixel of the whole."""
        differences = [self.tile_difference(core, alignment) for core in self.tiles(alignment)]
        for window, core in self.far_ends(alignment):
            differences.append(self.difference_in(core, window))
        return max(differences)

    def tiles(self, alignment: int) -> list[Region]:
        """The first tile along the axis, one in the middle and the last; there are several seams."""
        length = self.lengths[self.axis]
        least = max(1, min(CORE[len(self.lengths)], length // 4))
        cut = cut_evenly(0, length, -(-least // alignment) * alignment, alignment)
        return [self._along(*cut[i]) for i in sorted({0, len(cut) // 2, len(cut) - 1})]

    def far_ends(self, alignment: int) -> Iterator[tuple[Region, Region]]:
        """Yield windows that end with the image, each with the part that its beginning does not affect."""
        length, period = self.lengths[self.axis], math.lcm(LARGEST, alignment)
        least = self.depth[self.axis][0] + CORE[len(self.lengths)]
        for missing in MISSING:
            start = (length + (-length) % alignment + missing * alignment) % period
            spare = length - (start + least)
            if spare < 0:
                continue
            window = self._along(start + spare // period * period, length)
            yield window, valid_part(window, self.depth, self.lengths)

    def _along(self, start: int, stop: int) -> Region:
        """The part of the image between two places on the axis."""
        return respanned(Region.whole(self.lengths), {self.axis: (start, stop)})

    def denoised(self, window: Region, core: Region | None = None, alignment: int = 1) -> NDArray[Any]:
        """Denoise a part of the image as if it were the whole: one tile of it, or all at once."""
        lengths = window.shape
        everything = Region.whole(lengths)
        core = core or everything
        dims, scale = len(lengths), self.denoiser.scale
        tiling = Tiling(
            tile=tuple(-(-n // alignment) * alignment for n in core.shape),
            depth=self.depth,
            align=(alignment,) * dims,
            least=(1,) * dims,
            image=lengths,
            scale=scale,
            batch=1,
            range=None,
            work_dtype="float32",
        )
        device = Device("cpu", "float32", self.denoiser.convolutional and dims == 2)
        pixels = self.pixels[(slice(None), *window.slices)]
        title, sides = self.denoiser.title, " × ".join(map(str, lengths))
        runner = TileRunner(self.model, device, tiling, title)
        with failing_as(f"{title} failed on an image of {sides} pixels, or a tile of it"):
            return runner(pixels, everything, core, self.denoiser.channels[1], {})


def _shorten(length: int, least: int, period: int) -> int:
    """A shorter length of at least ``least``, if possible, that is equal modulo the period.

    >>> _shorten(4097, 288, 192), _shorten(203, 288, 192)
    (449, 203)
    """
    shorter = length % period + -(-(least - length % period) // period) * period
    return min(length, shorter)
