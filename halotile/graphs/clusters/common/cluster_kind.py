"""The kind of cluster that a job means where it is started: as written, else as the environment suggests."""

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import takewhile

from halotile import registry
from halotile.errors import ConfigError
from halotile.graphs.clusters.base import AUTO, VARIABLE, ChosenCluster, Environment, starter_of
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.words import nearest
from halotile.tasks.groups.opening import copy_of


def cluster_kind_of(choice: Cluster, environment: Environment = os.environ) -> ChosenCluster:
    """The kind that a job means in an environment.

    The kind in the job comes first; then ``HALOTILE_CLUSTER``, then ``DASK_SCHEDULER_ADDRESS``, then several copies of the command
    (see :mod:`halotile.tasks.groups.opening`), then a Slurm allocation; at last this machine, with its GPUs where it
    has any.

    >>> cluster_kind_of(Cluster(kind="slurm"), {"HALOTILE_CLUSTER": "local"}).name
    'slurm'
    >>> cluster_kind_of(Cluster(), {"HALOTILE_CLUSTER": "local", "SLURM_JOB_ID": "7"}).name
    'local'
    >>> cluster_kind_of(Cluster(), {"DASK_SCHEDULER_ADDRESS": "tls://10.0.0.7:8786"}).why
    'DASK_SCHEDULER_ADDRESS is tls://10.0.0.7:8786'
    >>> cluster_kind_of(Cluster(), {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).name
    'ranks'
    >>> cluster_kind_of(Cluster(), {"CUDA_VISIBLE_DEVICES": ""})
    ChosenCluster(name='local', why='no GPU: CUDA_VISIBLE_DEVICES shows none')
    """
    from halotile.graphs.clusters import local_cuda, ranks, scheduler, slurm_alloc

    if choice.kind != AUTO:
        return ChosenCluster(choice.kind, "as written")
    if choice.address or choice.scheduler_file:
        return ChosenCluster("scheduler", "the job gives its address")
    if environment.get(VARIABLE, AUTO) != AUTO:
        return ChosenCluster(_known(environment[VARIABLE]), f"{VARIABLE} is set to it")
    for detect in (scheduler.detect, ranks.detect, slurm_alloc.detect):  # in order of precedence
        if kind := detect(environment):
            return kind
    return local_cuda.detect(environment)


def is_other_copy(choice: Cluster, environment: Environment = os.environ) -> bool:
    """Return True for a copy of the command that is to work for the first one.

    >>> is_other_copy(Cluster(), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"})
    True
    >>> is_other_copy(Cluster(kind="local"), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"})
    False
    """
    if not cluster_kind_of(choice, environment).traits.of_copies:
        return False
    copy = copy_of(environment)
    return copy is not None and copy.rank > 0


def check_startable(choice: Cluster) -> None:
    """Refuse a kind of cluster that cannot be started from here."""
    check = getattr(starter_of(cluster_kind_of(choice).name), "check", None)
    if check is not None:
        check(choice)


def check_one_script(
    kind: ChosenCluster, reason: str = "a script is its own driver", *, words: Sequence[str] = ()
) -> None:
    """Refuse copies of a script, or of ``recon-cli exec`` with these words: each of them would be a driver."""
    if kind.traits.of_copies:
        copy, (script, *arguments) = copy_of(), sys.argv
        words = words or [script, *(["--", *arguments] if arguments else [])]
        if not any(word.startswith("--workers") for word in takewhile("--".__ne__, words)):
            words = ["--workers", str(copy.size if copy else 1), *words]
        raise ConfigError(
            f"{kind.why}, and {reason}. Start it once, without torchrun, srun or mpirun: "
            f"`{shlex.join(['recon-cli', 'exec', *words])}`."
        )


def _known(kind: str) -> str:
    names = registry.names("clusters")
    if kind not in names:
        near = nearest(kind, names, likeness=0.5)
        hint = f"Did you mean {near}?" if near else f"Write one of {', '.join(names)}."
        raise ConfigError(f"{VARIABLE} is {kind!r}, and there is no such kind of cluster. {hint}")
    return kind
