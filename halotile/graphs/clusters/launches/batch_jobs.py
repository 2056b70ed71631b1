"""Jobs of a batch system, each with one worker; their scripts are dask-jobqueue's."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import dask
from distributed.core import Status
from distributed.security import Security

from halotile.errors import ConfigError, MissingPackage
from halotile.graphs.amounts import first_line
from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.clusters.connection.addresses import address_of_interface, own_address
from halotile.graphs.clusters.connection.credentials import Credentials, private_base
from halotile.graphs.clusters.detection.cluster_kind import kind_of
from halotile.graphs.clusters.launches.base import Piece, State, tail_of
from halotile.graphs.clusters.launches.queue_answers import number_of
from halotile.graphs.clusters.launches.remote_cluster import kept
from halotile.graphs.jobs import sections
from halotile.registry import find
from halotile.storage.run_directory.names import WORKERS

WORKER = "halotile.graphs.clusters.workers"
NAME = "halotile"
NANNY_BYTES = 512 * 2**20
"""What a job needs besides its worker's memory: the worker's nanny."""
DEATH_SECONDS = 120
"""How long a worker looks for the scheduler."""
_REFUSED = re.compile(r"stderr:\n(.*?)\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class BatchSystem:
    """What sets one batch system apart.

    Parameters
    ----------
    title : str
        Its name.
    module : str
        Its name in dask-jobqueue's configuration, and of the module.
    cluster : str
        Its class there.
    submits : str
        The command that submits a job: the one that its class calls, written here to be known without dask-jobqueue.
    states : callable
        How jobs stand, by their ids. One that is left out is not known to be over.
    gpus : callable
        What it takes for the GPUs of a job, from its cluster section and memory: arguments of the class, and ``directives``.
    asks : callable
        What the class leaves out, from the same and the folder of logs: likewise arguments, and ``directives``.
    lists : str
        The command that lists its queues.
    account : str
        What dask-jobqueue calls the account.
    walltime : callable
        A walltime as this system reads it.
    directives : callable
        Directives as dask-jobqueue takes them.
    lacks : tuple of str
        Keys of the cluster section that mean nothing to it.
    usual : mapping
        Arguments of the class that it wants and its configuration leaves empty.
    """

    title: str
    module: str
    cluster: str
    submits: str
    states: Callable[[Sequence[str]], Mapping[str, State]]
    gpus: Callable[[sections.Cluster, int], Mapping[str, Any]]
    lists: str
    account: str = "account"
    walltime: Callable[[str], str] = str
    directives: Callable[[list[str]], Any] = list
    lacks: tuple[str, ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict)
    asks: Callable[[sections.Cluster, int, Path], Mapping[str, Any]] = lambda *_: {}

    def check(self, choice: sections.Cluster) -> None:
        """Refuse to submit from a machine that cannot.

        Raises
        ------
        MissingPackage
            Without dask-jobqueue.
        ConfigError
            Without the command that submits, or the network interface, or what its directives need to be told.
        """
        _class_of(self)
        if not shutil.which(self.submits):
            raise ConfigError(
                f"cluster.kind is {self.module}, and there is no {self.submits} here, which submits jobs of {self.title}'s. "
                "Start it on a machine of that cluster, or write kind: local."
            )
        if interface := _interface(self, choice):
            address_of_interface(interface)
        self.asks(choice, 0, Path())


def arguments_of(system: BatchSystem, order: Order, logs: Path) -> dict[str, Any]:
    """What dask-jobqueue is told; what is left out here is as ``~/.config/dask/jobqueue.yaml`` has it."""
    choice = order.choice
    for key in system.lacks:
        if getattr(choice, key) is not None:
            raise ConfigError(
                f"cluster.{key} is {getattr(choice, key)}, and {system.title} has nothing of the kind: leave it out, or say it in "
                "cluster.directives."
            )
    memory_bytes = order.memory_bytes + NANNY_BYTES
    extra = ["--memory-limit", str(order.memory_bytes)]
    if interface := _interface(system, choice):
        extra += ["--interface", interface]
    requested = dict(system.asks(choice, memory_bytes, logs))
    gpus = dict(system.gpus(choice, memory_bytes)) if choice.gpus else {}
    configured = dask.config.get(f"jobqueue.{system.module}", {})
    ours = [*requested.pop("directives", ()), *gpus.pop("directives", ())]
    ours = [line for line in ours if not any(skip in line for skip in choice.directives_skip)]
    directives = system.directives([*ours, *choice.directives])
    if not choice.directives:
        directives = _joined(configured.get("job-extra-directives"), directives)
    told = {
        "queue": choice.queue,
        system.account: choice.account,
        "walltime": system.walltime(choice.walltime) if choice.walltime else None,
        "job_script_prologue": list(choice.prologue),
        "job_directives_skip": list(choice.directives_skip),
        "job_extra_directives": directives,
    }
    usual = {**system.usual, **requested}
    usual = {key: value for key, value in usual.items() if configured.get(key.replace("_", "-")) is None}
    return {
        "cores": choice.cores,
        "processes": 1,
        "memory": str(memory_bytes),
        "job_name": NAME,
        "log_directory": str(logs),
        "death_timeout": DEATH_SECONDS,
        "python": f"{shlex.quote(sys.executable)} -P",
        "worker_command": WORKER,
        "worker_extra_args": _joined(configured.get("worker-extra-args"), extra),
        **{key: value for key, value in told.items() if value},
        **usual,
        **gpus,
        **choice.options,
    }


@contextmanager
def jobs(system: BatchSystem, order: Order) -> Iterator[Cluster]:
    """A cluster of one job for each worker, with the scheduler in this process.

    Raises
    ------
    MissingPackage
        Without dask-jobqueue.
    ConfigError
        When dask-jobqueue refuses an option.
    """
    system.check(order.choice)
    holder = _class_of(system)
    interface = _interface(system, order.choice)
    address = address_of_interface(interface) if interface else own_address()

    def hold(security: Security, logs: Path, scheduler: dict[str, Any]) -> Any:
        with _describe_refusal(system, order.choice):
            return holder(
                **arguments_of(system, order, logs),
                job_cls=watched(holder.job_cls, logs, system),
                security=security,
                scheduler_options=scheduler,
                silence_logs=50,
                name=NAME,
            )

    def look(pieces: Sequence[Piece]) -> Mapping[Piece, State]:
        by_id: dict[str, Any] = {str(getattr(piece, "job_id", None)): piece for piece in pieces}
        return {by_id[each]: state for each, state in system.states(list(by_id)).items() if each in by_id}

    with _plain(order.folder) as folder, kept(replace(order, folder=folder), address, hold, look) as cluster:
        yield cluster


@contextmanager
def _describe_refusal(system: BatchSystem, choice: sections.Cluster) -> Iterator[None]:
    """What dask-jobqueue has against its arguments."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        said = first_line(str(error)).split(". ")[0]  # what follows are all other arguments
        options = dict(choice.options)
        blame = f"cluster.options is {options}" if options else f"cluster {system.module}"
        raise ConfigError(f"{blame}, which dask-jobqueue refuses: {said}.") from error


