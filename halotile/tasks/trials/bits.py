"""Rounding differences between the tiles of a job and the whole image, on noise of the job's sizes.

A library may choose another algorithm for another size, which rounds differently. The sizes at which it does
depend on the CPU, so the trial runs on the CPU in question. A small image is tried as a whole, as the network's own library
computes it, against all of its tiles that differ in shape or place. For a larger image, a tile from its middle is compared with
windows of about half as many pixels that are longer on one axis, and begin before the tile.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Block, Region, align_outward, valid_part
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import CoreModel, Model
from halotile.tasks.devices.device import Device, torch_threads
from halotile.tasks.inner_tiles import Tiling, Window, windows_of
from halotile.tasks.noise.draws import RandomImage
from halotile.tasks.trials.trial import Trial, failing_as

if TYPE_CHECKING:
    import torch

TRIED_WHOLE = 2**18
"""Images of up to this many pixels, or of a single tile, are tried as a whole."""
LEAST_COMPARED = 16
"""Least number of compared pixels on an axis."""
SEED, LEVEL, DEVIATION = 0, np.float32(0.5), np.float32(0.1)
"""Parameters of the noise."""


class ReferenceFailed(ConfigError):
    """The denoiser fails on the images that its tiles would be compared with."""


def tile_difference(task: DenoiseTask, *, at_once: bool = True) -> float:
    """The largest difference between tiles and the whole image, relative to the largest pixel, on the CPU.

    Parameters
    ----------
    task : DenoiseTask
        The job. Its image is not read.
    at_once : bool
        Whether tiles and references are computed in parallel, by a thread each: in half the time, with twice the memory.

    Raises
    ------
    ConfigError
        When the denoiser fails on a tile; :class:`ReferenceFailed` when it fails on a reference.
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
    model = device.place(Trial.of(task.denoiser, len(tiling.image)).model)
    reference = device.place(
        task.denoiser.reference() if is_small else Trial.of(task.denoiser, len(tiling.image)).model
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
        for (tile, pixels), (region, there) in itertools.product(
            computed, zip(references, whole, strict=True)
        )
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
    """Yield the tiles of a block."""
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

    A third of a long window lies before the tile, if there is as much: a network may look backwards, or cut its image
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
    import torch

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
    import torch

    return {id(part) for part in (model.modules() if isinstance(model, torch.nn.Module) else [model])}


def _difference(
    tile: Window, computed: torch.Tensor, region: Region, whole: torch.Tensor, tiling: Tiling
) -> float:
    """The largest difference between the core of a tile and the part of a region that its ends do not affect."""
    both = tile.core.clip(valid_part(region, tiling.depth, tiling.image))
    if not both.size:
        return 0.0
    scale = (tiling.scale,) * len(tiling.image)
    extent = tile.core if computed.shape[2:] == tile.core.scale(scale).shape else tile.reach
    mine = computed[(..., *both.relative_to(extent).scale(scale).slices)]
    there = whole[(..., *both.relative_to(region).scale(scale).slices)]
    return float((mine - there).abs().max())
