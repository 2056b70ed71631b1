"""Cutting of an image: tiles, super-blocks, and their windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds.sections import Run, Size, Tile, parse_bytes
from halotile.graphs.plans.resources.memory import share_bytes
from halotile.graphs.plans.resources.sizes import (
    Geometry,
    candidate_blocks,
    fit_tile,
    least_window,
)
from halotile.graphs.plans.trials.receptive_field import Halo
from halotile.storage.grid import Grid
from halotile.storage.rim import Rim
from halotile.tasks.convolution.stable import FEW
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.inner_tiles import Tiling
from halotile.tasks.roles import Roles


def blocks_for(
    geometry: Geometry,  # image
    unit: tuple[int, ...],  # shape that a super-block is a multiple of: whole shards
    workers: int,  # number of workers that share the blocks
    # super-block of an earlier run. A resumed run keeps it, whatever its number of workers: its journal numbers these
    # blocks
    earlier: Sequence[int] | None,
    *,
    on_gpu: bool = False,  # GPUs compute
) -> list[tuple[int, ...]]:
    """Return candidate super-blocks, the best first."""
    if earlier is not None and len(earlier) == len(unit):
        block = tuple(earlier)
        if all(b % u == 0 or b >= n for b, u, n in zip(block, unit, geometry.shape, strict=True)):
            return [block]
    return candidate_blocks(geometry, unit, workers, on_gpu=on_gpu)


def rim_of(tile: Tile, denoiser: Denoiser, roles: Roles) -> Rim:
    """Return the rim of the image: on tiled axes by the job's boundary rule, or the denoiser's own."""
    rule = denoiser.boundary if tile.boundary == "auto" else tile.boundary
    return Rim(tuple(rule if i in roles.spatial else "cut" for i in range(len(roles.axes))))


def tiling_of(
    wanted: Tile,
    denoiser: Denoiser,
    roles: Roles,
    halo: Halo,
    geometry: Geometry,
    size: Size,
    block: tuple[int, ...],
    values: tuple[float, float] | None,
    dtype: np.dtype[Any],
) -> Tiling:
    """Return the compute tiles of a block, and the number of tiles computed at once."""
    wide = dtype.itemsize >= 4 and dtype != np.float32 and not denoiser.convolutional
    least = least_window(geometry, denoiser.convolutional)
    tile = fit_tile(geometry, size, block)
    window = math.prod(t + a + b for t, (a, b) in zip(tile, halo.depth, strict=True))
    # As many pixels at once as one tile of the requested size: blocks may be smaller than it.
    at_once = math.prod(geometry.spread("tile.size", size, geometry.shape)[i] for i in roles.spatial)
    tiles = math.prod(-(-block[i] // t) for i, t in zip(roles.spatial, tile, strict=True))
    planes = math.prod(block[i] for i in roles.looped)
    batch = min(max(1, at_once // window), tiles * planes) if wanted.batch == "auto" else wanted.batch
    if math.prod(least) <= FEW and denoiser.convolutional:
        batch = 1  # several images at once would use the other library
    return Tiling(
        tile=tile,
        depth=halo.depth,
        align=(halo.align,) * len(roles.spatial),
        least=least,
        image=tuple(geometry.shape[i] for i in roles.spatial),
        scale=denoiser.scale,
        batch=batch,
        range=values,
        work_dtype="float64" if wide else "float32",
    )


def grid_of(
    geometry: Geometry,
    roles: Roles,
    halo: Halo,
    block: tuple[int, ...],
    tiling: Tiling,
    *,
    further: int = 0,
) -> Grid:
    """Return the grid of super-blocks, which read some pixels further than their tiles look."""
    widths = [(before + further, after + further) for before, after in halo.depth]
    depth = dict(zip(roles.spatial, widths, strict=True))
    # The halo beyond the image does not count where the window is cut there.
    least = {i: n + max(depth[i]) for i, n in zip(roles.spatial, tiling.least, strict=True) if n > 1}
    return Grid(
        shape=geometry.shape,
        block=tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)),
        depth=tuple(depth.get(i, (0, 0)) for i in range(len(geometry.shape))),
        align=roles.per_axis(halo.align, 1),
        least=tuple(least.get(i, 1) for i in range(len(geometry.shape))),
    )


def overlap_pays(run: Run) -> bool:
    """Return True where there are cores to spare for reading and writing at the same time as computing."""
    return cores_here() > run.count


def allowed_bytes(run: Run, machine: int | None) -> int:
    """Return the memory that one worker may need: as the job sets it, at most its share of the machine."""
    limit = parse_bytes(run.memory_per_worker)
    return limit if machine is None else min(limit, share_bytes(machine, run.count))
