"""The figures of a denoising plan."""

from __future__ import annotations

import math
from typing import Any

from halotile.graphs.jobs.denoise.fit import tile_window
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.trials.receptive_field import Reach
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.trials.gpu_findings import Tuned


def figures_of(job: Denoising, task: DenoiseTask, reach: Reach, tuned: Tuned | None) -> dict[str, Any]:
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
        "denoiser": task.denoiser.name,
        "tile": list(task.tiling.tile),
        "batch": task.tiling.batch,
        "device": task.device,
        "precision": task.precision,
        "device_memory_bytes": tuned.device_bytes if tuned and task.device != "cpu" else None,
        "tuned": tuned.to_json() if tuned else None,
        "depth": [list(d) for d in task.tiling.depth],
        "depth_from": reach.origin,
        "boundary": task.rim.rules[roles.spatial[0]],
        "read_amplification": round(spatial_window / spatial_core, 4),
        "compute_redundancy": round(window / tile, 4),
    }
