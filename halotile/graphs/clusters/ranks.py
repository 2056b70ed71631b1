"""Several copies of one command, as ``mpirun`` and ``srun`` start them: the first is the driver, the others become its workers.

The variables that number the copies are all that is used of a launcher. The driver writes its address, readable by its owner alone,
into the run directory, under the name of the launch; the others wait for it there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import (
    ChosenCluster,
    ClusterTraits,
    Environment,
    Order,
    RunningCluster,
    config_errors_described,
)
from halotile.graphs.clusters.common.answers import present_workers
from halotile.graphs.clusters.common.security import LOOPBACK, Credentials, listening_address, private_base
from halotile.graphs.kinds import sections
from halotile.graphs.waiting import log_line, report_if_slow
from halotile.storage.run_directory.directory import WORKERS
from halotile.tasks.groups.opening import Copy, copy_of

if TYPE_CHECKING:
    from distributed import Client

WAIT_SECONDS = 300.0  # time for which the copies wait for one another: the driver plans the job first
WORD_SECONDS = 30.0  # time after which a copy reports that it waits
POLL_SECONDS = 0.2
END_SECONDS = 10.0
FORGET_SECONDS = 86400.0
LATE_SECONDS = 30.0  # time by which one copy may start after another, by clocks that differ


def detect(environment: Environment) -> ChosenCluster | None:
    """This kind where launchers number several copies of the command."""
    if (copy := copy_of(environment)) is None:
        return None
    return ChosenCluster("ranks", f"this is copy {copy.rank} of {copy.size} of the command")


def count_workers(_: sections.Run, __: sections.Cluster, ___: str, environment: Environment) -> tuple[int, str] | None:
    """Number of the other copies."""
    if (copy := copy_of(environment)) is None:
        return None
    return copy.size - 1, f"{copy.size} copies of the command, one of them the driver"


TRAITS = ClusterTraits(of_copies=True, count_workers=count_workers)


@dataclass(eq=False)
class Ranks(RunningCluster):
    """The other ranks started by mpirun or srun."""

    began: float = field(default_factory=time.monotonic)

    def missing(self, wanted: int = 1) -> str | None:
        """Return a message while fewer have come."""
        if len(present_workers(self.client)) >= wanted:
            return None
        return f"the other {self.workers} copies of the command have not come yet"

    def check(self, wanted: int = 1) -> None:
        """Raise when they stay away: those of a cluster that is started anew have ended with the one before."""
        if time.monotonic() - self.began > WAIT_SECONDS and (missing := self.missing(wanted)):
            raise ClusterFailed(f"{missing}, after {WAIT_SECONDS:g} s. Start the command again.")


def address_file(folder: Path, environment: Environment = os.environ) -> Path:
    """The file in which the driver of this launch writes its address.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
    >>> address_file(Path("x.run"), step).name
    'driver-7-0.json'
    """
    return folder / WORKERS / f"driver-{_launch(environment) or 'mpi'}.json"


def _launch(environment: Environment = os.environ) -> str:
    """The name of this launch, if it has one."""
    copy = copy_of(environment)
    return copy.launch if copy else ""


@contextmanager
def as_first() -> Iterator[None]:
    """Notify the other copies, where this is the first, when it ends with an error before it needs them.

    Not every launcher ends them by itself: Slurm's `srun` does not.
    """
    try:
        yield
    except BaseException:
        if _launch():
            with suppress(OSError):
                end_file = _end_file()
                for old in end_file.parent.glob("over-*"):
                    if time.time() - old.stat().st_mtime > FORGET_SECONDS:
                        old.unlink(missing_ok=True)
                end_file.touch(mode=0o600)
        raise


def _end_file() -> Path:
    """The file that marks the end of the first copy: a refused run has no directory, so the file is elsewhere."""
    folder = private_base() / WORKERS
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"over-{_launch()}"


def check(_: sections.Cluster) -> None:
    """Refuse to be the only copy."""
    _own_copy()


def _own_copy() -> Copy:
    if (copy := copy_of()) is None:
        raise ConfigError(
            "cluster.kind is ranks, and this is the only copy of the command. Start several, as with `mpirun -n 5 recon-cli run "
            "...`, or leave it out."
        )
    return copy


@contextmanager
def start(order: Order) -> Iterator[RunningCluster]:
    """Be the driver of the other copies."""
    from distributed import LocalCluster

    from halotile.graphs.clusters.launches.remote_cluster import connected, remote_environment

    copy = _own_copy()
    is_alone = copy.local_size == copy.size  # all copies are known to be on this machine
    with remote_environment(order) as (base, tls):
        file = address_file(base.parent)
        file.unlink(missing_ok=True)  # left by a launch that was killed
        _end_file().unlink(missing_ok=True)
        with config_errors_described():
            scheduler = LocalCluster(
                n_workers=0,
                host=listening_address(order.choice.interface, is_alone=is_alone),
                protocol="tls://",
                security=tls.security,
                dashboard_address=f"{LOOPBACK}:0",
                scheduler_kwargs=order.scheduler_options,
                silence_logs=50,
            )
        with scheduler, connected(scheduler, order) as (client, dashboard):
            _announce(file, scheduler.scheduler_address, tls, order)
            try:
                yield Ranks(client, copy.size - 1, dashboard)
            finally:
                with suppress(OSError):
                    file.unlink()
                _dismiss(client, copy.size - 1)


def _dismiss(client: Client, count: int) -> None:
    """Retire the other copies; one that has not even come yet is given a moment to."""
    with suppress(TimeoutError, OSError, ValueError):
        client.wait_for_workers(count, timeout=END_SECONDS)
    with suppress(TimeoutError, OSError, ValueError):
        client.sync(client.retire_workers, callback_timeout=END_SECONDS)


def serve(folder: Path) -> None:
    """Be the worker that one of the other copies becomes, from the begin of the driver to its end.

    ``folder``: run directory.
    """
    from halotile.graphs.clusters.workers.__main__ import LEVEL
    from halotile.graphs.clusters.workers.__main__ import main as worker_command

    own = copy_of() or Copy(0, 1)
    share = () if own.local_size is None else ("--share", f"{own.local_rank or 0}/{own.local_size}")
    file = address_file(folder)
    # All copies share a screen: messages of workers about a scheduler that ends concern nobody.
    os.environ.setdefault(LEVEL, "critical")
    waiting = (
        f"copy {own.rank} of {own.size} (counted from 0) waits for the first copy of the command, {WAIT_SECONDS:g} s at most. "
        "If this one was started by itself, unset the variables that number copies, as RANK and WORLD_SIZE."
    )
    while True:
        with report_if_slow(log_line, waiting, WORD_SECONDS):
            driver = _await_driver(file)
        if driver is None:
            return
        try:
            worker_command([driver["address"], "--name", f"rank-{own.rank}", *share, *driver["arguments"]])
        except SystemExit:
            now = _read_driver(file)
            if now == driver:
                raise
            if now is not None:  # the first was of a launch that was killed
                continue
        return  # the driver has ended: there is nothing left to do


def _await_driver(file: Path) -> Mapping[str, Any] | None:
    """Address and arguments that the driver has written; None when it has ended before."""
    import psutil

    deadline = time.monotonic() + WAIT_SECONDS
    end_file = _end_file()
    started = psutil.Process().create_time() - LATE_SECONDS
    while time.monotonic() < deadline:
        driver = _read_driver(file)
        if driver is not None and not _was_killed(driver):
            return driver
        with suppress(FileNotFoundError):
            if _launch() and end_file.stat().st_mtime > started:
                return None
        time.sleep(POLL_SECONDS)
    raise ClusterFailed(f"the first copy of the command did not begin within {WAIT_SECONDS:g} s.")


def _read_driver(file: Path) -> dict[str, Any] | None:
    """The contents of the address file, if there is one."""
    with suppress(OSError, ValueError):
        driver: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return driver
    return None


def _was_killed(driver: Mapping[str, Any]) -> bool:
    """Return True where the driver that wrote this is gone, as far as can be seen from here."""
    import psutil

    here = driver["host"] == socket.gethostname()
    return not Path(driver["certificate"]).exists() or (here and not psutil.pid_exists(driver["pid"]))


def _announce(file: Path, address: str, tls: Credentials, order: Order) -> None:
    """Write the address file."""
    from halotile.graphs.clusters.launches.remote_cluster import worker_arguments

    driver = {
        "address": address,
        "arguments": worker_arguments(order, tls.security, order.choice.interface),
        "certificate": tls.paths[0],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    partial = file.with_suffix(".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        json.dump(driver, opened)
    partial.replace(file)
