"""Memory needs of a denoising job, and advice where they are too large."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from halotile.graphs.plans.inputs import kept_bytes
from halotile.graphs.plans.plan import Need
from halotile.graphs.plans.resources.memory import MIB, Footprint, footprint, gpu_bytes
from halotile.storage.stored_array import StoredArray
from halotile.storage.views import PlaneValues
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.trials.gpu_findings import Tuned

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
        sides=sum(not isinstance(side, PlaneValues) for side in task.sides.values()) + holed,
        bytes_per_pixel=denoiser.bytes_per_pixel() + HOLED_BYTES * (holed and denoiser.takes_valid),
        weights_bytes=2 * sum(path.stat().st_size for path in denoiser.files()),
        overlap=task.overlap,
        io_threads=task.io_threads,
        coarser=layout.coarser_share,
        gpu_bytes=None if task.device == "cpu" else gpu_bytes(tuned.host_bytes if tuned else None),
    )
    kept = kept_bytes(side for side in task.sides.values() if isinstance(side, StoredArray))
    return replace(needed, decode_bytes=needed.decode_bytes + kept)


def tile_window(task: DenoiseTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the largest tile, and of its window: no larger than the image where it is cut there."""
    tiling = task.tiling
    tile = tuple(min(t, n) for t, n in zip(tiling.tile, tiling.image, strict=True))
    rules = [task.rim.rules[i] for i in task.roles.spatial]
    grown = [t + a + b for t, (a, b) in zip(tile, tiling.depth, strict=True)]
    window = tuple(
        min(g, n) if rule == "cut" else g for g, n, rule in zip(grown, tiling.image, rules, strict=True)
    )
    return tile, window


def need_of(task: DenoiseTask, needed: Footprint, allowed: int, machine: int | None) -> Need:
    """Return the memory that a worker holds during a block, with advice where it may use less."""
    return Need(
        f"one block of {list(task.grid.block)}",
        needed.total_bytes,
        needed.describe(),
        _ways_to_fit(task, needed, allowed, machine),
        _remark_on_depth(task),
    )


def _ways_to_fit(task: DenoiseTask, needed: Footprint, allowed: int, machine: int | None) -> str:
    """Return advice where a block needs more than a worker has: only settings that can help."""
    tile, window = tile_window(task)
    is_deep = math.prod(window) > 4 * math.prod(tile)
    enough = needed.total_bytes
    ways = {
        f"write run.memory_per_worker: {-(-enough // MIB)}MiB": machine is None or enough <= machine,
        f"write {SMALLER}": allowed > needed.fixed_bytes and not is_deep,
        "choose a denoiser that looks less far": is_deep and allowed > needed.fixed_bytes,
        "store the input in smaller chunks": enough - needed.decode_bytes <= allowed,
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
