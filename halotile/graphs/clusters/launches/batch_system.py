"""A batch system as the kinds of clusters declare it: its requests, its commands, and the states of its jobs.

Dask is not imported with this module.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.errors import ClusterFailed, ConfigError, MissingPackage
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common.security import address_of_interface
from halotile.graphs.clusters.launches.base import LaunchState, number_of
from halotile.graphs.kinds import sections
from halotile.registry import find
from halotile.storage.run_directory.directory import WORKERS

SLURM = "slurm"
CALL_SECONDS = 30.0
IN_QUEUE = "in the queue"
_FORGOTTEN = re.compile(
    r"unknown job|do(es)? not exist|has finished|no such job|invalid job id|job\b.*\bnot found", re.IGNORECASE
)
_NO_REASON = re.compile(r" \((None|\(null\))?\)$")


def answer_of(words: Sequence[str], **options: Any) -> str:
    """Run a command of a batch system and return its output."""
    done = _run(words, **options)
    if done.returncode != 0:
        raise _failure_of(done)
    return done.stdout


def _run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False, **options)
    except FileNotFoundError as error:
        raise ClusterFailed(
            f"{words[0]} is not installed here: this machine is not part of the cluster. Run the command on one that is."
        ) from error
    except OSError as error:
        raise ClusterFailed(f"{words[0]} does not start ({error}).") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(f"{words[0]} did not answer within {CALL_SECONDS:g} s. Try again later.") from error


def _failure_of(done: subprocess.CompletedProcess[str]) -> ClusterFailed:
    message = " ".join(done.stderr.split())
    return ClusterFailed(message or f"{done.args[0]} ended with exit code {done.returncode}")


@dataclass(frozen=True)
class JobRows:
    """States of jobs in a system that prints a row for each that it knows, and an error or nothing for one that it has forgotten.

    Any other error, such as that its server cannot be reached, is no answer. A system may answer for several jobs, or for none of them
    once one is over. Its server has others to answer: it is asked once for all jobs, and again only where that failed.
    """

    command: str  # command, with `{}` in the place of the jobs
    row: str  # pattern for the beginning of a job's row, with `{}` in the place of its number
    over: str = "(?!)"  # pattern for what follows in the row of a job that brings no worker any more
    state: str = "{}"  # state of such a job, with `{}` in the place of the first group of the pattern
    between: str = " "  # what the command has between two jobs
    shown: str = "()"  # pattern for the state of any other job, where the row has one in words

    def __call__(self, ids: Sequence[str]) -> dict[str, LaunchState]:
        """States of jobs by their ids; of several, those are left out that are not known to be over.

        Raises
        ------
        ClusterFailed
            When there is no answer.
        """
        done = _run(shlex.split(self.command.format(self.between.join(ids))))
        states = {}
        for job in ids:
            if found := re.search(self.row.format(number_of(job)), done.stdout, re.MULTILINE):
                rest = done.stdout[found.end() :].split("=====")[0]
                ended, waiting = re.match(self.over, rest, re.MULTILINE), re.match(self.shown, rest)
                text = self.state.format(ended[1]) if ended else waiting[1] if waiting else ""
                states[job] = LaunchState(bool(ended), _NO_REASON.sub("", text) or IN_QUEUE)
            elif done.returncode == 0 or (len(ids) == 1 and _FORGOTTEN.search(done.stdout + done.stderr)):
                states[job] = LaunchState(True, "not in the queue any more")
            elif len(ids) == 1:
                raise _failure_of(done)
            else:
                with suppress(ClusterFailed):
                    states |= self([job])
        return states


@dataclass(frozen=True)
class BatchSystem:
    """Differences of one batch system from the others.

    Commands that submit a run and ask for it raise ClusterFailed where they fail.
    """

    title: str  # its name
    module: str  # its name in dask-jobqueue's configuration, and of the module
    cluster: str  # its class in dask-jobqueue
    # commands that submit a job and end one: those that its class calls, written here to be known without dask-jobqueue
    submits: str
    cancels: str
    # states of jobs by their ids
    states: JobRows
    # request for GPUs, from the cluster section and the memory of a job: arguments of the class, and `directives`
    gpus: Callable[[sections.Cluster, int], Mapping[str, Any]]
    lists: str  # command that lists its queues, or else its machines, in words
    account: str = "account"  # dask-jobqueue's argument for the account
    walltime: Callable[[str], str] = str  # converts a walltime to the system's format
    directives: Callable[[list[str]], Any] = list  # converts directives to dask-jobqueue's format
    prologue: Callable[[str], str] = str  # escapes a line of the prologue for the system's scripts
    # arguments that the class requires and its configuration leaves empty
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # further directives of a job that holds the driver of a submitted run; None where it cannot
    driver: Sequence[str] | None = None
    # requests that the class leaves out, from the same as `gpus` and the folder of logs: likewise arguments, and
    # `directives`
    requests: Callable[[sections.Cluster, int, Path], Mapping[str, Any]] = lambda *_: {}
    # pattern for options in directives that apply to the jobs of workers, and not to that of the driver
    worker_options: str = "(?!)"
    requeues: str = ""  # command that puts a running job back into the queue, where there is one
    # beginnings of such states in which a job brings no worker, and stays in the queue
    stays: tuple[str, ...] = ()

    def start(self, order: Order) -> AbstractContextManager[RunningCluster]:
        """Submit a job for each worker; they are removed with the context."""
        from halotile.graphs.clusters.launches.batch_jobs import start_jobs

        return start_jobs(self, order)

    def check(self, choice: sections.Cluster) -> None:
        """Refuse to submit from a machine that cannot."""
        self.cluster_class()
        if not shutil.which(self.submits):
            raise ConfigError(
                f"cluster.kind is {self.module}, and there is no {self.submits} here, which submits {self.title} jobs. "
                "Start it on a machine of that cluster, or write kind: local."
            )
        if interface := self.interface(choice):
            address_of_interface(interface)
        self.requests(choice, 0, Path())

    def submit(self, script: Path) -> str:
        """Submit the script of a run and return the number of the job.

        What the system prints besides the log of the run goes to the folder of the workers' logs.
        """
        if not shutil.which(self.submits):
            raise ClusterFailed(
                f"{self.submits} is not installed here: this machine is not part of a {self.title} cluster. Write the cluster.kind "
                "of this machine (slurm, pbs, sge or lsf), or run the job with `recon-cli run`."
            )
        words, options = [self.submits, str(script)], dict[str, Any]()
        if self.module != SLURM:
            self.cluster_class()  # its import makes the default settings known
            options["cwd"] = script.parent / WORKERS
            options["cwd"].mkdir(mode=0o700, exist_ok=True)
            if self.configured("use-stdin"):
                options["input"] = script.read_text("utf-8")
                del words[1:]
        answer = answer_of(words, **options)
        # Sites wrap sbatch in scripts that print numbers of their own.
        if found := re.search(r"Submitted batch job (\d+)", answer) or re.search(r"(\d+)", answer):
            return found[1]
        raise ClusterFailed(f"{self.submits} printed no job number: {answer.strip() or 'nothing'}.")

    def requeue(self, job: str) -> None:
        """Put a running job back into the queue: it begins anew later, with the same number."""
        if not self.requeues:
            raise ClusterFailed(f"jobs of {self.title} cannot be requeued")
        answer_of([*self.requeues.split(), job])

    def cancel(self, job: str) -> None:
        """End a job in any state; one that has just ended by itself is no error."""
        try:
            answer_of([self.cancels, job])
        except ClusterFailed:
            if self.state_of(job) is not None:
                raise

    def state_of(self, job: str) -> str | None:
        """State of a job, such as ``PENDING (BeginTime)``; None when it is over."""
        try:
            state = self.states([job])[job]
        except ClusterFailed as error:
            raise ClusterFailed(f"{self.title} did not report the state of job {job}: {error}") from error
        return None if state.over and not state.text.startswith(self.stays) else state.text

    def configured(self, key: str) -> Any:
        """A setting in the user's configuration of dask-jobqueue."""
        import dask

        return dask.config.get(f"jobqueue.{self.module}.{key}", None)

    def interface(self, choice: sections.Cluster) -> str | None:
        """The network interface of a job, or else of the user's configuration."""
        found: str | None = choice.interface or self.configured("interface")
        return found

    def directives_of(self, choice: sections.Cluster) -> Sequence[str]:
        """The directives of a job, or else those of the user's configuration."""
        return choice.directives or tuple(self.configured("job-extra-directives") or ())

    def cluster_class(self) -> Any:
        """Its class in dask-jobqueue."""
        try:
            with _signal_handlers_kept():
                import dask_jobqueue
        except ImportError as error:
            raise MissingPackage(
                f"cluster {self.module} needs dask-jobqueue, which is not installed. Write: pip install 'halotile[hpc]'"
            ) from error
        return getattr(dask_jobqueue, self.cluster)


