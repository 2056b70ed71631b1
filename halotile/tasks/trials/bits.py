"""How far a job's tiles are from the whole image in their last bits, on noise of the sizes that the job has.

A library may choose another way to compute for another size, and another way rounds otherwise. Which sizes those are
depends on the CPU, so it is tried where it is asked. An image not much larger than a tile is tried whole, against
what the network's own library makes of it, in as many of its tiles as are not alike. Of a larger one a tile is tried against windows of as many pixels that are longer on one axis.
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
from halotile.storage.grid import Region, align_outward
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import CoreModel, Model
from halotile.tasks.devices.device import Device, threads
from halotile.tasks.inner_tiles import Tiling, Window, windows_of
from halotile.tasks.noise.draws import RandomImage
from halotile.tasks.trials.trial import Trial, failing_as

if TYPE_CHECKING:
    import torch

TRIED_WHOLE = 2**18
"""An image of up to so many pixels is tried whole, and one of fewer than three tiles."""
LEAST_COMPARED = 16
"""Pixels on an axis that are compared at least."""
SEED, LEVEL, DEVIATION = 0, np.float32(0.5), np.float32(0.1)
"""Of the noise."""


class Uncomparable(ConfigError):
    """The denoiser takes tiles, but not what they would be compared with."""


def tile_difference(task: DenoiseTask, *, at_once: bool = True) -> float:
    """The largest difference between tiles and the whole image, relative to the largest pixel, on the CPU.

    Parameters
    ----------
    task : DenoiseTask
        With the sizes of the job. Its image is not read.
    at_once : bool
        Whether tiles and what they are held against are computed side by side, by a thread each: in half the time, with twice the memory.

    Raises
    ------
    ConfigError
        When the denoiser fails on a tile; :class:`Uncomparable` when it does on what the tiles are compared with.
    """
    tiling, first, title = task.tiling, next(_tiles(task)), task.denoiser.title
    image = _everything(task)
    is_small = image.size <= max(TRIED_WHOLE, 3 * first.reach.size)
    references = [image] if is_small else _long_windows(first.reach, tiling)
    tiles = _telling(_tiles(task)) if is_small else [first]
    corner = _corner([first.reach, *references])
    device = Device("cpu", "float32", task.channels_last)
    noise = partial(_noise, task.denoiser.channels[0], corner)

    # Built one after the other: weights may be drawn from numbers that all threads share.
    model = device.place(Trial.of(task.denoiser, len(tiling.image)).model)
    reference = device.place(
        task.denoiser.reference() if is_small else Trial.of(task.denoiser, len(tiling.image)).model
    )

    wanted = list(itertools.product(tiles, sorted({1, tiling.batch})))

    def of_tiles() -> list[tuple[Window, torch.Tensor]]:
        with device.computing(), failing_as(f"{title} failed on a tile of noise"):
            return [(tile, _tile(device, model, tile, noise(tile.reach), count)) for tile, count in wanted]

    def of_references() -> list[torch.Tensor]:
        with device.computing(), failing_as(f"{title} failed on noise larger than a tile", Uncomparable):
            return [device.run(reference, noise(region), {}) for region in references]

    with threads(), ThreadPoolExecutor(1) as beside:
        coming = beside.submit(of_references)
        # A compiler has settings of the whole process, and some functions return one module at each call.
        if not at_once or _modules(model) & _modules(reference) or "torch._dynamo" in sys.modules:
            wait([coming])
        made, whole = of_tiles(), coming.result()
    apart = (
        _apart(tile, pixels, region, there, tiling)
        for (tile, pixels), (region, there) in itertools.product(made, zip(references, whole, strict=True))
    )
    return max(apart) / (max(float(there.abs().max()) for there in whole) or 1.0)


def _everything(task: DenoiseTask) -> Region:
    """The image, with what the rim rule lays around it."""
    image = Region.whole(task.grid.shape)
    return task.roles.spatial_part(task.rim.reach(image.grow(task.grid.depth), task.grid.shape))


def _tiles(task: DenoiseTask) -> Iterator[Window]:
    """The tiles of the block in the middle, then those of the others, of one plane."""
    blocks = itertools.chain([task.grid.middle], task.grid)
    planes = [task.grid.middle.core.start[i] for i in task.roles.looped]
    for block in blocks:
        if [block.core.start[i] for i in task.roles.looped] == planes:
            reach = task.rim.reach(block.window, task.grid.shape)
            core = task.roles.spatial_part(block.core)
            yield from windows_of(core, task.roles.spatial_part(reach), (), task.tiling)


def _telling(tiles: Iterable[Window]) -> list[Window]:
    """Of these tiles so many that every shape of a window is among them, and every place of a core in one, on each axis."""
    alike = {_marks(tile): tile for tile in tiles}
    every = frozenset[Hashable]().union(*alike)
    found, shown = [], frozenset[Hashable]()
    while shown < every:
        most = max(alike, key=lambda marks: len(marks - shown))
        found.append(alike.pop(most))
        shown |= most
    return found


def _marks(tile: Window) -> frozenset[Hashable]:
    """What decides how a library computes a tile's core: the shape of its window, and where it lies in that on each axis."""
    core, lengths = tile.core.relative_to(tile.reach), tile.reach.shape
    return frozenset([lengths, *enumerate(zip(core.start, core.stop, lengths, strict=True))])


