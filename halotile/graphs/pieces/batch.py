"""Jobs of a batch system, each with one worker; their scripts are dask-jobqueue's."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dask
from distributed.core import Status
from distributed.security import Security

from halotile.errors import ConfigError, MissingPackage
from halotile.graphs import job
from halotile.graphs.addresses import address_of_interface, own_address
from halotile.graphs.amounts import first_line
from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.credentials import private_base
from halotile.graphs.pieces.base import Piece, State, tail_of
from halotile.graphs.pieces.remote import kept

WORKER = "halotile.graphs.workers"
NAME = "halotile"
NANNY_BYTES = 512 * 2**20
"""What a job needs besides its worker's memory: the worker's nanny."""
DEATH_SECONDS = 120
"""How long a worker looks for the scheduler."""
CALL_SECONDS = 30.0
_FORGOTTEN = re.compile(r"unknown job|do(es)? not exist|has finished|no such job", re.IGNORECASE)
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
    gpus: Callable[[job.Cluster, int], Mapping[str, Any]]
    lists: str
    account: str = "account"
    walltime: Callable[[str], str] = str
    directives: Callable[[list[str]], Any] = list
    lacks: tuple[str, ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict)


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
    gpus = dict(system.gpus(choice, memory_bytes)) if choice.gpus else {}
    configured = dask.config.get(f"jobqueue.{system.module}", {})
    directives = system.directives([*gpus.pop("directives", ()), *choice.directives])
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
    usual = {key: value for key, value in system.usual.items() if configured.get(key) is None}
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
    holder = _class_of(system)
    if not shutil.which(system.submits):
        raise ConfigError(
            f"cluster.kind is {system.module}, and there is no {system.submits} here, which submits jobs of {system.title}'s. "
            "Start it on a machine of that cluster, or write kind: local."
        )
    interface = _interface(system, order.choice)
    address = address_of_interface(interface) if interface else own_address()

    def hold(security: Security, logs: Path, scheduler: dict[str, Any]) -> Any:
        try:
            return holder(
                **arguments_of(system, order, logs),
                job_cls=watched(holder.job_cls, logs, system),
                security=security,
                scheduler_options=scheduler,
                silence_logs=50,
                name=NAME,
            )
        except (ValueError, TypeError) as error:
            said = first_line(str(error)).split(". ")[0]  # what follows are all other arguments
            options = dict(order.choice.options)
            blame = f"cluster.options is {options}" if options else f"cluster {system.module}"
            raise ConfigError(f"{blame}, which dask-jobqueue refuses: {said}.") from error

    def look(pieces: Sequence[Piece]) -> Mapping[Piece, State]:
        by_id: dict[str, Any] = {str(getattr(piece, "job_id", None)): piece for piece in pieces}
        return {by_id[each]: state for each, state in system.states(list(by_id)).items() if each in by_id}

    with _plain(order.folder) as folder, kept(replace(order, folder=folder), address, hold, look) as cluster:
        yield cluster


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
    made = _class_of(system).job_cls(
        address,
        name=f"{NAME}-0",
        protocol="tls://",
        security=security,
        **arguments_of(system, order, logs),
    )
    return str(made.job_script())


def watched(kind: type, logs: Path, system: BatchSystem) -> type:
    """A job class that remembers why a job was not taken, and where its log is."""

    class Watched(kind):  # type: ignore[misc]
        refusal: str | None = None

        @property
        def title(self) -> str:
            return f"job {self.job_id}" if self.job_id else ""

        async def start(self) -> None:
            try:
                await super().start()
            except (RuntimeError, ValueError, OSError) as error:
                said = refusal_in_words(self.submit_command, error)
                self.refusal = f"{system.title} takes no job: {said} `{system.lists}` lists its queues"
                self.status = Status.running  # Dask waits for it, and the keeper ends it

        def log_tail(self) -> str:
            return tail_of(list(logs.glob(f"*[-.a-z]{number_of(self.job_id)}*"))) if self.job_id else ""

    # Where dask-jobqueue looks for the settings of a class.
    Watched.__name__ = kind.__name__
    return Watched


def refusal_in_words(command: str, error: Exception) -> str:
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


def together_then_each(
    ask: Callable[[Sequence[str]], Mapping[str, State]], ids: Sequence[str]
) -> dict[str, State]:
    """How jobs stand in a system that may answer for several, or for none of them once one is over.

    The server has others to answer: it is asked once for all, and again only for those of which that told nothing.
    """
    states = dict(ask(ids))
    for each in ids if len(ids) > 1 else ():
        if each not in states:
            states |= ask([each])
    return states


def known_to(
    row: str, words: Callable[[Sequence[str]], Sequence[str]], ids: Sequence[str]
) -> dict[str, State]:
    """How jobs stand in a system that has a row for each that is not over, and says that it knows none of the others.

    What it says besides, such as that its server cannot be reached, tells nothing of a job.

    Parameters
    ----------
    row : str
        How a row of a job begins, with ``{}`` in the place of its number.
    words : callable
        The command for some ids.
    ids : sequence of str
        The jobs.
    """

    def ask(some: Sequence[str]) -> dict[str, State]:
        done = called(words(some))
        if done is None:
            return {}
        there = [each for each in some if re.search(row.format(number_of(each)), done.stdout, re.MULTILINE)]
        if not there and len(some) == 1 and _FORGOTTEN.search(done.stdout + done.stderr):
            return {some[0]: State(True, "not in the queue any more")}
        return dict.fromkeys(there, State(False, "in the queue"))

    return together_then_each(ask, ids)


def number_of(job: str) -> str:
    """The number of a job, without its server.

    Examples
    --------
    >>> number_of("1234.pbs-server"), number_of("17")
    ('1234', '17')
    """
    found = re.match(r"\d+", job)
    return found[0] if found else job


def called(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """What a command of a batch system answers; None when it does not."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _joined(theirs: Any, ours: Any) -> Any:
    """Lists, or mappings, with what is ours last."""
    if not theirs:
        return ours
    return {**theirs, **ours} if isinstance(theirs, Mapping) else [*theirs, *ours]


def _interface(system: BatchSystem, choice: job.Cluster) -> str | None:
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
