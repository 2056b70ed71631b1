"""The job ``reconstruct``: the image that fits a stack of measurements, found by a solver on disk."""

from __future__ import annotations

from halotile.graphs.jobs.reconstruct.job import (
    Reconstruction,
    changes,
    essentials,
    headline,
    plan_rows,
    shortened,
    title,
)
from halotile.graphs.jobs.reconstruct.rules import CHECKS, RULES
from halotile.graphs.kinds.base import JobKind, Steps

KIND = JobKind(
    job=Reconstruction,
    plan="halotile.graphs.jobs.reconstruct.plan:plan_reconstruction",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks=CHECKS,
    rules=RULES,
    how=("tile", "fuse", "exact"),
    on_cpu="operators and solver",
    essentials=essentials,
    changes=changes,
    steps=Steps("iteration", losses=("objective", "misfit"), shortened=shortened),
)
