"""The job ``ptychography``: object, probe and positions from the patterns of a scan."""

from __future__ import annotations

from halotile.graphs.jobs.ptychography import words
from halotile.graphs.jobs.ptychography.job import Ptychography, shortened
from halotile.graphs.jobs.ptychography.rules import CHECKS, RULES
from halotile.graphs.kinds.base import JobKind
from halotile.graphs.kinds.steps import Steps

KIND = JobKind(
    job=Ptychography,
    plan="halotile.graphs.jobs.ptychography.plan:plan_ptychography",
    title=words.title,
    headline=words.headline,
    rows=words.plan_rows,
    checks=CHECKS,
    rules=RULES,
    inputs=("patterns", "scan"),
    steps=Steps("iteration", ("loss",), shortened, "epoch", drawing="Object: modulus and phase"),
)
