"""A job of SGE's for each worker."""

from __future__ import annotations

from functools import partial

from halotile.graphs.pieces.batch import BatchSystem, jobs, known_to
from halotile.graphs.pieces.walltime import clock

SYSTEM = BatchSystem(
    title="SGE",
    module="sge",
    cluster="SGECluster",
    submits="qsub",
    states=partial(known_to, r"^job_number:\s+{}$", lambda ids: ["qstat", "-j", ",".join(ids)]),
    gpus=lambda choice, _: {"directives": [f"-l gpu={choice.gpus}"]},
    lists="qconf -sql",
    walltime=clock,
    account="project",
)

start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are deleted with the context."""
