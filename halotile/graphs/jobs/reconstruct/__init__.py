"""The job ``reconstruct``: the image that fits a stack of measurements, found by a solver on disk."""

from halotile.graphs.jobs.reconstruct import job
from halotile.graphs.jobs.reconstruct.rules import CHECKS, RULES
from halotile.graphs.kinds.base import JobKind, Steps

KIND = JobKind(
    job=job.Reconstruction,
    plan="halotile.graphs.jobs.reconstruct.plan:plan_reconstruction",
    title=job.title,
    headline=job.headline,
    rows=job.plan_rows,
    checks=CHECKS,
    rules=RULES,
    execution_keys=("tile", "fuse", "exact"),
    on_cpu="operators and solver",
    essentials=job.essentials,
    changes=job.changes,
    steps=Steps("iteration", losses=("objective", "misfit"), shortened=job.shortened),
)
