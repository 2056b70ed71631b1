"""The figures of a denoising plan, and the keys that it decided."""

from __future__ import annotations

import math
from typing import Any

from halotile.graphs.jobs.denoise.fit import tile_window
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.denoisers import describe_denoiser
from halotile.graphs.plans.trials.gpu_trials import written_tiles
from halotile.graphs.plans.trials.receptive_field import Halo
from halotile.graphs.units import pixel_size_text
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.trials.gpu_findings import Tuned


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
        "denoiser": task.denoiser.name,
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
