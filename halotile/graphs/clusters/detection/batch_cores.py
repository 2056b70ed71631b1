"""Cores of this machine that a batch job has, from the variables of its batch system: not all of them bind a job to its cores."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from halotile.graphs.amounts import counted

Shares = Mapping[str, int]
"""Cores of a job by the name of the machine."""


def parse_names(text: str) -> Shares:
    """Parse a list that has the name of its machine for each core.

    Examples
    --------
    >>> dict(parse_names("n1\\nn1\\nn2"))
    {'n1': 2, 'n2': 1}
    """
    return Counter(text.split())


def parse_pairs(text: str) -> Shares:
    """Parse machines that are each followed by their number of cores.

    Examples
    --------
    >>> parse_pairs("n1 4 n2 8")
    {'n1': 4, 'n2': 8}
    """
    words = text.split()
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}


def parse_rows(text: str) -> Shares:
    """Parse a line for each machine: its name, its number of cores, and more.

    Examples
    --------
    >>> parse_rows("n1 4 all.q@n1 UNDEFINED")
    {'n1': 4}
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {row[0]: int(row[1]) for row in rows}


def parse_slot(text: str) -> Shares:
    """Parse the attributes of an HTCondor slot, which is on one machine.

    Examples
    --------
    >>> parse_slot("Arch = 1\\nCpus = 4")
    {'': 4}
    """
    found = re.search(r"(?m)^Cpus\s*=\s*(\d+)", text)
    return {"": int(found[1])} if found else {}


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
        Lists of the cores on each machine, with their parsers.
    files : mapping
        Names of files with such lists, with their parsers.
    whole : tuple of str
        Numbers of cores of the whole job, where no variable has the number on this machine.
    """

    job: tuple[str, ...]
    word: str = "core"
    here: tuple[str, ...] = ()
    lists: Mapping[str, Callable[[str], Shares]] = field(default_factory=dict)
    files: Mapping[str, Callable[[str], Shares]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


SYSTEMS = {
    "Slurm": BatchVariables(
        ("SLURM_JOB_ID",), "CPU", here=("SLURM_CPUS_ON_NODE",), whole=("SLURM_CPUS_PER_TASK",)
    ),
    # NCPUS is of the first chunk, and may be its ompthreads; the file has a line for each mpiproc in PBS Pro, for each core in Torque.
    "PBS": BatchVariables(
        ("PBS_JOBID",), here=("NCPUS", "PBS_NUM_PPN"), files={"PBS_NODEFILE": parse_names}, whole=("PBS_NP",)
    ),
    "SGE": BatchVariables(
        ("JOB_ID", "SGE_TASK_ID"), "slot", files={"PE_HOSTFILE": parse_rows}, whole=("NSLOTS",)
    ),
    "LSF": BatchVariables(
        ("LSB_JOBID",),
        "slot",
        lists={"LSB_MCPU_HOSTS": parse_pairs, "LSB_HOSTS": parse_names},
        whole=("LSB_DJOB_NUMPROC",),
    ),
    "OAR": BatchVariables(("OAR_JOB_ID",), files={"OAR_NODEFILE": parse_names}),
    "HTCondor": BatchVariables(("_CONDOR_JOB_AD",), files={"_CONDOR_MACHINE_AD": parse_slot}),
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
    here += [_share(environment.get(name, ""), parse) for name, parse in system.lists.items()]
    for name, parse in system.files.items():
        with suppress(OSError, UnicodeError):
            here.append(
                _share(Path(environment[name]).read_text("utf-8") if name in environment else "", parse)
            )
    whole = [_number(environment.get(name, "")) for name in system.whole]
    return max([0, *here]) or max([0, *whole])


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _share(text: str, parse: Callable[[str], Shares]) -> int:
    """This machine's part of a list; the largest where none has its name: batch systems have their own names."""
    try:
        shares = parse(text)
    except (ValueError, IndexError):  # not in the documented format
        return 0
    own = _short(socket.gethostname())
    here = sum(count for name, count in shares.items() if _short(name) == own)
    return here or max(shares.values(), default=0)


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