@contextmanager
def _plain(folder: Path | None) -> Iterator[Path | None]:
    """A folder by a path without blanks and the like: dask-jobqueue writes paths into scripts as they are."""
    if folder is None or shlex.quote(str(folder)) == str(folder):
        yield folder
        return
    link = private_base() / f"run-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    link.unlink(missing_ok=True)  # of a driver that was killed
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield link
    finally:
        link.unlink(missing_ok=True)


def job_script(system: BatchSystem, order: Order, *, address: str, logs: Path, security: Security) -> str:
    """The script of one job, as it would be submitted."""
    kind = _class_of(system).job_cls
    with _describe_refusal(system, order.choice):
        made = kind(
            address,
            name=f"{NAME}-0",
            protocol="tls://",
            security=security,
            **arguments_of(system, order, logs),
        )
    return str(made.job_script())


def worker_script(run: sections.Run, choice: sections.Cluster, directory: Path) -> str | None:
    """The script of the first worker of a run, before anything is there; None where a worker is no batch job.

    Parameters
    ----------
    run : Run
        With its number of workers decided.
    choice : Cluster
        Where they live.
    directory : Path
        The run directory.
    """
    system = getattr(find("clusters", kind_of(choice).name), "SYSTEM", None)
    if not isinstance(system, BatchSystem):
        return None
    order = Order(workers=run.count, memory_bytes=sections.parse_bytes(run.memory_per_worker), choice=choice)
    with tempfile.TemporaryDirectory() as folder:  # dask-jobqueue makes the folder of the logs
        security = Credentials(Path(folder) / "tls-RUN").security
        script = job_script(system, order, address="tls://DRIVER:PORT", logs=Path(folder), security=security)
    return script.replace(folder, str(directory / WORKERS))


