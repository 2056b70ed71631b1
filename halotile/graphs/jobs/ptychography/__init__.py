"""The job ``ptychography``: object, probe and positions from the patterns of a scan."""

from typing import Any

from halotile.graphs.jobs.ptychography.job import CHECKS, RULES, Ptychography, headline, plan_rows, shortened, title
from halotile.graphs.kinds.base import JobKind, Revision, Steps


def _kept_stages(*args: Any) -> int:
    from halotile.graphs.jobs.ptychography.plan import kept_stages  # late: it loads what plans need

    return kept_stages(*args)


KIND = JobKind(
    job=Ptychography,
    plan="halotile.graphs.jobs.ptychography.plan:plan_ptychography",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks=CHECKS,
    rules=RULES,
    inputs=("patterns", "scan"),
    changes=lambda job: job.get("stages"),
    steps=Steps("iteration", ("loss",), shortened, "epoch", drawing="Object: modulus and phase"),
    revision=Revision("stages", _kept_stages),
)
