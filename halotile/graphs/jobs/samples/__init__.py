"""The job ``samples``: mean and standard deviation of an image, given its measurements and a prior."""

from halotile.graphs.jobs.samples.job import CHECKS, RULES, Sampling, essentials, headline, plan_rows, title
from halotile.graphs.kinds.base import JobKind

KIND = JobKind(
    job=Sampling,
    plan="halotile.graphs.jobs.samples.plan:plan_samples",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks=CHECKS,
    rules=RULES,
    execution_keys=("tile", "exact"),
    essentials=essentials,
)
