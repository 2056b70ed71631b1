"""Several copies of one command, as ``mpirun`` and ``srun`` start them: the first is the driver, the others become its workers.

Nothing of a launcher is used but the variables that number the copies. The driver writes its address, for its owner alone, into the
run directory, under the name of the launch; the others wait for it there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import Cluster, Order, config_errors_described
from halotile.graphs.clusters.connection.addresses import LOOPBACK, address_of_interface, own_address
from halotile.graphs.clusters.connection.credentials import Credentials, credentials, private_base
from halotile.graphs.clusters.detection.launchers import Copy, copy_of
from halotile.graphs.clusters.launches.remote_cluster import (
    REMOTE_SETTINGS,
    START_SECONDS,
    pages_of,
    worker_arguments,
)
from halotile.graphs.clusters.workers.__main__ import LEVEL
from halotile.graphs.clusters.workers.__main__ import main as worker_command
from halotile.graphs.clusters.workers.environment import own_environment
from halotile.graphs.clusters.workers.scratch import keep_off_path, private_scratch
from halotile.graphs.jobs.sections import Cluster as Choice
from halotile.graphs.waiting import log_line, report_if_slow
from halotile.graphs.watching.allowed_hosts import answer_allowed_only
from halotile.storage.run_directory.names import WORKERS

WAIT_SECONDS = 300.0
"""How long they wait for one another: the driver plans the job first."""
WORD_SECONDS = 30.0
"""After so long a copy says what it waits for."""
POLL_SECONDS = 0.2
END_SECONDS = 10.0
FORGET_SECONDS = 86400.0
LATE_SECONDS = 30.0
"""One copy may start so long after another, by clocks that differ."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other copies of the command."""

    client: Client
    workers: int
    dashboard: str | None
    began: float = field(default_factory=time.monotonic)

    def missing(self) -> str | None:
        """That none has come yet."""
        there = self.client.scheduler_info(n_workers=-1)["workers"]
        return None if there else f"the other {self.workers} copies of the command have not come yet"

    def check(self) -> None:
        """Raise when they stay away: of a cluster that is started anew, they have ended with the one before."""
        if time.monotonic() - self.began > WAIT_SECONDS and self.missing():
            raise ClusterFailed(f"{self.missing()}, after {WAIT_SECONDS:g} s. Start the command again.")