def _long_windows(tile: Region, tiling: Tiling) -> list[Region]:
    """For each axis a window of about as many pixels as the tile, long on that axis and short on the others."""
    short = [
        min(max(before + after + max(LEAST_COMPARED, k), n // 2), n)
        for (before, after), k, n in zip(tiling.depth, tiling.align, tile.shape, strict=True)
    ]
    found = []
    for axis, length in enumerate(tiling.image):
        lengths = list(short)
        room = max(tile.size, TRIED_WHOLE) // math.prod(n for i, n in enumerate(short) if i != axis)
        lengths[axis] = min(length, max(room, tile.shape[axis]))
        start = list(tile.start)
        start[axis] = min(start[axis], length - lengths[axis])
        stop = tuple(a + n for a, n in zip(start, lengths, strict=True))
        found.append(align_outward(Region(tuple(start), stop), tiling.align, tiling.image))
    return found


def _corner(regions: list[Region]) -> tuple[int, ...]:
    """Where the smallest region begins that holds all of these."""
    return tuple(map(min, zip(*(region.start for region in regions), strict=True)))


def _noise(channels: int, corner: tuple[int, ...], region: Region) -> torch.Tensor:
    """A window of an image of noise that begins at a corner, as a batch."""
    import torch

    place = region.shift(tuple(-a for a in corner))
    inside = Region((0, *place.start), (channels, *place.stop))
    drawn = RandomImage(inside.stop, np.dtype("float32"), SEED).read(inside)
    return torch.from_numpy(LEVEL + DEVIATION * drawn)[None]


def _tile(device: Device, model: Model, tile: Window, noise: torch.Tensor, batch: int) -> torch.Tensor:
    """A tile as a worker computes it, among as many: its core, or all of its window."""
    core = partial(model.core, margin=tile.margin) if isinstance(model, CoreModel) else model
    return device.run(core, noise.expand(batch, *noise.shape[1:]).contiguous(), {})[:1]


def _modules(model: Model) -> set[int]:
    """What a model is made of, each by its address: two models may hold the same."""
    import torch

    return {id(part) for part in (model.modules() if isinstance(model, torch.nn.Module) else [model])}


def _apart(tile: Window, made: torch.Tensor, region: Region, whole: torch.Tensor, tiling: Tiling) -> float:
    """The largest difference where both a tile's core and the inside of a region have their true values."""
    inside = Region(
        tuple(a + before if a != 0 else a for a, (before, _) in zip(region.start, tiling.depth, strict=True)),
        tuple(
            b - after if b != n else b
            for b, (_, after), n in zip(region.stop, tiling.depth, tiling.image, strict=True)
        ),
    )
    both = tile.core.clip(inside)
    if not both.size:
        return 0.0
    scale = (tiling.scale,) * len(tiling.image)
    computed = tile.core if made.shape[2:] == tile.core.scale(scale).shape else tile.reach
    mine = made[(..., *both.relative_to(computed).scale(scale).slices)]
    there = whole[(..., *both.relative_to(region).scale(scale).slices)]
    return float((mine - there).abs().max())
