"""Sizes of a denoising job: geometry, layout of its output, super-blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Size, parse_bytes
from halotile.graphs.plans.cutting import allowed_bytes, blocks_for
from halotile.graphs.plans.resources.memory import Footprint
from halotile.graphs.plans.resources.sizes import (
    Geometry,
    candidate_tiles,
    check_block,
    choose_chunk,
    choose_shard,
    growth_of,
)
from halotile.graphs.plans.trials.receptive_field import Reach
from halotile.storage.arrays import Source
from halotile.storage.grid import Depth
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels, OmeImage, output_fields
from halotile.storage.sharded.output import Layout
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.roles import Roles

T = TypeVar("T")


def geometry_of(source: Readable, denoiser: Denoiser, roles: Roles, reach: Reach) -> Geometry:
    """Return the input and output shapes, with the constraints on the cuts."""
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
        **output_fields(ome, roles.axes, job.output.format, scale=scale, factor=factor, channels=count),
    )


def choose_block(
    job: Denoising,
    geometry: Geometry,
    unit: tuple[int, ...],
    previous: dict[str, Any] | None,
    machine: int | None,
    with_sizes: Callable[[tuple[int, ...], Size], tuple[T, Footprint]],
    depth: Depth,
    *,
    on_gpu: bool = False,
) -> tuple[T, Footprint]:
    """Choose the largest tile and super-block that fit the memory of a worker, or else the smallest.

    A resumed run keeps its super-block.
    """
    if job.tile.block != "auto":
        candidates = [check_block(geometry, job.tile.block, unit)]
    else:
        earlier = previous["identity"]["block"] if previous else None
        candidates = blocks_for(geometry, unit, job.run.count, earlier, on_gpu=on_gpu)
    allowed = allowed_bytes(job.run, machine)
    for size, block in itertools.product(candidate_tiles(geometry, job.tile.size, depth), candidates):
        task, needed = with_sizes(block, size)
        if needed.total_bytes <= allowed:
            return task, needed
    return task, needed  # the smallest, which Plan.check_fits refuses
