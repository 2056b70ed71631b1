"""A cluster whose scheduler is in this process and whose workers are on other machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.security import Security

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import Order, RunningCluster, config_errors_described
from halotile.graphs.clusters.common.security import (
    LOOPBACK,
    Credentials,
    answer_allowed_only,
    credentials,
    private_base,
)
from halotile.graphs.clusters.launches.base import Launch, LaunchState, QueryStates
from halotile.graphs.clusters.workers.settings import SETTINGS, keep_off_path, own_servers
from halotile.graphs.words import counted, first_line
from halotile.storage.run_directory.directory import WORKERS

POLL_SECONDS = 2.0
SLOW_SECONDS = 10.0
# After so long without a change, states are queried less often: batch systems have others to answer.
CALM_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # a launch that had its worker for so long did not end for a fault of its own
SPARE = 2  # launches that may end at once besides one for each worker, before no more are tried
LONGEST_PAUSE_SECONDS = 30.0
FORGIVE_SECONDS = 300.0  # a cluster that goes on with fewer workers asks for the others again after this
CALL_SECONDS = 60.0


@dataclass(eq=False)
class Supervisor(RunningCluster):
    """A running cluster whose launches are watched from a thread."""

    _: KW_ONLY
    cluster: Any  # holds the launches
    query: QueryStates  # states of launches that have no worker
    report: Callable[[str], None]  # takes a line for the user
    capacity: Callable[[], int] | None = None  # number of launches that there is room for by now

    def __post_init__(self) -> None:
        self._since: dict[Any, float] = {}
        """Time at which each connected worker was seen first."""
        self._healthy: set[Any] = set()
        """Names of launches whose workers were there for a while, connected or not."""
        self._ended_early = 0
        self._not_before = 0.0
        self._waiting = "starting"
        self._changed = 0.0
        """Time of the last change."""
        self._seen: Any = None
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="halotile-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=CALL_SECONDS)

    def missing(self, wanted: int = 1) -> str | None:
        """Return the reason why there are fewer workers than ``wanted``; None once there are as many."""
        return self._waiting if len(self._connected()) < wanted else None

    def check(self, wanted: int = 1) -> None:
        """Raise when there are fewer workers than ``wanted``, and there will be no more."""
        if self._failure is None and wanted <= (room := self._target()):
            return
        if self.missing(wanted):
            raise ClusterFailed(self._failure or f"there is room for {room} of {self.workers} workers.")

    def _run(self) -> None:
        last_error = ""
        while not self._stop.is_set():
            try:
                self._update()
            except Exception as error:  # it goes on: nobody else would replace the next worker that is lost
                text = f"{type(error).__name__}: {error}"
                if text != last_error and self.cluster.status.name == "running":
                    self.report(f"supervising the workers failed, and is tried again: {first_line(text)}")
                last_error = text
            self._stop.wait(POLL_SECONDS if time.monotonic() - self._changed < CALM_SECONDS else SLOW_SECONDS)

    def _update(self) -> None:
        now = time.monotonic()
        connected = self._connected()
        self._note_health(connected, now)
        absent = {name: launch for name, launch in dict(self.cluster.workers).items() if name not in connected}
        states = self._states(list(absent.values()))
        over = {name: launch for name, launch in absent.items() if launch in states and states[launch].over}
        if over:
            self._replace(over, states, now)
        seen = (frozenset(connected), frozenset(state.text for state in states.values()))
        if over or seen != self._seen:
            self._changed, self._seen = now, seen
        if waiting := [state.text for state in states.values() if not state.over]:
            self._waiting = _describe(waiting)
        if now >= self._not_before:
            if self._failure is not None:  # the workers left have gone on; the cause may be gone
                self._failure, self._ended_early = None, 0
            self.cluster.scale(self._target())

    def _target(self) -> int:
        """Number of launches to have now."""
        return min(self.workers, self.capacity()) if self.capacity else self.workers

    def _connected(self) -> set[Any]:
        return {worker["name"] for worker in list(self.cluster.scheduler_info["workers"].values())}

    def _note_health(self, connected: set[Any], now: float) -> None:
        for name in self._since.keys() - connected:
            del self._since[name]
        for name in connected:
            since = self._since.setdefault(name, now)
            if now - since >= HEALTHY_SECONDS and name not in self._healthy:
                self._healthy.add(name)
                self._ended_early = 0

    def _states(self, absent: Sequence[Launch]) -> dict[Launch, LaunchState]:
        refused = {launch: LaunchState(True, launch.refusal) for launch in absent if launch.refusal}
        accepted = [launch for launch in absent if launch not in refused and launch.title]
        return refused | (dict(self.query(accepted)) if accepted else {})

    def _replace(self, over: dict[Any, Launch], states: dict[Launch, LaunchState], now: float) -> None:
        """Drop launches that ended without a worker, so that others are asked for."""
        self.cluster.sync(self.cluster.scale_down, list(over), callback_timeout=CALL_SECONDS)
        early = over.keys() - self._healthy
        self._healthy -= over.keys()
        self._ended_early += len(early)
        self._not_before = now + min(LONGEST_PAUSE_SECONDS, 2.0 ** min(self._ended_early, 10))
        launch = next(iter(over.values()))
        text = f"{launch.title}: {states[launch].text}" if launch.title else states[launch].text
        target = self._target()
        if self._ended_early < self.workers + SPARE and target:
            again = f"asking for {'it' if len(over) == 1 else 'them'} again"
            fewer = f"going on with {target} of {self.workers}"
            self.report(f"{counted(len(over), 'worker')} lost ({text}); {fewer if target < self.workers else again}")
            return
        tail = launch.log_tail()
        log = f" The end of its log:\n{tail}" if tail else ""
        self._failure = f"{counted(self._ended_early, 'worker')} in a row ended before doing any work. {text}.{log}"
        self._not_before = now + FORGIVE_SECONDS
        self.report(f"no more workers are asked for, for {FORGIVE_SECONDS / 60:.0f} minutes: {self._failure}")


def _describe(states: Sequence[str]) -> str:
    """The states of waiting launches with their counts, the most frequent first.

    >>> _describe(["PENDING (Resources)", "PENDING (Resources)", "RUNNING"])
    '2 PENDING (Resources), 1 RUNNING'
    """
    kinds = sorted(set(states), key=states.count, reverse=True)
    return ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)


START_SECONDS = 120
DEATH_SECONDS = 60  # time for which a worker looks for the scheduler

REMOTE_SETTINGS = SETTINGS | {
    # A worker that died is back by then, started anew by its nanny; one that is not, is lost with its launch.
    "distributed.deploy.lost-worker-timeout": "15s",
    "distributed.comm.require-encryption": True,
}


# `make(security, logs, scheduler_options)`: a SpecCluster with its scheduler, and no launch yet.
MakeCluster = Callable[[Security, Path, dict[str, Any]], Any]


@contextmanager
def supervised_cluster(
    order: Order,  # requirements for the cluster
    address: str,  # address that the scheduler listens on
    make: MakeCluster,  # makes the cluster that holds the launches
    query: QueryStates,  # states of launches
    capacity: Callable[[], int] | None = None,  # number of launches that there is room for by now
) -> Iterator[RunningCluster]:
    """A cluster whose launches are replaced when they are lost, for the length of the context."""
    options = {
        "host": address,
        "protocol": "tls://",
        "port": 0,
        "dashboard_address": f"{LOOPBACK}:0",
        **order.scheduler_options,
    }
    with remote_environment(order) as (base, tls):
        with config_errors_described():
            cluster = make(tls.security, base, options | {"security": tls.security})
        watched = partial(Supervisor, cluster=cluster, query=query, report=order.report, capacity=capacity)
        try:
            with (
                connected(cluster, order) as (client, dashboard),
                watched(client, order.workers, dashboard) as supervisor,
            ):
                yield supervisor
        finally:
            with suppress(TimeoutError, OSError):
                cluster.close(timeout=30)


@contextmanager
def remote_environment(order: Order) -> Iterator[tuple[Path, Credentials]]:
    """The settings and scratch folder for a scheduler that other machines reach; yields the folder of its files and its certificates."""
    if not order.choice.tls:
        raise ConfigError(
            "cluster.tls is false, and this cluster is reachable from other machines: anyone who connects can run code as you. "
            "Leave it out."
        )
    base = (order.folder or private_base()) / WORKERS
    base.mkdir(mode=0o700, exist_ok=True)
    certificates = nullcontext(order.credentials) if order.credentials else credentials(base)
    with own_servers(REMOTE_SETTINGS | order.settings), certificates as tls:
        yield base, tls


@contextmanager
def connected(cluster: Any, order: Order) -> Iterator[tuple[Client, str | None]]:
    """A client of a new cluster, and the address of its dashboard, if it has one: on the driver's loopback, wherever its scheduler
    listens."""
    keep_off_path()
    with Client(cluster, timeout=START_SECONDS, set_as_default=False) as client:
        dashboard = None
        if order.choice.dashboard:
            dashboard = f"http://{LOOPBACK}:{cluster.scheduler.http_server.port}/status"
        answer_allowed_only(cluster.scheduler, dashboard)
        yield client, dashboard


def worker_arguments(order: Order, security: Security, interface: str | None) -> list[str]:
    """Arguments of the worker's command, besides the scheduler's address and its own name."""
    tls = security.get_tls_config_for_role("worker")
    return [
        *("--tls-ca-file", tls["ca_file"], "--tls-cert", tls["cert"], "--tls-key", tls["key"]),
        *("--memory-limit", str(order.memory_bytes), "--death-timeout", str(DEATH_SECONDS)),
        *(("--interface", interface) if interface else ()),
    ]