def system_of(kind: str) -> BatchSystem | None:
    """The batch system of a kind of cluster; None where its workers are no batch jobs."""
    system: BatchSystem | None = getattr(find("clusters", kind), "SYSTEM", None)
    return system


def system_in(record: Mapping[str, Any]) -> BatchSystem:
    """The batch system in the record of a submitted run."""
    system: BatchSystem = find("clusters", record.get("system", SLURM)).SYSTEM
    return system


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep the handler of Ctrl-C, which the import of dask-jobqueue replaces; the import would also fail outside the main thread."""
    replaced, signal.signal = signal.signal, lambda *_: None
    try:
        yield
    finally:
        signal.signal = replaced


def is_walltime(text: str) -> bool:
    """Return True for the format that :func:`seconds_of` reads.

    >>> is_walltime("1-12:30"), is_walltime("UNLIMITED")
    (True, False)
    """
    return re.fullmatch(r"(\d+-)?\d+(:\d{1,2}){0,2}", text) is not None


def seconds_of(walltime: str) -> int:
    """Seconds of a walltime: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, or ``days-hours[:minutes[:seconds]]``.

    Source: the option ``--time`` of Slurm's ``sbatch``.

    >>> seconds_of("04:00:00"), seconds_of("90"), seconds_of("90:30"), seconds_of("1-12"), seconds_of("1-12:30")
    (14400, 5400, 5430, 129600, 131400)
    """
    days, dash, clock_text = walltime.rpartition("-")
    parts = [int(part) for part in clock_text.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def clock(walltime: str) -> str:
    """Hours, minutes and seconds, the format of PBS, SGE and OAR.

    >>> clock("04:00:00"), clock("1-12:30:00"), clock("90")
    ('04:00:00', '36:30:00', '01:30:00')
    """
    minutes, seconds = divmod(seconds_of(walltime), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
