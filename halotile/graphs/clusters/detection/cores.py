"""Number of cores that this process may use: by its affinity, the limits of its control groups, and its batch job."""

from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from halotile.graphs.amounts import counted

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cgroups_of(controller: str) -> Iterator[Path]:
    """Folders of the control groups that bound this process, its own and those around it, of both versions.

    Parameters
    ----------
    controller : str
        The bounded resource: ``cpu`` or ``memory``.
    """
    lines = []
    with suppress(OSError):  # no Linux
        lines = OWN.read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, own = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            root = MOUNTED / controller if controllers else MOUNTED
            yield from (root / str(path).lstrip("/") for path in (Path(own), *Path(own).parents))


NAMES = r"(\S+)()"
"""A list that has the name of its machine for each core."""
PAIRS = r"(\S+)\s+(\d+)"
"""Machines that are each followed by their number of cores."""
ROWS = r"(?m)^(\S+)[ \t]+(\d+)"
"""A line for each machine: its name, its number of cores, and more."""
SLOT = r"(?m)^()Cpus\s*=\s*(\d+)"
"""The attributes of an HTCondor slot, which is on one machine."""


@dataclass(frozen=True)
class BatchVariables:
    """Variables in which a batch system describes the cores of a job.

    Parameters
    ----------
    job : tuple of str
        Set in its jobs, one of them at least: the others may be set elsewhere too.
    word : str
        Its word for a core.
    here : tuple of str
        Numbers of cores on this machine.
    lists : mapping
        Lists of the cores on each machine, with their patterns: the name of a machine, and its number.
    files : mapping
        Names of files with such lists, likewise.
    whole : tuple of str
        Numbers of cores of the whole job, where no variable has the number on this machine.
    """

    job: tuple[str, ...]
    word: str = "core"
    here: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


SYSTEMS = {
    "Slurm": BatchVariables(
        ("SLURM_JOB_ID",), "CPU", here=("SLURM_CPUS_ON_NODE",), whole=("SLURM_CPUS_PER_TASK",)
    ),
    # NCPUS is of the first chunk, and may be its ompthreads; the file has a line for each mpiproc in PBS Pro, for each core in Torque.
    "PBS": BatchVariables(
        ("PBS_JOBID",), here=("NCPUS", "PBS_NUM_PPN"), files={"PBS_NODEFILE": NAMES}, whole=("PBS_NP",)
    ),
    "SGE": BatchVariables(("JOB_ID", "SGE_TASK_ID"), "slot", files={"PE_HOSTFILE": ROWS}, whole=("NSLOTS",)),
    "LSF": BatchVariables(
        ("LSB_JOBID",),
        "slot",
        lists={"LSB_MCPU_HOSTS": PAIRS, "LSB_HOSTS": NAMES},
        whole=("LSB_DJOB_NUMPROC",),
    ),
    "OAR": BatchVariables(("OAR_JOB_ID",), files={"OAR_NODEFILE": NAMES}),
    "HTCondor": BatchVariables(("_CONDOR_JOB_AD",), files={"_CONDOR_MACHINE_AD": SLOT}),
}


class BatchCores(NamedTuple):
    """Cores of this machine that a batch job has.

    Parameters
    ----------
    cores : int
        Their number.
    word : str
        Its batch system's word for one.
    """

    cores: int
    word: str

    @property
    def why(self) -> str:
        """The reason for a worker on each.

        Examples
        --------
        >>> BatchCores(4, "slot").why, BatchCores(1, "CPU").why
        ('one for each of 4 slots of the job', 'the job has 1 CPU')
        """
        count = counted(self.cores, self.word)
        return f"one for each of {count} of the job" if self.cores > 1 else f"the job has {count}"


def slots_here(environment: Mapping[str, str] = os.environ) -> BatchCores | None:
    """Cores of this machine that the batch job of this process has; None where it is in none, or their number is unknown.

    Examples
    --------
    >>> slots_here({"JOB_ID": "7", "NSLOTS": "4"})
    BatchCores(cores=4, word='slot')
    >>> slots_here({"NSLOTS": "4"})
    """
    for system in SYSTEMS.values():
        if any(name in environment for name in system.job) and (count := _count(system, environment)):
            return BatchCores(count, system.word)
    return None


def _count(system: BatchVariables, environment: Mapping[str, str]) -> int:
    """Cores on this machine: the largest number, since each variable may describe a part of the job; 0 where there is none."""
    here = [_number(environment.get(name, "")) for name in system.here]
    here += [_share(environment.get(name, ""), pattern) for name, pattern in system.lists.items()]
    for name, pattern in system.files.items():
        with suppress(OSError, UnicodeError):
            text = Path(environment[name]).read_text("utf-8") if name in environment else ""
            here.append(_share(text, pattern))
    whole = [_number(environment.get(name, "")) for name in system.whole]
    return max([0, *here]) or max([0, *whole])


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _share(text: str, pattern: str) -> int:
    """This machine's part of a list; the largest where none has its name: batch systems have their own names.

    Examples
    --------
    >>> _share("n1 4 n2 8", PAIRS), _share("n1 4 all.q@n1 UNDEFINED", ROWS), _share("n1\\nn1\\nn2", NAMES), _share("Arch = 1\\nCpus = 4", SLOT)
    (8, 4, 2, 4)
    """
    shares = Counter[str]()
    for name, count in re.findall(pattern, text):
        shares[_short(name)] += int(count or 1)
    return shares[_short(socket.gethostname())] or max(shares.values(), default=0)


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def cores_here(environment: Mapping[str, str] = os.environ) -> int:
    """Number of cores that this process may keep busy, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    job = [slots.cores] if (slots := slots_here(environment)) else []
    return max(1, min([cores, *job, *map(math.ceil, _cores_of_groups())]))


def _cores_of_groups() -> Iterator[float]:
    for folder in cgroups_of("cpu"):
        with suppress(OSError, ValueError):  # not there, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text("utf-8").split())
            yield quota / period
        with suppress(OSError, ValueError):
            quota, period = (
                int((folder / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period")
            )
            if quota > 0:
                yield quota / period
