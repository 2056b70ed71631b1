"""How many cores of this machine a batch job has, by the variables that its batch system sets: not all of them bind a job to its cores."""

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


def named(text: str) -> Shares:
    """Each core by a line, or a word, with the name of its machine.

    Examples
    --------
    >>> dict(named("n1\\nn1\\nn2"))
    {'n1': 2, 'n2': 1}
    """
    return Counter(text.split())


def paired(text: str) -> Shares:
    """Machines, each followed by its number of cores.

    Examples
    --------
    >>> paired("n1 4 n2 8")
    {'n1': 4, 'n2': 8}
    """
    words = text.split()
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}


def in_rows(text: str) -> Shares:
    """A line for each machine: its name, its number of cores, and what does not matter here.

    Examples
    --------
    >>> in_rows("n1 4 all.q@n1 UNDEFINED")
    {'n1': 4}
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {row[0]: int(row[1]) for row in rows}


def advertised(text: str) -> Shares:
    """The attribute of a slot of HTCondor's, which is on one machine.

    Examples
    --------
    >>> advertised("Arch = 1\\nCpus = 4")
    {'': 4}
    """
    found = re.search(r"(?m)^Cpus\s*=\s*(\d+)", text)
    return {"": int(found[1])} if found else {}


@dataclass(frozen=True)
class BatchVariables:
    """What a batch system tells a job of its cores.

    Parameters
    ----------
    job : tuple of str
        Set in its jobs, one of them at least: the others may be set elsewhere too.
    word : str
        What it calls a core.
    here : tuple of str
        Numbers of cores on this machine.
    lists : mapping
        Which cores are on which machine, by how that is read.
    files : mapping
        The same where the variable names a file.
    whole : tuple of str
        Numbers of cores of the whole job, for where nothing tells which of them are here.
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
        ("PBS_JOBID",), here=("NCPUS", "PBS_NUM_PPN"), files={"PBS_NODEFILE": named}, whole=("PBS_NP",)
    ),
    "SGE": BatchVariables(
        ("JOB_ID", "SGE_TASK_ID"), "slot", files={"PE_HOSTFILE": in_rows}, whole=("NSLOTS",)
    ),
    "LSF": BatchVariables(
        ("LSB_JOBID",),
        "slot",
        lists={"LSB_MCPU_HOSTS": paired, "LSB_HOSTS": named},
        whole=("LSB_DJOB_NUMPROC",),
    ),
    "OAR": BatchVariables(("OAR_JOB_ID",), files={"OAR_NODEFILE": named}),
    "HTCondor": BatchVariables(("_CONDOR_JOB_AD",), files={"_CONDOR_MACHINE_AD": advertised}),
}


class Slots(NamedTuple):
    """Cores of this machine that a batch job has.

    Parameters
    ----------
    cores : int
        How many.
    word : str
        What its batch system calls one.
    """

    cores: int
    word: str

    @property
    def why(self) -> str:
        """Why there is a worker for each.

        Examples
        --------
        >>> Slots(4, "slot").why, Slots(1, "CPU").why
        ('one for each of 4 slots of the job', 'the job has 1 CPU')
        """
        told = counted(self.cores, self.word)
        return f"one for each of {told} of the job" if self.cores > 1 else f"the job has {told}"


def slots_here(environment: Mapping[str, str] = os.environ) -> Slots | None:
    """What the batch job has here that this process is in; None where it is in none, or nothing tells.

    Examples
    --------
    >>> slots_here({"JOB_ID": "7", "NSLOTS": "4"})
    Slots(cores=4, word='slot')
    >>> slots_here({"NSLOTS": "4"})
    """
    for system in SYSTEMS.values():
        if any(name in environment for name in system.job) and (count := _count(system, environment)):
            return Slots(count, system.word)
    return None


def _count(system: BatchVariables, environment: Mapping[str, str]) -> int:
    """Cores on this machine: the most that is told, for each way may tell of a part of the job; 0 where nothing is."""
    here = [_number(environment.get(name, "")) for name in system.here]
    for name, read in system.lists.items():
        here.append(_share(environment.get(name, ""), read))
    for name, read in system.files.items():
        with suppress(OSError, UnicodeError):
            here.append(_share(Path(environment[name]).read_text() if name in environment else "", read))
    whole = [_number(environment.get(name, "")) for name in system.whole]
    return max([0, *here]) or max([0, *whole])


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def _share(text: str, read: Callable[[str], Shares]) -> int:
    """This machine's part of a list; the largest where none is known by its name: batch systems have names of their own."""
    try:
        shares = read(text)
    except (ValueError, IndexError):  # not as it is documented: then it tells nothing
        return 0
    own = _short(socket.gethostname())
    return sum(count for name, count in shares.items() if _short(name) == own) or max(
        shares.values(), default=0
    )


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
