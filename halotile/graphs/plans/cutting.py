"""How an image is cut for a denoiser: the layout of the output, the tiles, the super-blocks, and what each reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.sections import Run, Size, Tile, parse_bytes
from halotile.graphs.plans.memory import Footprint, share_bytes
from halotile.graphs.plans.receptive_field import Reach
from halotile.graphs.plans.sizes import (
    SMALL_CONVOLUTION,
    Geometry,
    candidate_blocks,
    candidate_tiles,
    check_block,
    choose_chunk,
    choose_shard,
    fit_tile,
    growth_of,
    least_window,
)
from halotile.storage.arrays import Source
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable, Rim
from halotile.storage.sharded.ome_metadata import output_fields
from halotile.storage.sharded.output import Layout
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.inner_tiles import Tiling
from halotile.tasks.roles import Roles

T = TypeVar("T")


def geometry_of(source: Readable, denoiser: Denoiser, roles: Roles, reach: Reach) -> Geometry:
    """Shapes in and out, and what the cuts must heed."""
    output_shape = [n * f for n, f in zip(source.shape, roles.per_axis(denoiser.scale, 1), strict=True)]
    if roles.channel is not None:
        output_shape[roles.channel] = denoiser.channels[1]
    return Geometry(source.shape, tuple(output_shape), roles, denoiser.scale, reach.align)


def layout_of(
    job: Denoising,
    source: Source,
    geometry: Geometry,
    roles: Roles,
    previous: Mapping[str, Any] | None = None,
) -> Layout:
    """The output: its shards and chunks, and what it takes over from the input and from the run that goes on."""
    chunk = choose_chunk(geometry, job.output)
    # A mask is smoothed to values between 0 and 1.
    own = "float32" if source.dtype == np.bool_ else str(source.dtype)
    dtype = own if job.output.dtype == "auto" else job.output.dtype
    added = len(roles.axes) - len(source.axes)
    factor = roles.per_axis(geometry.scale, 1)
    scale = (1.0,) * added + tuple(source.scale)
    channels = geometry.output_shape[roles.axes.index("c")] if "c" in roles.axes else None
    return Layout(
        shape=geometry.output_shape,
        dtype=dtype,
        shard=choose_shard(
            geometry,
            job.output.shard,
            chunk,
            growth_of(parse_bytes(job.run.memory_per_worker), source.dtype.itemsize, source, previous),
        ),
        chunk=chunk,
        codec=job.output.codec,
        axes=roles.axes,
        scale=tuple(s / f for s, f in zip(scale, factor, strict=True)),
        units=(None,) * added + tuple(source.units),
        **output_fields(source.ome, roles.axes, scale=scale, factor=factor, channels=channels),
    )


def rim_of(tile: Tile, denoiser: Denoiser, roles: Roles) -> Rim:
    """What a window reads outside the image: on tiled axes by the job's rule, or the denoiser's own."""
    rule = denoiser.boundary if tile.boundary == "auto" else tile.boundary
    return Rim(tuple(rule if i in roles.spatial else "cut" for i in range(len(roles.axes))))


def tiling_of(
    wanted: Tile,
    denoiser: Denoiser,
    roles: Roles,
    reach: Reach,
    geometry: Geometry,
    size: Size,
    block: tuple[int, ...],
    values: tuple[float, float] | None,
    dtype: np.dtype[Any],
) -> Tiling:
    """The compute tiles of a block, and how many are computed at once."""
    wide = dtype.itemsize >= 4 and dtype != np.float32 and not denoiser.convolutional
    least = least_window(geometry, denoiser.convolutional)
    tile = fit_tile(geometry, size, block)
    window = math.prod(t + a + b for t, (a, b) in zip(tile, reach.depth, strict=True))
    # As many pixels at once as one tile of the size asked for: blocks may be smaller than it.
    at_once = math.prod(geometry.spread("tile.size", size, geometry.shape)[i] for i in roles.spatial)
    tiles = math.prod(-(-block[i] // t) for i, t in zip(roles.spatial, tile, strict=True))
    planes = math.prod(block[i] for i in roles.looped)
    batch = min(max(1, at_once // window), tiles * planes) if wanted.batch == "auto" else wanted.batch
    if math.prod(least) <= SMALL_CONVOLUTION and denoiser.convolutional:
        batch = 1  # several images at once go to the other library
    return Tiling(
        tile=tile,
        depth=reach.depth,
        align=(reach.align,) * len(roles.spatial),
        least=least,
        image=tuple(geometry.shape[i] for i in roles.spatial),
        scale=denoiser.scale,
        batch=batch,
        range=values,
        work_dtype="float64" if wide else "float32",
    )


def grid_of(geometry: Geometry, roles: Roles, reach: Reach, block: tuple[int, ...], tiling: Tiling) -> Grid:
    """The super-blocks."""
    depth = dict(zip(roles.spatial, reach.depth, strict=True))
    # The halo beyond the image does not count where the window is cut there.
    least = {i: n + max(depth[i]) for i, n in zip(roles.spatial, tiling.least, strict=True) if n > 1}
    return Grid(
        shape=geometry.shape,
        block=tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)),
        depth=tuple(depth.get(i, (0, 0)) for i in range(len(geometry.shape))),
        align=roles.per_axis(reach.align, 1),
        least=tuple(least.get(i, 1) for i in range(len(geometry.shape))),
    )


def overlap_pays(run: Run) -> bool:
    """Whether there are cores to spare for reading and writing beside the computation."""
    return cores_here() > run.count


def choose_block(
    job: Denoising,
    geometry: Geometry,
    unit: tuple[int, ...],
    previous: dict[str, Any] | None,
    machine: int | None,
    with_sizes: Callable[[tuple[int, ...], Size], tuple[T, Footprint]],
    *,
    on_gpu: bool = False,
) -> tuple[T, Footprint]:
    """The largest tile and super-block that fit the memory of a worker, or else the smallest.

    A resumed run keeps its super-block.
    """
    if job.tile.block != "auto":
        candidates = [check_block(geometry, job.tile.block, unit)]
    elif previous is not None and _fits_unit(tuple(previous["identity"]["block"]), unit, geometry.shape):
        candidates = [tuple(previous["identity"]["block"])]
    else:
        candidates = candidate_blocks(geometry, unit, job.run.count, on_gpu=on_gpu)
    allowed = allowed_bytes(job.run, machine)
    for size, block in itertools.product(candidate_tiles(geometry, job.tile.size), candidates):
        task, needed = with_sizes(block, size)
        if needed.total_bytes <= allowed:
            return task, needed
    return task, needed  # the smallest, which Plan.check_fits refuses


def allowed_bytes(run: Run, machine: int | None) -> int:
    """What one worker may need: as it is told, and no more than its share of a machine of so many bytes."""
    told = parse_bytes(run.memory_per_worker)
    return told if machine is None else min(told, share_bytes(machine, run.count))


def _fits_unit(block: tuple[int, ...], unit: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(block) == len(unit) and all(
        b % u == 0 or b >= n for b, u, n in zip(block, unit, shape, strict=True)
    )