def watched(kind: type, logs: Path, system: BatchSystem) -> type:
    """A job class that remembers why a job was not taken, and where its log is."""

    class Watched(kind):  # type: ignore[misc]
        read_error: str | None = None

        @property
        def title(self) -> str:
            return f"job {self.job_id}" if self.job_id else ""

        async def start(self) -> None:
            try:
                await super().start()
            except (RuntimeError, ValueError, OSError) as error:
                said = describe_refusal(self.submit_command, error)
                self.read_error = f"{system.title} takes no job: {said} `{system.lists}` lists its queues"
                self.status = Status.running  # Dask waits for it, and the keeper ends it

        @contextmanager
        def job_file(self) -> Iterator[str]:
            # dask-jobqueue writes it into $TMPDIR, by a name that another user may take before it is read.
            with NamedTemporaryFile("w", suffix=".sh", dir=logs) as script:
                script.write(self.job_script())
                script.flush()
                yield script.name

        def log_tail(self) -> str:
            return tail_of(logs_of(logs, self.job_id)) if self.job_id else ""

    # Where dask-jobqueue looks for the settings of a class.
    Watched.__name__ = kind.__name__
    return Watched


def logs_of(folder: Path, job: str) -> list[Path]:
    """The files that have the number of a job in their name: PBS Pro begins with it, others end with it."""
    named = re.compile(rf"(?<!\d){number_of(job)}(?!\d)")
    return [path for path in folder.iterdir() if named.search(path.name)]


def describe_refusal(command: str, error: Exception) -> str:
    """Why a job was not taken.

    Examples
    --------
    >>> refusal_in_words("sbatch", RuntimeError("Command exited...\\nstderr:\\nsbatch: error: invalid partition\\n\\n"))
    'sbatch: error: invalid partition.'
    >>> refusal_in_words("sbatch", FileNotFoundError(2, "No such file or directory"))
    'sbatch: [Errno 2] No such file or directory.'
    """
    said = _REFUSED.search(str(error))
    words = " ".join(said[1].split()) if said and said[1] else f"{command}: {first_line(str(error))}"
    return words if words.endswith(".") else f"{words}."


def written(module: str, choice: sections.Cluster) -> Sequence[str]:
    """The directives of a job, or else those of the user's configuration."""
    return choice.directives or tuple(dask.config.get(f"jobqueue.{module}.job-extra-directives", None) or ())


def _joined(theirs: Any, ours: Any) -> Any:
    """Lists, or mappings, with what is ours last."""
    if not theirs:
        return ours
    return {**theirs, **ours} if isinstance(theirs, Mapping) else [*theirs, *ours]


def _interface(system: BatchSystem, choice: sections.Cluster) -> str | None:
    configured: str | None = dask.config.get(f"jobqueue.{system.module}.interface", None)
    return choice.interface or configured


def _class_of(system: BatchSystem) -> Any:
    try:
        with _signals_as_they_are():
            import dask_jobqueue
    except ImportError as error:
        raise MissingPackage(
            f"cluster {system.module} is dask-jobqueue's, which is not installed. Write: pip install 'halotile[hpc]'"
        ) from error
    return getattr(dask_jobqueue, system.cluster)


@contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """To import dask-jobqueue replaces the handler of Ctrl-C, and fails in other threads than the first."""
    replaced, signal.signal = signal.signal, lambda *_: None
    try:
        yield
    finally:
        signal.signal = replaced
