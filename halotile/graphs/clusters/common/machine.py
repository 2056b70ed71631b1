"""Cores that this process may use, by affinity, control groups and batch job; and the GPUs of this machine, as NVML lists them.

CUDA itself is not initialised: processes forked later could not use it.
"""

import importlib.util
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

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Cluster, Run
from halotile.graphs.words import counted, shown

PACKAGE = "dask_cuda"
INSTALL = "pip install 'halotile[cuda]'"
_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


@dataclass(frozen=True)
class Gpus:
    """The GPUs that workers may use."""

    names: tuple[str, ...] = ()  # their names in CUDA_VISIBLE_DEVICES: numbers, or UUIDs
    why_none: str = ""  # reason in a few words why there is none; empty where there is one


def gpus_here(environment: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs that this process may use.

    >>> gpus_here({"CUDA_VISIBLE_DEVICES": ""}).why_none
    'CUDA_VISIBLE_DEVICES shows none'
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _HIDDEN:
        return Gpus(why_none="CUDA_VISIBLE_DEVICES shows none")
    count, why = _counted()
    if not count:
        return Gpus(why_none=why)
    if visible is None:
        return Gpus(tuple(str(number) for number in range(count)))
    names = shown_by(visible, count)
    return Gpus(names, "" if names else f"CUDA_VISIBLE_DEVICES is {visible!r}, which shows none of {count}")


def shown_by(visible: str, count: int) -> tuple[str, ...]:
    """The GPUs out of ``count`` that CUDA_VISIBLE_DEVICES shows: numbers or UUIDs, up to the first that names none.

    Source: NVIDIA, "CUDA C++ Programming Guide", CUDA environment variables.

    >>> shown_by("1,0", 2), shown_by("0,7,1", 2), shown_by("GPU-84fd49f2", 2), shown_by("all", 2)
    (('1', '0'), ('0',), ('GPU-84fd49f2',), ())
    """
    names: dict[str, None] = {}
    for name in map(str.strip, visible.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < count):
            break
        names[name] = None
    return tuple(names)


def has_dask_cuda() -> bool:
    """Return True if the package that starts a worker for each GPU is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def cores_beside(gpu: int | str) -> list[int]:
    """The cores that a GPU is connected to: dask-cuda's function, which fails for a name where NVML does not know them."""
    from dask_cuda.utils import get_cpu_affinity

    try:
        cores: list[int] = get_cpu_affinity(gpu)
    except TypeError:
        return sorted(os.sched_getaffinity(0))
    return cores


def _counted() -> tuple[int, str]:
    """Number of GPUs that NVML lists, and the reason why none."""
    try:
        import pynvml
    except ImportError:
        return 0, "none can be found (nvidia-ml-py is not installed)"
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except getattr(pynvml, "NVMLError_LibraryNotFound", ()):
        return 0, "there is no NVIDIA driver"
    except pynvml.NVMLError as error:
        return 0, f"NVML finds none ({error})"
    return count, "" if count else "NVML finds none"


def chosen(cluster: Cluster, here: Gpus | None = None) -> tuple[str, ...]:
    """Return the GPUs of this machine that a cluster section names, as CUDA_VISIBLE_DEVICES has them.

    >>> two = Gpus(("0", "1"))
    >>> chosen(Cluster(), two), chosen(Cluster(gpus=1), two), chosen(Cluster(gpus=(1,)), two)
    (('0', '1'), ('0',), ('1',))
    >>> chosen(Cluster(gpus=(0, 2)), two)
    Traceback (most recent call last):
    halotile.errors.ConfigError: cluster.gpus is [0, 2], and there are 2 GPUs here. Write gpus: all, or how many, or which of them as a list, counted from 0.
    """
    here = here or gpus_here()
    if not here.names:
        raise ConfigError(
            f"cluster.kind is local-cuda, and there is no GPU here: {here.why_none}. Write kind: local to compute on CPUs."
        )
    requested = cluster.gpus
    if requested in (0, "all"):
        return here.names
    indices = [*range(requested)] if isinstance(requested, int) else [*map(int, requested)]
    if not indices or max(indices) >= len(here.names):
        count = counted(len(here.names), "GPU")
        raise ConfigError(
            f"cluster.gpus is {shown(requested)}, and there {'is' if len(here.names) == 1 else 'are'} {count} here. Write gpus: all, "
            "or how many, or which of them as a list, counted from 0."
        )
    return tuple(dict.fromkeys(here.names[index] for index in indices))


def requested_by(run: Run, cluster: Cluster) -> str:
    """Return the key and value of a job that ask for GPUs.

    >>> requested_by(Run(device="cuda"), Cluster()), requested_by(Run(), Cluster(gpus=1))
    ('run.device is cuda', 'cluster.gpus is 1')
    """
    return "run.device is cuda" if run.device == "cuda" else f"cluster.gpus is {shown(cluster.gpus)}"


MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cgroups_of(controller: str) -> Iterator[Path]:
    """Folders of the control groups that bound this process, its own and those around it, of both versions.

    ``controller``: bounded resource: `cpu` or `memory`.
    """
    lines = []
    with suppress(OSError):  # no Linux
        lines = OWN.read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, own = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            root = MOUNTED / controller if controllers else MOUNTED
            yield from (root / str(path).lstrip("/") for path in (Path(own), *Path(own).parents))


NAMES = r"(\S+)()"  # a list that has the name of its machine for each core
PAIRS = r"(\S+)\s+(\d+)"  # machines that are each followed by their number of cores
ROWS = r"(?m)^(\S+)[ \t]+(\d+)"  # a line for each machine: its name, its number of cores, and more
SLOT = r"(?m)^()Cpus\s*=\s*(\d+)"  # the attributes of an HTCondor slot, which is on one machine


@dataclass(frozen=True)
class BatchVariables:
    """Variables in which a batch system describes the cores of a job."""

    job: tuple[str, ...]  # set in its jobs, one of them at least; the last is set nowhere else
    word: str = "core"  # its word for a core
    here: tuple[str, ...] = ()  # numbers of cores on this machine
    # lists of the cores on each machine, with their patterns: the name of a machine, and its number
    lists: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # names of files with such lists, likewise
    # numbers of cores of the whole job, where no variable has the number on this machine
    whole: tuple[str, ...] = ()


SYSTEMS = {
    "Slurm": BatchVariables(("SLURM_JOB_ID",), "CPU", here=("SLURM_CPUS_ON_NODE",), whole=("SLURM_CPUS_PER_TASK",)),
    # NCPUS describes the first chunk alone, and may be its ompthreads; the file has a line for each mpiproc in PBS Pro, for each core in Torque.
    "PBS": BatchVariables(
        ("PBS_JOBID",), here=("NCPUS", "PBS_NUM_PPN"), files={"PBS_NODEFILE": NAMES}, whole=("PBS_NP",)
    ),
    "SGE": BatchVariables(("JOB_ID", "SGE_TASK_ID"), "slot", files={"PE_HOSTFILE": ROWS}, whole=("NSLOTS",)),
    "LSF": BatchVariables(
        ("LSB_JOBID",), "slot", lists={"LSB_MCPU_HOSTS": PAIRS, "LSB_HOSTS": NAMES}, whole=("LSB_DJOB_NUMPROC",)
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

        >>> BatchCores(4, "slot").why, BatchCores(1, "CPU").why
        ('one for each of 4 slots of the job', 'the job has 1 CPU')
        """
        count = counted(self.cores, self.word)
        return f"one for each of {count} of the job" if self.cores > 1 else f"the job has {count}"


def slots_here(environment: Mapping[str, str] = os.environ) -> BatchCores | None:
    """Cores of this machine that the batch job of this process has; None where it is in none, or their number is unknown.

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
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period"))
            if quota > 0:
                yield quota / period
