"""An SGE job for each worker."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows, clock
from halotile.graphs.kinds import sections

_SHELL = re.compile(r"^\s*-S\s")
_PARALLEL = re.compile(r"(^|[ \t])-pe[ \t]+\S+[ \t]+\S+")
_MEMORY = re.compile(r"\b(h_|s_)?(vmem|rss|data)\b|mem_free|virtual_free|\bmem\b")


def requests(choice: sections.Cluster, memory_bytes: int, _: Path) -> Mapping[str, Any]:
    """The shell, and memory by the name that every Grid Engine knows, unless the job names its own."""
    directives = SYSTEM.directives_of(choice)
    if choice.cores > 1 and not any(map(_PARALLEL.search, directives)):
        raise ConfigError(
            f"cluster.cores is {choice.cores}, and SGE gives a job several cores by a parallel environment, whose name differs from "
            f'site to site (`qconf -spl` lists them). Write directives: ["-pe smp {choice.cores}"], say, or cores: 1.'
        )
    # The shell of a queue may be csh, whatever the first line of the script.
    shell = {"directives": [] if any(map(_SHELL.match, directives)) else ["-S /bin/bash"]}
    if any(map(_MEMORY.search, directives)):
        return shell
    return {**shell, "resource_spec": f"mem_free={-(-memory_bytes // 2**20)}M"}


SYSTEM = BatchSystem(
    title="SGE",
    module="sge",
    cluster="SGECluster",
    submits="qsub",
    cancels="qdel",
    # One in error stays in the queue until a person clears it.
    states=JobRows("qstat -j {}", r"^job_number:\s+{}$", r"[\s\S]*?^error reason\s+\d+:\s*(.*)$", "Eqw ({})", ","),
    gpus=lambda choice, _: {"directives": [f"-l gpu={choice.gpus}"]},
    lists="`qconf -sql` lists its queues",
    walltime=clock,
    driver=(),
    account="project",
    requests=requests,
    stays=("Eqw",),
    worker_options=_PARALLEL.pattern,
)
