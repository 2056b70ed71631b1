"""The job ``denoise``: a denoiser applied to every block of an image."""

from __future__ import annotations

from halotile.graphs.jobs.denoise import words
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.rules import CHECKS, RULES
from halotile.graphs.kinds.base import JobKind

KIND = JobKind(
    job=Denoising,
    plan="halotile.graphs.jobs.denoise.plan:plan_denoising",
    title=words.title,
    headline=words.headline,
    rows=words.plan_rows,
    checks=CHECKS,
    rules=RULES,
    how=("tile",),
    identity_words={"sides": "input.sides", "range": "input.range", "holes": "input.nodata"},
    inputs=("input", "sides"),
    checks_nan=True,
)
