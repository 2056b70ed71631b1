"""The job ``denoise``: a denoiser applied to every block of an image."""

from halotile.graphs.jobs.denoise.job import CHECKS, RULES, Denoising, headline, plan_rows, title
from halotile.graphs.kinds.base import JobKind

KIND = JobKind(
    job=Denoising,
    plan="halotile.graphs.jobs.denoise.plan:plan_denoising",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks=CHECKS,
    rules=RULES,
    execution_keys=("tile",),
    identity_words={
        "sides": "input.sides",
        "range": "input.range",
        "holes": "input.nodata",
        "defects": "input.defects",
        "stripes": "input.stripes",
    },
    inputs=("input", "sides"),
    checks_nan=True,
)
