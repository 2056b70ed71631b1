"""The figures of a reconstruction's plan, for people and for programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from halotile.graphs.job import parse_bytes
from halotile.graphs.traffic import computed_twice, pixels_read, traffic_of

if TYPE_CHECKING:
    from halotile.graphs.reconstruction import ReconstructionPlan


def summary_of(plan: ReconstructionPlan) -> dict[str, Any]:
    """The figures of a plan."""
    dtype = np.dtype(plan.state_layout.dtype)
    traffic = traffic_of(plan.grid, plan.form, plan.prior, plan.solver, dtype)
    return {
        "output": str(plan.output),
        "shape": list(plan.grid.shape),
        "dtype": plan.layout.dtype,
        "operators": [term.operator.name for term in plan.form.terms],
        "data": [choice.data for choice in plan.job.operators],
        "form": plan.form.in_words(),
        "fidelity": plan.job.fidelity.name,
        "prior": plan.job.prior.name,
        "denoiser": _denoiser(plan),
        "solver": plan.solver.name,
        "step": plan.job.solver.step,
        "iterations": plan.job.solver.iterations,
        "sweeps_before": plan.before_iterations,
        "sweeps": plan.sweeps,
        "blocks": len(plan.grid),
        "block": list(plan.grid.block),
        "shard": list(plan.layout.shard),
        "chunk": list(plan.layout.chunk),
        "codec": plan.layout.codec,
        "halo": plan.halo,
        "read_amplification": round(pixels_read(plan.grid, plan.halo) / math.prod(plan.grid.shape), 4),
        "passes": 2 if plan.form.apart else 1,
        "computed_twice": round(computed_twice(plan.grid, plan.prior), 4),
        "iteration_bytes": (traffic.unfused or traffic.fused) if plan.form.apart else traffic.fused,
        "iteration_bytes_fused": traffic.fused,
        "iteration_bytes_unfused": traffic.unfused,
        "peak_memory_per_worker_bytes": plan.memory_bytes,
        "memory_per_worker_bytes": parse_bytes(plan.job.run.memory_per_worker),
        "output_bytes": plan.output_bytes,
        "scratch_bytes": plan.scratch_bytes,
        "free_disk_bytes": plan.free_disk_bytes,
        "workers": plan.job.run.workers,
        "resumes": plan.resumes,
        "fingerprint": plan.fingerprint,
        "notes": list(plan.notes),
    }


def _denoiser(plan: ReconstructionPlan) -> str | None:
    """The denoiser of the prior, in a word; None where there is none."""
    choice = plan.job.prior.denoiser
    return getattr(choice, "name", type(choice).__name__) if choice is not None else None
