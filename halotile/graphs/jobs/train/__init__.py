"""The job ``train``: a denoiser trained on noisy images."""

from halotile.graphs.jobs.train.job import CHECKS, RULES, Training, headline, plan_rows, shortened, title
from halotile.graphs.kinds.base import JobKind, Steps

KIND = JobKind(
    job=Training,
    plan="halotile.graphs.jobs.train.plan:plan_training",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks=CHECKS,
    rules=RULES,
    inputs=("input", "second"),
    steps=Steps(
        "iteration",
        ("loss",),
        shortened,
        "step",
        lambda figures: figures["steps"] / figures["epochs"],
        "Patches as they are, above the same ones denoised",
    ),
)
