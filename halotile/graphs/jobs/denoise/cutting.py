"""Sizes of a denoising job: geometry, layout of its output, super-blocks and their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from halotile.graphs.amounts import pixel_size_text
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Size, parse_bytes
from halotile.graphs.plans.choices import describe_denoiser
from halotile.graphs.plans.cutting import (
    BLOCKS_PER_WORKER,
    CHUNK,
    LARGEST_BLOCK,
    MOST_REDUNDANT,
    Geometry,
    Halo,
    allowed_bytes,
    blocks_for,
    candidate_tiles,
    choose_chunk,
    choose_shard,
    growth_of,
)
from halotile.graphs.plans.inputs import kept_bytes
from halotile.graphs.plans.needs import DECODED, MIB, MODEL, PROCESS, TILES, Footprint, Need, footprint, gpu_bytes
from halotile.graphs.plans.trials.gpu_trials import written_tiles
from halotile.storage.arrays import Source
from halotile.storage.grid import Depth
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels, OmeImage, output_fields
from halotile.storage.sharded.output import Layout
from halotile.storage.stored_array import StoredArray
from halotile.storage.views import PlaneValues
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.noise.stripes import WithoutStripes
from halotile.tasks.roles import Roles
from halotile.tasks.trials.gpu_trial import Tuned

HOLED_BYTES = 24.0
"""Further working memory of a filter that leaves out holes, for each pixel of a tile."""
SMALLER = "a smaller output.shard, tile.size or tile.batch"


def footprint_of(task: DenoiseTask, piece: tuple[int, ...], tuned: Tuned | None = None) -> Footprint:
    tiling, denoiser, layout = task.tiling, task.denoiser, task.writer.layout
    middle = task.grid.middle
    channels = max(denoiser.channels) if task.roles.channel is not None else 1
    window = math.prod(tile_window(task)[1])
    read = tuple(
        min(w, n) if rule == "cut" else w
        for w, n, rule in zip(middle.window.shape, task.grid.shape, task.rim.rules, strict=True)
    )
    copied = task.defects is not None
    holed = (task.holes is not None and task.holes.are_likely) or "mask" in task.sides
    core_out = task.roles.output_region(middle.core, tiling.scale, task.channels_out)
    needed = footprint(
        window=read,
        core_out=core_out.shape,
        shard=layout.shard,
        tile_window_pixels=window * channels * tiling.scale ** len(tiling.tile),
        batch=tiling.batch,
        itemsize_in=task.source.dtype.itemsize,
        itemsize_work=np.dtype(tiling.work_dtype).itemsize,
        itemsize_out=np.dtype(layout.dtype).itemsize,
        stored_piece=piece,
        sides=sum(not isinstance(side, PlaneValues) for side in task.sides.values())
        + holed
        + 2 * copied
        + isinstance(task.source, WithoutStripes),
        bytes_per_pixel=denoiser.bytes_per_pixel() + HOLED_BYTES * (holed and denoiser.takes_valid),
        weights_bytes=2 * sum(path.stat().st_size for path in denoiser.files()),
        overlap=task.overlap,
        io_threads=task.io_threads,
        coarser=layout.coarser_share,
        gpu_bytes=None if task.device == "cpu" else gpu_bytes(tuned.host_bytes if tuned else None),
    )
    kept = kept_bytes(side for side in task.sides.values() if isinstance(side, StoredArray))
    # A plane is filtered as float32, from a copy where it is stored otherwise.
    plane = 8 * task.roles.spatial_part(middle.window).size if task.plane_filter() else 0
    return needed | {DECODED: needed[DECODED] + kept, TILES: max(needed[TILES], plane)}


def figures_of(job: Denoising, task: DenoiseTask, halo: Halo, tuned: Tuned | None) -> dict[str, Any]:
    """Return the figures of a plan, by name."""
    grid, roles, layout = task.grid, task.roles, task.writer.layout
    spatial_core = roles.spatial_part(grid.middle.core).size
    spatial_window = roles.spatial_part(task.rim.reach(grid.middle.window, grid.shape)).size
    tile, window = map(math.prod, tile_window(task))
    return {
        "input": job.input.path,
        "shape": list(grid.shape),
        "axes": "".join(roles.axes),
        "tiled_axes": "".join(roles.axes[i] for i in roles.spatial),
        "dtype": str(task.source.dtype),
        "output_shape": list(layout.shape),
        "output_dtype": layout.dtype,
        "pixel_size": pixel_size_text(layout.axes, layout.scale, layout.units),
        "denoiser": job.denoiser.name,
        "tile": list(task.tiling.tile),
        "batch": task.tiling.batch,
        "device": task.device,
        "precision": task.precision,
        "device_memory_bytes": tuned.device_bytes if tuned and task.device != "cpu" else None,
        "tuned": tuned.to_json() if tuned else None,
        "depth": [list(d) for d in task.tiling.depth],
        "depth_from": halo.origin,
        "boundary": task.rim.rules[roles.spatial[0]],
        "read_amplification": round(spatial_window / spatial_core, 4),
        "compute_redundancy": round(window / tile, 4),
    }


def decided_parts(task: DenoiseTask) -> dict[str, Any]:
    """Return the keys whose values were decided; with them the job makes the same output."""
    spatial, layout = task.roles.spatial, task.writer.layout

    def edges(sizes: tuple[int, ...]) -> list[int]:
        return [sizes[i] for i in spatial]

    block = edges(task.grid.block)
    if task.tiling.scale == 1:  # a block that ends with the image is as good as one that ends with its shard
        block = [-(-b // s) * s for b, s in zip(block, edges(layout.shard), strict=True)]
    return {
        "denoiser": describe_denoiser(task.denoiser.inner),
        "output": {"shard": edges(layout.shard), "chunk": edges(layout.chunk), "dtype": layout.dtype},
        "tile": {
            **written_tiles(task),
            "depth": [max(pair) for pair in task.tiling.depth],
            "boundary": task.rim.rules[spatial[0]],
            "block": block,
            "axes": "".join(task.roles.axes[i] for i in spatial),
        },
    }


def tile_window(task: DenoiseTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the largest tile, and of its window: no larger than the image where it is cut there."""
    tiling = task.tiling
    tile = tuple(min(t, n) for t, n in zip(tiling.tile, tiling.image, strict=True))
    rules = [task.rim.rules[i] for i in task.roles.spatial]
    grown = [t + a + b for t, (a, b) in zip(tile, tiling.depth, strict=True)]
    window = tuple(min(g, n) if rule == "cut" else g for g, n, rule in zip(grown, tiling.image, rules, strict=True))
    return tile, window


