"""The parts of a reconstruction that a job file writes in words of its own, and those that a plan decides."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from halotile.graphs.jobs.reconstruct.inversion import Inversion
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.jobs.reconstruct.operators import written
from halotile.graphs.jobs.reconstruct.prior import denoised_of
from halotile.graphs.jobs.sections import DenoiserChoice
from halotile.graphs.plans.gpu_trials import written_tiles
from halotile.graphs.plans.opening import describe_denoiser


def given_parts(job: Reconstruction) -> dict[str, Any]:
    """Return the parts that a job file writes in words of its own: what only Python can say is described."""
    prior = {each.name: getattr(job.prior, each.name) for each in fields(job.prior)}
    denoiser = job.prior.denoiser
    if isinstance(denoiser, DenoiserChoice):
        prior["denoiser"] = {"name": denoiser.name, **denoiser.options}
    elif denoiser is not None:
        prior["denoiser"] = describe_denoiser(denoiser)
    return {"operators": [written(choice) for choice in job.operators], "prior": prior}


def decided_parts(work: Inversion) -> dict[str, Any]:
    """Return the keys whose values were decided; with them the job makes the same output."""
    layout = work.output.layout
    shard, block = (list(sizes[-2:]) for sizes in (layout.shard, work.grid.block))
    tile = {"block": [-(-b // s) * s for b, s in zip(block, shard, strict=True)]}
    denoised = denoised_of(work.prior)
    return {
        "shape": list(work.grid.shape),
        "output": {"shard": shard, "chunk": list(layout.chunk[-2:]), "dtype": layout.dtype},
        "tile": tile | (written_tiles(denoised) if denoised else {}),
    }
