"""The figures of a reconstruction's plan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halotile.graphs.jobs.reconstruct.problem.inversion import Inversion
from halotile.graphs.jobs.reconstruct.problem.traffic import computed_twice, pixels_read, traffic_of
from halotile.graphs.solvers._subsets import SubsetSolver
from halotile.graphs.subsets import ordered_subset
from halotile.tasks.priors.base import denoised_of


def figures_of(work: Inversion) -> dict[str, Any]:
    """Return the figures of an inversion, by name."""
    job, form, grid, choice = work.job, work.form, work.grid, work.job.solver
    seen = form
    if isinstance(work.solver, SubsetSolver):
        count = len(form.terms)
        seen = form.of(ordered_subset(count, work.solver.count(count), 0))
    traffic = traffic_of(grid, seen, work.prior, work.solver, np.dtype(work.state_layout.dtype))
    read = pixels_read(grid, form.view(work.prior.reach())) / math.prod(grid.shape)
    return {
        "shape": list(grid.shape),
        "dtype": work.output.layout.dtype,
        "operators": [term.operator.name for term in form.terms],
        "data": [operator.data for operator in job.operators],
        "form": form.describe(),
        "fidelity": job.fidelity.name,
        "prior": job.prior.name,
        "denoiser": denoised.denoiser.name
        if (denoised := denoised_of(work.prior)) and "denoiser" in job.prior.options
        else None,
        **_tiles(work),
        "solver": work.solver.name,
        "step": choice.step,
        "iterations": choice.iterations,
        "passes_before": work.before_iterations,
        "total_passes": work.before_iterations + choice.iterations // form.per_pass + work.judges + 1,
        "halo": work.halo,
        "read_amplification": round(read, 4),
        "passes": 2 if form.apart else 1,
        "per_pass": form.per_pass,
        "computed_twice": round(computed_twice(grid, work.output.layout.shard, form, work.prior), 4),
        "iteration_bytes": (traffic.unfused or traffic.fused) if form.apart else traffic.fused,
        "iteration_bytes_fused": traffic.fused,
        "iteration_bytes_unfused": traffic.unfused,
    }


def _tiles(work: Inversion) -> dict[str, Any]:
    """Return the figures of the prior's tiles, where it denoises."""
    denoised = denoised_of(work.prior)
    if denoised is None:
        return {}
    on_gpu = work.tuned is not None and denoised.device != "cpu"
    return {
        "device": denoised.device,
        "precision": denoised.precision,
        "tile": list(denoised.tiling.tile),
        "batch": denoised.tiling.batch,
        "device_memory_bytes": work.tuned.device_bytes if work.tuned and on_gpu else None,
        "tuned": work.tuned.to_json() if work.tuned else None,
    }
