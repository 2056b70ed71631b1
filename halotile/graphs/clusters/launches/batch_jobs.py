"""Jobs of a batch system, each with one worker; dask-jobqueue writes their scripts."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.security import Security

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.amounts import first_line
from halotile.graphs.clusters.base import Order, RunningCluster, traits_of
from halotile.graphs.clusters.common.security import Credentials, listening_address, private_base
from halotile.graphs.clusters.launches.base import Launch, LaunchState, number_of, tail_of
from halotile.graphs.clusters.launches.remote_cluster import supervised_cluster
from halotile.graphs.kinds import sections
from halotile.storage.run_directory.directory import WORKERS

if TYPE_CHECKING:
    from halotile.graphs.clusters.launches.batch_system import BatchSystem

WORKER = "halotile.graphs.clusters.workers"
NAME = "halotile"
NANNY_BYTES = 512 * 2**20
"""Memory of a job for the worker's nanny, besides the worker's own."""
DEATH_SECONDS = 120
"""Time for which a worker looks for the scheduler."""
_REFUSED = re.compile(r"stderr:\n(.*?)\s*\Z", re.DOTALL)


def job_arguments(system: BatchSystem, order: Order, logs: Path) -> dict[str, Any]:
    """Arguments of the dask-jobqueue class; those left out here are as in ``~/.config/dask/jobqueue.yaml``."""
    choice = order.choice
    for key in traits_of(system.module).ignored:
        if getattr(choice, key) is not None:
            raise ConfigError(
                f"cluster.{key} is {getattr(choice, key)}, and {system.title} has nothing of the kind: leave it out, or write it in "
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
