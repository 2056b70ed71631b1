"""Which kind of cluster a job means where it is started: what is written, else what the environment says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from halotile import registry
from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.detection.gpus import INSTALL, gpus_here, has_dask_cuda
from halotile.graphs.clusters.detection.launchers import copy_of
from halotile.graphs.jobs.sections import Cluster
from halotile.graphs.rules.words import nearest

AUTO = "auto"
DEFAULT = "local"
VARIABLE = "HALOTILE_CLUSTER"
ADDRESS = "DASK_SCHEDULER_ADDRESS"
"""Where Dask itself looks for a running scheduler."""


@dataclass(frozen=True)
class Kind:
    """A kind of cluster, and why it is that one.

    Parameters
    ----------
    name : str
        A name in ``halotile.graphs.clusters``.
    why : str
        In a few words.
    """

    name: str
    why: str


def kind_of(choice: Cluster, environment: Mapping[str, str] = os.environ) -> Kind:
    """The kind that a job means in an environment.

    What is written comes first; then ``HALOTILE_CLUSTER``, then ``DASK_SCHEDULER_ADDRESS``, then whether this is one of
    several copies of the command (see :mod:`halotile.graphs.clusters.detection.launchers`), then whether it is in a Slurm allocation; at last this machine, its
    GPUs where it has any.

    Raises
    ------
    ConfigError
        When ``HALOTILE_CLUSTER`` names none, and where copies of the command are numbered, and not counted.

    Examples
    --------
    >>> kind_of(Cluster(kind="slurm"), {"HALOTILE_CLUSTER": "local"}).name
    'slurm'
    >>> kind_of(Cluster(), {"HALOTILE_CLUSTER": "local", "SLURM_JOB_ID": "7"}).name
    'local'
    >>> kind_of(Cluster(), {"DASK_SCHEDULER_ADDRESS": "tls://10.0.0.7:8786"}).why
    'DASK_SCHEDULER_ADDRESS is tls://10.0.0.7:8786'
    >>> kind_of(Cluster(), {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).name
    'ranks'
    >>> kind_of(Cluster(), {"CUDA_VISIBLE_DEVICES": ""})
    Kind(name='local', why='no GPU: CUDA_VISIBLE_DEVICES shows none')
    """
    if choice.kind != AUTO:
        return Kind(choice.kind, "as written")
    if choice.address or choice.scheduler_file:
        return Kind("scheduler", "the job says where it is")
    if environment.get(VARIABLE, AUTO) != AUTO:
        return Kind(_known(environment[VARIABLE]), f"{VARIABLE} says so")
    if environment.get(ADDRESS):
        return Kind("scheduler", f"{ADDRESS} is {environment[ADDRESS]}")
    if (found := copy_of(environment)) is not None:
        return Kind("ranks", f"this is copy {found.rank} of {found.size} of the command")
    if "SLURM_JOB_ID" in environment:
        if shutil.which("srun", path=environment.get("PATH")):
            return Kind("slurm-alloc", f"in Slurm's allocation {environment['SLURM_JOB_ID']}")
        return Kind("local", "in an allocation of Slurm's, but there is no srun here")
    gpus = gpus_here(environment)
    if not gpus.names:
        return Kind(DEFAULT, f"no GPU: {gpus.why_none}")
    if not has_dask_cuda():
        return Kind(
            DEFAULT, f"{counted(len(gpus.names), 'GPU')} here are left alone; for a worker on each: {INSTALL}"
        )
    return Kind("local-cuda", f"{counted(len(gpus.names), 'GPU')} here, a worker on each")


def is_other_copy(choice: Cluster, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a copy of the command that is to work for the first one.

    Examples
    --------
    >>> is_other_copy(Cluster(), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"})
    True
    >>> is_other_copy(Cluster(kind="local"), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"})
    False
    """
    return (
        kind_of(choice, environment).name == "ranks"
        and (found := copy_of(environment)) is not None
        and found.rank > 0
    )


def check_startable(choice: Cluster) -> None:
    """Refuse a kind of cluster that cannot be started from here.

    Raises
    ------
    ConfigError, MissingPackage
        Saying what it lacks.
    """
    check = getattr(registry.find("clusters", kind_of(choice).name), "check", None)
    if check is not None:
        check(choice)


def check_one_script(kind: Kind) -> None:
    """Refuse copies of a script: each of them would be a driver.

    Raises
    ------
    ConfigError
        Where the environment says that this is one of several.
    """
    if kind.name == "ranks":
        raise ConfigError(
            f"{kind.why}, and a script is its own driver. Start `recon-cli exec script.py` in its place, in as many copies."
        )


def _known(kind: str) -> str:
    names = registry.names("clusters")
    if kind not in names:
        near = nearest(kind, names, likeness=0.5)
        hint = f"Did you mean {near}?" if near else f"Write one of {', '.join(names)}."
        raise ConfigError(f"{VARIABLE} is {kind!r}, and no cluster is called so. {hint}")
    return kind
