"""The cluster of a run: started when it is first needed, restarted when it is lost, ended with the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from halotile.errors import Stalled
from halotile.graphs.clusters.base import AUTO, DEFAULT, Order, RunningCluster, Start
from halotile.graphs.clusters.common.answers import await_workers
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.security import remove_stale
from halotile.graphs.kinds.sections import Cluster as ClusterChoice
from halotile.graphs.kinds.sections import Run, parse_bytes
from halotile.graphs.runs.status import Status
from halotile.graphs.watching.progress import Progress
from halotile.registry import find
from halotile.storage.run_directory.directory import WORKERS
from halotile.tasks.devices.device import release_memory

RESTARTS = 3
"""Restarts of a cluster without a finished block in between after which a run gives up."""


class ClusterPass(Protocol):
    """A pass that runs on a cluster, or on several, one after the other."""

    disk_error: str | None
    untidy: bool

    @property
    def phase(self) -> str:
        """Its phase, as progress shows it."""

    @property
    def done(self) -> int:
        """Number of its blocks that are done."""

    def left(self) -> int:
        """Return the number of blocks that are left."""
        ...

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal asked for it."""
        ...

    def progress(self, phase: str) -> Progress:
        """Return the progress of the run."""
        ...

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Process the remaining blocks on the cluster."""
        ...


class SharedCluster:
    """A cluster for several runs, one after the other; started when the first needs it, and anew where it was lost.

    Parameters
    ----------
    workers : int
        The largest number of workers that one of the runs asks for.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._running: RunningCluster | None = None
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> RunningCluster | None:
        """The cluster; None until it is first lent."""
        return self._running

    def lend(self, start: Callable[[int], AbstractContextManager[RunningCluster]]) -> RunningCluster:
        """Return the cluster, started with the number of workers unless it is running."""
        if self._running is None:
            self._running = self._held.enter_context(start(self.workers))
        return self._running

    def close(self) -> None:
        """End the cluster."""
        self._running = None
        self._held.close()


class Session:
    """Takes passes through a cluster.

    Parameters
    ----------
    run : Run
        Number of workers, and their memory.
    choice : Cluster
        The cluster section of the job.
    status : Status
        Receiver of reports.
    given : RunningCluster or SharedCluster, optional
        A running cluster, or one of several runs, which is used instead, and left running.
    """

    def __init__(
        self,
        run: Run,
        choice: ClusterChoice,
        status: Status,
        given: RunningCluster | SharedCluster | None = None,
    ) -> None:
        self.run = run
        self.choice = choice
        self.status = status
        self.given = given
        self.directory = status.directory
        self._used: RunningCluster | None = None
        """Start of the cluster, in Unix time."""
        self._last: ClusterPass | None = None
        """The pass that used the cluster last."""
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def compute(self, wanted: ClusterPass) -> None:
        """Process a pass until none of its blocks is left, or its disk is full."""
        restarts = 0
        self._last = wanted
        while wanted.left() and not wanted.disk_error:
            wanted.stop_if_asked()
            before = wanted.done
            try:
                phase = wanted.phase if self._used is not None else "start"
                with self.status.ticking(partial(wanted.progress, phase)):
                    cluster = self._cluster()
                    await_workers(cluster, self.status.report, wanted.stop_if_asked)
                wanted.run_on(cluster, preparing=phase)
            except (Stalled, ConnectionError, TimeoutError) as error:
                wanted.untidy = True
                self._end()
                if isinstance(self.given, SharedCluster):
                    self.given.close()
                restarts = 0 if wanted.done > before else restarts + 1
                if restarts >= RESTARTS:
                    raise
                self.status.report(
                    f"no progress: {error} Starting the cluster anew, going on from the journal."
                )
                self.status.notify(wanted.progress("start"))

    def _cluster(self) -> RunningCluster:
        if self._used is None:
            self._used = self._held.enter_context(self._start())
            release_memory()  # what planning needed
            if address := self.status.watch.open(self._used):
                self.status.dashboard_at(address)
        return self._used

    def _end(self) -> None:
        if self._used is not None and self._last is not None:
            self.status.notify_now(self._last.progress(self._last.phase))
        if page := self.status.watch.close():
            with suppress(OSError):  # a full disk costs the page, and nothing else
                self.directory.write_page(page)
        self._used = None
        self._held.close()

    def _start(self) -> AbstractContextManager[RunningCluster]:
        if isinstance(self.given, SharedCluster):
            return nullcontext(self.given.lend(self._started))
        return self._started() if self.given is None else nullcontext(self.given)

    def _started(self, workers: int = 0) -> AbstractContextManager[RunningCluster]:
        kind = cluster_kind_of(self.choice)
        if kind.name != DEFAULT or self.choice.kind == AUTO:
            self.status.report(f"cluster: {kind.name}, {kind.why}")
        remove_stale(self.directory.path / WORKERS)  # left there by a driver that was killed
        start: Start = find("clusters", kind.name).start
        return start(
            Order(
                workers=max(self.run.count, workers),
                memory_bytes=parse_bytes(self.run.memory_per_worker),
                choice=self.choice,
                folder=self.directory.path,
                stall_seconds=self.run.stall_seconds,
                report=self.status.report,
            )
        )