def meeting_point(folder: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the driver of this launch writes its address.

    Examples
    --------
    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
    >>> meeting_point(Path("x.run"), step).name
    'driver-7-0.json'
    """
    return folder / WORKERS / f"driver-{_launch(environment) or 'mpi'}.json"


def _launch(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this launch, if it has one."""
    found = copy_of(environment)
    return found.launch if found else ""


@contextmanager
def as_first() -> Iterator[None]:
    """Where this is the first of several copies, the others hear of it when it ends with an error before they are asked for.

    Not every launcher ends them by itself: Slurm's `srun` does not.
    """
    try:
        yield
    except BaseException:
        if _launch():
            with suppress(OSError):
                word = _word_of_the_end()
                for old in word.parent.glob("over-*"):
                    if time.time() - old.stat().st_mtime > FORGET_SECONDS:
                        old.unlink(missing_ok=True)
                word.touch(mode=0o600)
        raise


def _word_of_the_end() -> Path:
    """Where the first copy says that it has ended: a run that is refused has no directory, so it lies elsewhere."""
    folder = private_base() / WORKERS
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"over-{_launch()}"


def check(_: Choice) -> None:
    """Refuse to be the only copy.

    Raises
    ------
    ConfigError
        When it is.
    """
    _count()


def _count() -> int:
    """How many copies there are."""
    found = copy_of()
    if found is None:
        raise ConfigError(
            "cluster.kind is ranks, and this is the only copy of the command. Start several, as with `mpirun -n 5 recon-cli run "
            "...`, or leave it out."
        )
    return found.size


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Be the driver of the other copies.

    Raises
    ------
    ConfigError
        When this is the only copy.
    """
    count = _count() - 1
    order.require_tls()
    folder = order.folder or private_base()
    choice = order.choice
    address = address_of_interface(choice.interface) if choice.interface else _address()
    base = folder / WORKERS
    base.mkdir(mode=0o700, exist_ok=True)
    meeting_point(folder).unlink(missing_ok=True)  # of a launch that was killed
    _word_of_the_end().unlink(missing_ok=True)
    given = nullcontext(order.credentials) if order.credentials else credentials(base)
    with (
        own_environment(),
        dask.config.set(REMOTE_SETTINGS | order.settings),
        private_scratch(),
        given as made,
    ):
        with config_errors_described():
            scheduler = LocalCluster(
                n_workers=0,
                host=address,
                protocol="tls://",
                security=made.security,
                dashboard_address=f"{LOOPBACK}:0",
                scheduler_kwargs=order.scheduler_options,
                silence_logs=50,
            )
        with scheduler, Client(scheduler, timeout=START_SECONDS, set_as_default=False) as client:
            keep_off_path()
            point = meeting_point(folder)
            _announce(point, scheduler.scheduler_address, made, order)
            try:
                pages = pages_of(scheduler) if choice.dashboard else None
                answer_allowed_only(scheduler.scheduler, pages)
                yield Ranks(client, count, pages)
            finally:
                with suppress(OSError):
                    point.unlink()
                _dismiss(client, count)


def _dismiss(client: Client, count: int) -> None:
    """Send the others home in good order; one that has not even come yet is given a moment to."""
    with suppress(TimeoutError, OSError, ValueError):
        client.wait_for_workers(count, timeout=END_SECONDS)
    with suppress(TimeoutError, OSError, ValueError):
        client.sync(client.retire_workers, callback_timeout=END_SECONDS)


def serve(folder: Path) -> None:
    """Be the worker that one of the other copies is to become, once the driver has begun, until it has ended.

    Parameters
    ----------
    folder : Path
        The run directory.

    Raises
    ------
    ClusterFailed
        When no driver comes.
    """
    own = copy_of() or Copy(0, 1)
    share = () if own.local_size is None else ("--share", f"{own.local_rank or 0}/{own.local_size}")
    point = meeting_point(folder)
    # All copies share a screen: what a worker says of a scheduler that ends is nobody's concern.
    os.environ.setdefault(LEVEL, "critical")
    waiting = (
        f"copy {own.rank} of {own.size} (counted from 0) waits for the first copy of the command, {WAIT_SECONDS:g} s at most. "
        "If this one was started by itself, unset the variables that number copies, as RANK and WORLD_SIZE."
    )
    while True:
        with report_if_slow(log_line, waiting, WORD_SECONDS):
            told = _await_driver(point)
        if told is None:
            return
        try:
            worker_command([told["address"], "--name", f"rank-{own.rank}", *share, *told["arguments"]])
        except SystemExit:
            now = _told_at(point)
            if now == told:
                raise
            if now is not None:  # the first was of a launch that was killed
                continue
        return  # the driver has ended: there is nothing left to do


def _await_driver(point: Path) -> Mapping[str, Any] | None:
    """What the driver tells; None when it has ended before it told anything."""
    deadline = time.monotonic() + WAIT_SECONDS
    over = _word_of_the_end()
    started = psutil.Process().create_time() - LATE_SECONDS
    while time.monotonic() < deadline:
        told = _told_at(point)
        if told is not None and not _was_killed(told):
            return told
        with suppress(FileNotFoundError):
            if _launch() and over.stat().st_mtime > started:
                return None
        time.sleep(POLL_SECONDS)
    raise ClusterFailed(f"the first copy of the command did not begin within {WAIT_SECONDS:g} s.")


def _told_at(point: Path) -> dict[str, Any] | None:
    """What a driver has written there."""
    with suppress(OSError, ValueError):
        told: dict[str, Any] = json.loads(point.read_text())
        return told
    return None


def _was_killed(told: Mapping[str, Any]) -> bool:
    """Whether the driver that wrote this has left it behind, as far as can be seen from here."""
    here = told["host"] == socket.gethostname()
    return not Path(told["certificate"]).exists() or (here and not psutil.pid_exists(told["pid"]))


def _announce(point: Path, address: str, made: Credentials, order: Order) -> None:
    arguments = worker_arguments(order, made.security, order.choice.interface)
    partial = point.with_suffix(".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(
            {
                "address": address,
                "arguments": arguments,
                "certificate": made.paths[0],
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            file,
        )
    partial.replace(point)


def _address() -> str:
    """Loopback where all copies are known to be on this machine."""
    found = copy_of()
    return LOOPBACK if found is not None and found.local_size == found.size else own_address()
