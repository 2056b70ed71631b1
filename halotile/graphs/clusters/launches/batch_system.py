"""Batch systems as the kinds of clusters declare them: requests, commands, states of jobs, and a cluster of one job for each worker.

Dask is not imported with this module.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import Order, RunningCluster, traits_of
from halotile.graphs.clusters.common.security import Credentials, address_of_interface, listening_address, private_base
from halotile.graphs.clusters.launches.base import Launch, LaunchState, number_of, tail_of
from halotile.graphs.kinds import sections
from halotile.graphs.words import first_line
from halotile.registry import find, optional
from halotile.storage.run_directory.directory import WORKERS

if TYPE_CHECKING:
    from distributed.security import Security

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
    once one is over. To spare its server, it is asked once for all jobs, and again only where that failed.
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
    # requests that the class leaves out: called with the arguments of `gpus` and the folder of logs; returns arguments,
    # and `directives`
    requests: Callable[[sections.Cluster, int, Path], Mapping[str, Any]] = lambda *_: {}
    # pattern for options in directives that apply to the jobs of workers, and not to that of the driver
    worker_options: str = "(?!)"
    requeues: str = ""  # command that puts a running job back into the queue, where there is one
    # beginnings of such states in which a job brings no worker, and stays in the queue
    stays: tuple[str, ...] = ()

    def start(self, order: Order) -> AbstractContextManager[RunningCluster]:
        """Submit a job for each worker; they are removed with the context."""

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
        with _signal_handlers_kept():
            package = optional(f"cluster {self.module} needs dask-jobqueue", "dask_jobqueue", "'halotile[hpc]'")
        return getattr(package, self.cluster)


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


WORKER = "halotile.graphs.clusters.workers"
NAME = "halotile"
NANNY_BYTES = 512 * 2**20  # memory of a job for the worker's nanny, besides the worker's own
DEATH_SECONDS = 120  # time for which a worker looks for the scheduler
_REFUSED = re.compile(r"stderr:\n(.*?)\s*\Z", re.DOTALL)


def job_arguments(system: BatchSystem, order: Order, logs: Path) -> dict[str, Any]:
    """Arguments of the dask-jobqueue class; those left out here are as in ``~/.config/dask/jobqueue.yaml``."""
    choice = order.choice
    for key in traits_of(system.module).ignored:
        if getattr(choice, key) is not None:
            raise ConfigError(
                f"cluster.{key} is {getattr(choice, key)}, but {system.title} has no such setting. Leave it out, or write it in "
                "cluster.directives."
            )
    memory_bytes = order.memory_bytes + NANNY_BYTES
    extra = ["--memory-limit", str(order.memory_bytes)]
    if interface := system.interface(choice):
        extra += ["--interface", interface]
    requests = dict(system.requests(choice, memory_bytes, logs))
    gpus = dict(system.gpus(choice, memory_bytes)) if choice.gpus else {}
    lines = [*requests.pop("directives", ()), *gpus.pop("directives", ())]
    lines = [line for line in lines if not any(skip in line for skip in choice.directives_skip)]
    directives = system.directives([*lines, *choice.directives])
    if not choice.directives:
        directives = _joined(system.configured("job-extra-directives"), directives)
    optional = {
        "queue": choice.queue,
        system.account: choice.account,
        "walltime": system.walltime(choice.walltime) if choice.walltime else None,
        "job_script_prologue": list(map(system.prologue, choice.prologue)),
        "job_directives_skip": list(choice.directives_skip),
        "job_extra_directives": directives,
    }
    defaults = {**system.defaults, **requests}
    return {
        "cores": choice.cores,
        "processes": 1,
        "memory": str(memory_bytes),
        "job_name": NAME,
        "log_directory": str(logs),
        "death_timeout": DEATH_SECONDS,
        "python": f"{shlex.quote(sys.executable)} -P",
        "worker_command": WORKER,
        "worker_extra_args": _joined(system.configured("worker-extra-args"), extra),
        **{key: value for key, value in optional.items() if value},
        **{key: value for key, value in defaults.items() if system.configured(key.replace("_", "-")) is None},
        **gpus,
        **choice.options,
    }


@contextmanager
def start_jobs(system: BatchSystem, order: Order) -> Iterator[RunningCluster]:
    """A cluster of one job for each worker, with the scheduler in this process."""
    from halotile.graphs.clusters.launches.remote_cluster import supervised_cluster

    system.check(order.choice)
    cluster_class = system.cluster_class()
    address = listening_address(system.interface(order.choice))

    def make(security: Security, logs: Path, scheduler: dict[str, Any]) -> Any:
        with refusals_described(system, order.choice):
            return cluster_class(
                **job_arguments(system, order, logs),
                job_cls=reporting_class(cluster_class.job_cls, logs, system),
                security=security,
                scheduler_options=scheduler,
                silence_logs=50,
                name=NAME,
            )

    with (
        _plain_path(order.folder) as folder,
        supervised_cluster(replace(order, folder=folder), address, make, partial(launch_states, system)) as cluster,
    ):
        yield cluster


def launch_states(system: BatchSystem, launches: Sequence[Launch]) -> Mapping[Launch, LaunchState]:
    """States of launches; none where the batch system does not answer."""
    by_id: dict[str, Any] = {str(getattr(launch, "job_id", None)): launch for launch in launches}
    with suppress(ClusterFailed):
        return {by_id[job]: state for job, state in system.states(list(by_id)).items()}
    return {}


@contextmanager
def refusals_described(system: BatchSystem, choice: sections.Cluster) -> Iterator[None]:
    """Raise a refusal of dask-jobqueue as a ConfigError that names what was refused."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        reason = first_line(str(error)).split(". ")[0]  # what follows are all other arguments
        options = dict(choice.options)
        blame = f"cluster.options is {options}" if options else f"cluster {system.module}"
        raise ConfigError(f"{blame}, which dask-jobqueue refuses: {reason}.") from error


