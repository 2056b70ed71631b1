"""Sizes of a denoising job: geometry, layout of its output, super-blocks and their memory."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from halotile.graphs.jobs.denoise.image import JobImage
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import Footprint, Need
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans import needs
from halotile.graphs.plans.choices import describe_denoiser, kept_bytes
from halotile.graphs.plans.cutting import Geometry, Halo, layout_like
from halotile.graphs.plans.trials.gpu_trials import tile_figures, written_tiles
from halotile.graphs.words import pixel_size_text
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels, OmeImage
from halotile.storage.sharded.output import Layout
from halotile.storage.stored_array import StoredArray
from halotile.storage.views import PlaneValues
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.devices.gpu import BUFFERS
from halotile.tasks.inner_tiles import STRIP, Roles
from halotile.tasks.noise.stripes import WithoutStripes
from halotile.tasks.trials.gpu_trial import Tuned

HOLED_BYTES = 24.0  # further working memory of a filter that leaves out holes, for each pixel of a tile
SMALLER = "a smaller output.shard, tile.size or tile.batch"


def footprint_of(task: DenoiseTask, chunk: tuple[int, ...], tuned: Tuned | None = None) -> Footprint:
    """Return the memory that a worker holds during a block, by purpose; ``chunk``: that of the input, in pixels."""
    tiling, denoiser, layout, middle = task.tiling, task.denoiser, task.writer.layout, task.grid.middle
    ends = zip(middle.window.shape, task.grid.shape, task.rim.rules, strict=True)
    read = math.prod(min(w, n) if rule == "cut" else w for w, n, rule in ends) * task.source.dtype.itemsize
    holed = (task.holes is not None and task.holes.are_likely) or "mask" in task.sides
    sides = sum(not isinstance(side, PlaneValues) for side in task.sides.values()) + holed
    sides += 2 * (task.defects is not None) + isinstance(task.source, WithoutStripes)
    core = task.roles.output_region(middle.core, tiling.scale, task.channels_out).size
    # A result has the type of the computation until it is encoded, by several threads.
    result = core * np.dtype(tiling.work_dtype).itemsize
    encoded = task.io_threads * 2 * math.prod(layout.shard) + layout.coarser_share * core
    encode = int(encoded * np.dtype(layout.dtype).itemsize)
    # A chunk is in memory both encoded and decoded.
    decoded = task.io_threads * 2 * math.prod(chunk) * task.source.dtype.itemsize
    common = {
        needs.MODEL: 2 * sum(path.stat().st_size for path in denoiser.files()),
        needs.DECODED: decoded + kept_bytes(side for side in task.sides.values() if isinstance(side, StoredArray)),
    }
    if task.device != "cpu":  # there the tiles are, and pixels pass through pinned memory on their way
        return common | {
            needs.PROCESS: needs.IMPORTS_BYTES + needs.gpu_bytes(tuned.host_bytes if tuned else None),
            needs.READ: read * (1 + sides) + BUFFERS * needs.pinned(read),
            needs.WRITTEN: 2 * result + BUFFERS * needs.pinned(result) + encode,
            needs.TILES: 0,
        }
    channels = max(denoiser.channels) if task.roles.channel is not None else 1
    window = math.prod(tile_window(task)[1]) * channels * tiling.scale ** len(tiling.tile)
    own_bytes = denoiser.bytes_per_pixel() + HOLED_BYTES * (holed and denoiser.takes_valid)
    height, *across = task.roles.spatial_part(middle.window).shape
    # A strip of a plane as it is read, converted, filtered and converted back; a plane with holes is cut into tiles.
    strip = 16 * min(height, STRIP + sum(tiling.depth[0])) * math.prod(across) if task.plane_filter() else 0
    return common | {
        needs.PROCESS: needs.IMPORTS_BYTES,
        needs.READ: read * (1 + sides) * (1 + task.overlap),
        # The next window may begin in the space of a result, and the next result finds no room there: one more is counted.
        needs.WRITTEN: result * (2 + task.overlap) + encode,
        needs.TILES: max(strip, int(window * tiling.batch * (own_bytes + 4 * (2 + sides)))),
    }


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
        "output_shape": list(layout.shape),
        "output_dtype": layout.dtype,
        "pixel_size": pixel_size_text(layout.axes, layout.scale, layout.units),
        "denoiser": job.denoiser.name,
        **tile_figures(task, tuned),
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
        needed[part] for part in (needs.PROCESS, needs.MODEL, needs.DECODED)
    )  # which no smaller tile or block reduces
    ways = {
        f"write run.memory_per_worker: {-(-enough // needs.MIB)}MiB": machine is None or enough <= machine,
        f"write {SMALLER}": has_room and not is_deep,
        "choose a denoiser with a smaller receptive field": is_deep and has_room,
        "store the input in smaller chunks": enough - needed[needs.DECODED] <= allowed,
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


def geometry_of(source: Readable, denoiser: Denoiser, roles: Roles, align: int) -> Geometry:
    """Return the input and output shapes, with the constraints on the cuts."""
    output_shape = [n * f for n, f in zip(source.shape, roles.per_axis(denoiser.scale, 1), strict=True)]
    if roles.channel is not None:
        output_shape[roles.channel] = denoiser.channels[1]
    return Geometry(source.shape, tuple(output_shape), roles, denoiser.scale, align)


def layout_of(image: JobImage, geometry: Geometry, dtype: str, channels: Channels) -> Layout:
    """Return the layout of the output, with what is kept from the input and from a resumed run."""
    job, source, roles = image.job, image.original, image.roles
    ome = source.ome or OmeImage()
    if ome.omero is None and channels:
        ome = replace(ome, omero={"channels": list(channels)})  # as it comes back from JSON
    requested, memory_bytes = replace(job.output, dtype=dtype), parse_bytes(job.run.memory_per_worker)
    layout = layout_like(source, requested, geometry, source.dtype, memory_bytes, image.previous, ome)
    by_axis = dict(zip(roles.axes, roles.per_axis(geometry.scale, 1), strict=True))
    place, channel = source.georeference, roles.channel
    return replace(
        layout,
        nodata=image.holed.value,
        georeference=place.resampled(1 / by_axis["y"], 1 / by_axis["x"]) if place else None,
        # Another number of channels is another quantity.
        attributes=source.attributes if channel is None or layout.shape[channel] == geometry.shape[channel] else {},
    )


def redundancy_of(task: AnyDenoiseTask) -> float:
    """Return the ratio of computed to written pixels, of the part with the largest."""
    pairs = [zip(part.tiling.tile, part.tiling.depth, strict=True) for part in task.parts]
    return max(math.prod((edge + before + after) / edge for edge, (before, after) in pair) for pair in pairs)
