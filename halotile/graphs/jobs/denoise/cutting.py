"""Sizes of a denoising job: geometry, layout of its output, super-blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Size, parse_bytes
from halotile.graphs.plans.cutting import allowed_bytes, blocks_for
from halotile.graphs.plans.resources.memory import Footprint
from halotile.graphs.plans.resources.sizes import (
    BLOCKS_PER_WORKER,
    CHUNK,
    LARGEST_BLOCK,
    MOST_REDUNDANT,
    Geometry,
    candidate_tiles,
    check_block,
    choose_chunk,
    choose_shard,
    growth_of,
)
from halotile.graphs.plans.trials.receptive_field import Halo
from halotile.storage.arrays import Source
from halotile.storage.grid import Depth
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels, OmeImage, output_fields
from halotile.storage.sharded.output import Layout
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.roles import Roles

T = TypeVar("T")


def geometry_of(source: Readable, denoiser: Denoiser, roles: Roles, halo: Halo) -> Geometry:
    """Return the input and output shapes, with the constraints on the cuts."""
    output_shape = [n * f for n, f in zip(source.shape, roles.per_axis(denoiser.scale, 1), strict=True)]
    if roles.channel is not None:
        output_shape[roles.channel] = denoiser.channels[1]
    return Geometry(source.shape, tuple(output_shape), roles, denoiser.scale, halo.align)


def layout_of(
    job: Denoising,
    source: Source,
    geometry: Geometry,
    roles: Roles,
    previous: Mapping[str, Any] | None = None,
    *,
    dtype: str,
    nodata: float | None = None,
    channels: Channels = (),
) -> Layout:
    """Return the layout of the output, with what is kept from the input and from a resumed run."""
    chunk = choose_chunk(geometry, job.output)
    added = len(roles.axes) - len(source.axes)
    factor = roles.per_axis(geometry.scale, 1)
    scale = (1.0,) * added + tuple(source.scale)
    count = geometry.output_shape[roles.axes.index("c")] if "c" in roles.axes else None
    by_axis = dict(zip(roles.axes, factor, strict=True))
    place = source.georeference
    ome = source.ome or OmeImage()
    if ome.omero is None and channels:
        ome = replace(ome, omero={"channels": list(channels)})  # as it comes back from JSON
    return Layout(
        shape=geometry.output_shape,
        dtype=dtype,
        shard=choose_shard(
            geometry,
            job.output.shard,
            chunk,
            growth_of(
                parse_bytes(job.run.memory_per_worker), source.dtype.itemsize, source, previous, job.output
            ),
        ),
        chunk=chunk,
        codec=job.output.codec,
        axes=roles.axes,
        scale=tuple(s / f for s, f in zip(scale, factor, strict=True)),
        units=(None,) * added + tuple(source.units),
        nodata=nodata,
        georeference=place.resampled(1 / by_axis["y"], 1 / by_axis["x"]) if place else None,
        # Another number of channels is another quantity.
        attributes=source.attributes if geometry.keeps_channels else {},
        **output_fields(ome, roles.axes, job.output.format, scale=scale, factor=factor, channels=count),
    )


def choose_block(
    job: Denoising,
    geometry: Geometry,
    cuts: Sequence[tuple[tuple[int, ...], Callable[[tuple[int, ...], Size], tuple[DenoiseTask, Footprint]]]],
    previous: dict[str, Any] | None,
    machine: int | None,
    depth: Depth,
    *,
    on_gpu: bool = False,
) -> tuple[DenoiseTask, Footprint]:
    """Choose the largest tile and super-block that fit the memory of a worker, or else the smallest.

    ``cuts`` are the smallest blocks that come into question, each with a function that returns the task with these sizes, and its
    memory. A resumed run keeps its super-block.
    """
    allowed = allowed_bytes(job.run, machine)
    chosen = []
    for unit, with_sizes in cuts:
        if job.tile.block != "auto":
            candidates = [check_block(geometry, job.tile.block, unit)]
        else:
            earlier = previous["identity"]["block"] if previous else None
            candidates = blocks_for(geometry, unit, job.run.count, earlier, on_gpu=on_gpu)
        sizes = itertools.product(candidate_tiles(geometry, job.tile.size, depth), candidates)
        tried = (with_sizes(block, size) for size, block in sizes)
        chosen.append(_first_or_last(tried, lambda cut: cut[1].total_bytes <= allowed))
    # What does not fit is refused by Plan.check_fits.
    fitting = [cut for cut in chosen if cut[1].total_bytes <= allowed] or chosen[:1]
    frugal = (cut for cut in fitting if _redundancy(cut[0]) <= MOST_REDUNDANT)
    return next(frugal, min(fitting, key=lambda cut: _redundancy(cut[0])))


def _first_or_last(values: Iterable[T], fits: Callable[[T], bool]) -> T:
    """Return the first value that fits, or the last one if none does."""
    for value in values:
        if fits(value):
            break
    return value


def _redundancy(task: DenoiseTask) -> float:
    """Return the ratio of computed to written pixels."""
    pairs = zip(task.tiling.tile, task.tiling.depth, strict=True)
    return math.prod((edge + before + after) / edge for edge, (before, after) in pairs)


def larger_shards(job: Denoising, geometry: Geometry, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Return larger shards for a volume of which nothing but the memory decides the cuts, as long as they keep all workers busy."""
    if geometry.dims < 3 or (job.output.shard, job.tile.block, job.tile.size) != ("auto", "auto", "auto"):
        return
    for edge in range(0, LARGEST_BLOCK[3] + 1, CHUNK[3]):
        cut = [
            max(s, edge // c * c) if i in geometry.roles.spatial else s
            for i, (s, c) in enumerate(zip(layout.shard, layout.chunk, strict=True))
        ]
        shard = tuple(min(s, -(-n // c) * c) for s, n, c in zip(cut, layout.shape, layout.chunk, strict=True))
        blocks = math.prod(-(-n // s) for n, s in zip(layout.shape, shard, strict=True))
        if shard != layout.shard and blocks >= job.run.count * BLOCKS_PER_WORKER:
            yield shard
