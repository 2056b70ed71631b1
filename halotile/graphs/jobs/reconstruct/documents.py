"""The parts of a reconstruction that a job file writes differently, and those that a plan decides."""

from __future__ import annotations

from typing import Any

from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.jobs.reconstruct.measurements.operators import written
from halotile.graphs.jobs.reconstruct.problem.inversion import Inversion
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.plans.denoisers import describe_denoiser
from halotile.graphs.plans.trials.gpu_trials import written_tiles
from halotile.tasks.priors.base import denoised_of


def given_parts(job: Reconstruction) -> dict[str, Any]:
    """Return the parts that a job file writes differently: objects that only a script can pass are described."""
    options = {key: _given(value) for key, value in job.prior.options.items()}
    prior = {"name": job.prior.name, **options}
    return {"operators": [written(choice) for choice in job.operators], "prior": prior}


def _given(value: Any) -> Any:
    """Return an option of a prior; a denoiser from a script as the mapping that a file has."""
    if isinstance(value, NamedChoice):
        return {"name": value.name, **value.options}
    return describe_denoiser(value) if hasattr(value, "build") else value


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
