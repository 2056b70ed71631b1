"""An HTCondor job for each worker."""

import re

from halotile.graphs.clusters.base import ClusterTraits
from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows

TRAITS = ClusterTraits(ignored=("queue", "account", "walltime"))

SYSTEM = BatchSystem(
    title="HTCondor",
    module="htcondor",
    cluster="HTCondorCluster",
    submits="condor_submit",
    cancels="condor_rm",
    # One on hold waits for a person.
    states=JobRows("condor_q {} -af:j JobStatus HoldReason", r"^{}(?:\.\d+)?\s+", "5 (.*)", "held ({})"),
    gpus=lambda choice, _: {"directives": [f"request_gpus = {choice.gpus}"]},
    lists="`condor_status` lists its machines",
    directives=lambda lines: dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines),
    prologue=lambda line: line.replace("$(", "$(DOLLAR)("),  # HTCondor would expand it as a macro of its own
    defaults={"disk": "2GiB"},
)