def need_of(task: DenoiseTask, needed: Footprint, allowed: int, machine: int | None) -> Need:
    """Return the memory that a worker holds during a block, with advice where it may use less."""
    return Need(
        f"one block of {list(task.grid.block)}",
        needed,
        remedy=_ways_to_fit(task, needed, allowed, machine),
        remark=_remark_on_depth(task),
    )


def _ways_to_fit(task: DenoiseTask, needed: Footprint, allowed: int, machine: int | None) -> str:
    """Return advice where a block needs more than a worker has: only settings that can help."""
    tile, window = tile_window(task)
    is_deep = math.prod(window) > 4 * math.prod(tile)
    enough = sum(needed.values())
    has_room = allowed > sum(
        needed[part] for part in (PROCESS, MODEL, DECODED)
    )  # which no smaller tile or block reduces
    ways = {
        f"write run.memory_per_worker: {-(-enough // MIB)}MiB": machine is None or enough <= machine,
        f"write {SMALLER}": has_room and not is_deep,
        "choose a denoiser that looks less far": is_deep and has_room,
        "store the input in smaller chunks": enough - needed[DECODED] <= allowed,
    }
    remedies = ", or ".join(way for way, helps in ways.items() if helps)
    text = remedies or "use a machine with more memory"
    return f"{text[0].upper()}{text[1:]}."


def _remark_on_depth(task: DenoiseTask) -> str:
    """Return the effect of a depth that is large relative to the tile."""
    tile, window = tile_window(task)
    if math.prod(window) <= 2 * math.prod(tile):
        return ""
    edges, reached = (" × ".join(map(str, shape)) for shape in (tile, window))
    deepest = max(itertools.chain.from_iterable(task.tiling.depth))
    return f" With depth {deepest}, a tile of {edges} pixels computes {reached}."


T = TypeVar("T")


def geometry_of(source: Readable, denoiser: Denoiser, roles: Roles, align: int) -> Geometry:
    """Return the input and output shapes, with the constraints on the cuts."""
    output_shape = [n * f for n, f in zip(source.shape, roles.per_axis(denoiser.scale, 1), strict=True)]
    if roles.channel is not None:
        output_shape[roles.channel] = denoiser.channels[1]
    return Geometry(source.shape, tuple(output_shape), roles, denoiser.scale, align)


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
            growth_of(parse_bytes(job.run.memory_per_worker), source.dtype.itemsize, source, previous, job.output),
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
    cuts: Sequence[tuple[tuple[int, ...], Callable[[tuple[int, ...], Size], tuple[AnyDenoiseTask, Footprint]]]],
    previous: dict[str, Any] | None,
    machine: int | None,
    depth: Depth,
    *,
    on_gpu: bool = False,
) -> tuple[AnyDenoiseTask, Footprint]:
    """Choose the largest tile and super-block that fit the memory of a worker, or else the smallest.

    ``cuts`` are the smallest blocks that come into question, each with a function that returns the task with these sizes, and its
    memory. A resumed run keeps its super-block.
    """
    allowed = allowed_bytes(job.run, machine)
    chosen = []
    for unit, with_sizes in cuts:
        earlier = previous["identity"]["block"] if previous else None
        candidates = blocks_for(geometry, unit, job.run.count, earlier, given=job.tile.block, on_gpu=on_gpu)
        sizes = itertools.product(candidate_tiles(geometry, job.tile.size, depth), candidates)
        tried = (with_sizes(block, size) for size, block in sizes)
        chosen.append(_first_or_last(tried, lambda cut: sum(cut[1].values()) <= allowed))
    # What does not fit is refused by Plan.check_fits.
    fitting = [cut for cut in chosen if sum(cut[1].values()) <= allowed] or chosen[:1]
    frugal = (cut for cut in fitting if _redundancy(cut[0]) <= MOST_REDUNDANT)
    return next(frugal, min(fitting, key=lambda cut: _redundancy(cut[0])))


def _first_or_last(values: Iterable[T], fits: Callable[[T], bool]) -> T:
    """Return the first value that fits, or the last one if none does."""
    for value in values:
        if fits(value):
            break
    return value


def _redundancy(task: AnyDenoiseTask) -> float:
    """Return the ratio of computed to written pixels, of the part with the largest."""
    pairs = [zip(part.tiling.tile, part.tiling.depth, strict=True) for part in task.parts]
    return max(math.prod((edge + before + after) / edge for edge, (before, after) in pair) for pair in pairs)


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