@contextmanager
def _plain_path(folder: Path | None) -> Iterator[Path | None]:
    """A folder by a path without spaces and the like: dask-jobqueue writes paths into scripts unquoted."""
    if folder is None or shlex.quote(str(folder)) == str(folder):
        yield folder
        return
    link = private_base() / f"run-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    link.unlink(missing_ok=True)  # left by a driver that was killed
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield link
    finally:
        link.unlink(missing_ok=True)


def job_script(system: BatchSystem, order: Order, *, address: str, logs: Path, security: Security) -> str:
    """The script of one job, as it would be submitted."""
    with refusals_described(system, order.choice):
        job = system.cluster_class().job_cls(
            address, name=f"{NAME}-0", protocol="tls://", security=security, **job_arguments(system, order, logs)
        )
    return str(job.job_script())


def worker_script(system: BatchSystem, run: sections.Run, choice: sections.Cluster, directory: Path) -> str:
    """The script of the first worker of a run that has not begun.

    ``run``: with its number of workers decided; ``directory``: run directory.
    """
    order = Order(workers=run.count, memory_bytes=sections.parse_bytes(run.memory_per_worker), choice=choice)
    with tempfile.TemporaryDirectory() as folder:  # dask-jobqueue makes the folder of the logs
        security = Credentials(Path(folder) / "tls-RUN").security
        script = job_script(system, order, address="tls://DRIVER:PORT", logs=Path(folder), security=security)
    return script.replace(folder, str(directory / WORKERS))


def reporting_class(job_class: type, logs: Path, system: BatchSystem) -> type:
    """A job class that remembers why a job was refused, and finds its log."""
    from distributed.core import Status

    class ReportingJob(job_class):  # type: ignore[misc]
        refusal: str | None = None

        @property
        def title(self) -> str:
            return f"job {self.job_id}" if self.job_id else ""

        async def start(self) -> None:
            try:
                await super().start()
            except (RuntimeError, ValueError, OSError) as error:
                reason = describe_refusal(self.submit_command, error)
                self.refusal = f"{system.title} refuses the job: {reason} {system.lists}"
                self.status = Status.running  # Dask waits for it, and the supervisor ends it

        @contextmanager
        def job_file(self) -> Iterator[str]:
            # dask-jobqueue writes it into $TMPDIR, by a name that another user may take before it is read.
            with NamedTemporaryFile("w", encoding="utf-8", suffix=".sh", dir=logs) as script:
                script.write(self.job_script())
                script.flush()
                yield script.name

        def log_tail(self) -> str:
            return tail_of(logs_of(logs, self.job_id)) if self.job_id else ""

    # dask-jobqueue looks for the settings of a class by its name.
    ReportingJob.__name__ = job_class.__name__
    return ReportingJob


def logs_of(folder: Path, job: str) -> list[Path]:
    """The files that have the number of a job in their name: PBS Pro begins with it, others end with it."""
    named = re.compile(rf"(?<!\d){number_of(job)}(?!\d)")
    return [path for path in folder.iterdir() if named.search(path.name)]


def describe_refusal(command: str, error: Exception) -> str:
    """The reason why a job was refused.

    >>> describe_refusal("sbatch", RuntimeError("Command exited...\\nstderr:\\nsbatch: error: invalid partition\\n\\n"))
    'sbatch: error: invalid partition.'
    >>> describe_refusal("sbatch", FileNotFoundError(2, "No such file or directory"))
    'sbatch: [Errno 2] No such file or directory.'
    """
    found = _REFUSED.search(str(error))
    text = " ".join(found[1].split()) if found and found[1] else f"{command}: {first_line(str(error))}"
    return text if text.endswith(".") else f"{text}."


def _joined(configured: Any, ours: Any) -> Any:
    """Lists, or mappings, with ours last."""
    if not configured:
        return ours
    return {**configured, **ours} if isinstance(configured, Mapping) else [*configured, *ours]
