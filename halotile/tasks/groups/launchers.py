"""The variables by which launchers number the copies of a command that they start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from halotile.errors import ConfigError

OWN_RANK = "HALOTILE_RANK"
OWN_SIZE = "HALOTILE_SIZE"
"""Together with HALOTILE_RANK it takes precedence over the variables of any launcher; it also gives the number that PMIx and PALS may
leave out."""
OWN_LOCAL = "HALOTILE_LOCAL_RANK"
"""It gives the number among the copies of a machine where a launcher leaves it out."""
UNCOUNTED = ("PMIX_RANK", "PALS_RANKID")
"""Set by launchers that number their copies, and may leave their count to a library."""


@dataclass(frozen=True)
class Launcher:
    """The names of one launcher's variables."""

    rank: str  # rank, size: variables with the number of this copy, and with the number of copies
    size: str
    local_rank: str  # local_rank, local_size: same among the copies on this machine
    local_size: str
    launch: tuple[str, ...] = ()  # variables that distinguish two launches
    by_slurm: bool = False  # true if `srun` may have set them


def _launcher(names: str, launch: str = "", *, by_slurm: bool = False) -> Launcher:
    """A launcher by its variables: four in their order, or a prefix of _RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE."""
    ends = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    words = [f"{names}_{end}" for end in ends] if " " not in names else [*names.split(), "", ""]
    rank, size, local_rank, local_size = words[:4]
    return Launcher(rank, size, local_rank, local_size, tuple(launch.split()), by_slurm)


LAUNCHERS = {
    "an override": _launcher("HALOTILE"),
    "Open MPI": _launcher("OMPI_COMM_WORLD", "OMPI_MCA_ess_base_jobid PMIX_NAMESPACE"),
    "MVAPICH2": _launcher("MV2_COMM_WORLD", "MPIRUN_ID"),
    "MVAPICH": _launcher("MVP_COMM_WORLD", "MPIRUN_ID"),
    "PALS": _launcher("PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PMI_LOCAL_SIZE", "PALS_APID", by_slurm=True),
    "MPICH": _launcher("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", "PMI_JOBID SLURM_STEP_ID", by_slurm=True),
    "torchrun": _launcher("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID MASTER_PORT"),
    "srun": _launcher(
        "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID", by_slurm=True
    ),
    "PMIx": _launcher(f"PMIX_RANK {OWN_SIZE}", "PMIX_NAMESPACE"),
    "PALS alone": _launcher(f"PALS_RANKID {OWN_SIZE} PALS_LOCAL_RANKID", "PALS_APID", by_slurm=True),
}
"""The innermost first: `mpirun` may stand in a batch job, and `torchrun` in a step of `srun`."""


@dataclass(frozen=True)
class Copy:
    """One of several copies of a command."""

    rank: int  # rank, size: its number, and the number of copies
    size: int
    # local_rank, local_size: same among the copies on this machine, where that is known
    local_rank: int | None = None
    local_size: int | None = None
    launch: str = ""  # name of the launch, where it has one


def copy_of(environment: Mapping[str, str] = os.environ) -> Copy | None:
    """This copy of the command; None where there is only one.

    >>> copy_of({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    Copy(rank=2, size=3, local_rank=None, local_size=None, launch='7-0')
    >>> copy_of({"SLURM_PROCID": "0"})
    """

    def number(name: str) -> int | None:
        word = environment.get(name, "")
        return int(word) if word.isdecimal() else None

    counted = False
    for launcher in LAUNCHERS.values():
        rank, size = number(launcher.rank), number(launcher.size)
        if rank is None or size is None:
            continue
        counted = True
        if size > 1 and not (launcher.by_slurm and _is_interactive(environment)):
            words = (environment.get(name, "") for name in ("SLURM_JOB_ID", *launcher.launch))
            launch = "-".join(word.replace("/", "_") for word in words if word)
            local = number(launcher.local_rank)
            return Copy(rank, size, number(OWN_LOCAL) if local is None else local, number(launcher.local_size), launch)
        if launcher.rank == OWN_RANK:
            return None
    uncounted = next((name for name in UNCOUNTED if name in environment), None)
    if uncounted and not counted:
        raise ConfigError(
            f"{uncounted} is {environment[uncounted]}: this is one of several copies of the command, and no variable has their "
            f"count. Set {OWN_SIZE} to their number for all of them."
        )
    return None


def _is_interactive(environment: Mapping[str, str]) -> bool:
    """Return True in the shell of `srun --pty`, which alone has a terminal: its other tasks and steps started from it have none."""
    if "SLURM_PTY_PORT" not in environment:
        return False
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False
