"""The cluster of a run: started when it is first needed, anew when it is lost, ended with the run."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from halotile.errors import Stalled
from halotile.graphs.clusters.base import Cluster, Order, Start
from halotile.graphs.clusters.connection.arrival import await_workers
from halotile.graphs.clusters.connection.credentials import sweep_stale
from halotile.graphs.clusters.detection.cluster_kind import AUTO, DEFAULT, kind_of
from halotile.graphs.jobs.sections import Cluster as ClusterChoice
from halotile.graphs.jobs.sections import Run, parse_bytes
from halotile.graphs.runs.progress import Progress
from halotile.graphs.runs.status import StatusFile
from halotile.graphs.watching.dask_report import write_report
from halotile.registry import find
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.names import WORKERS

RESTARTS = 3
"""Times that a cluster is started anew without a block done in between before a run gives up."""


class Pass(Protocol):
    """Work that goes through a cluster, or through several, one after the other."""

    phase: str
    disk_error: str | None
    untidy: bool
    journal: Journal

    def left(self) -> int:
        """How much is left to do."""
        ...

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal asked for it."""
        ...

    def progress(self, phase: str) -> Progress:
        """How far it is."""
        ...

    def through(self, cluster: Cluster, *, preparing: str = "start") -> None:
        """Do what is left of it."""
        ...


class Session:
    """Takes sweeps through a cluster.

    Parameters
    ----------
    run : Run
        How many workers, and their memory.
    choice : graphs.job.Cluster
        What kind of cluster is started.
    status : StatusFile
        Whom to tell.
    given : Cluster, optional
        A running cluster, which is used instead, and left running.
    """

    def __init__(
        self, run: Run, choice: ClusterChoice, status: StatusFile, given: Cluster | None = None
    ) -> None:
        self.run = run
        self.choice = choice
        self.status = status
        self.given = given
        self.directory = status.directory
        self._used: Cluster | None = None
        self._began = 0.0
        """When it was started, in Unix time."""
        self._sweep: Pass | None = None
        """What went through it last."""
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(report=kind is not KeyboardInterrupt)

    def follow(self, status: StatusFile) -> None:
        """Tell another from now on."""
        status.watch = self.status.watch
        self.status = status

    def through(self, sweep: Pass) -> None:
        """Until nothing of the sweep is left to do, or its disk is full.

        Raises
        ------
        Stopped
            When a signal asked for it.
        Stalled, ConnectionError, TimeoutError
            When clusters are lost one after the other.
        """
        restarts = 0
        self._sweep = sweep
        while sweep.left() and not sweep.disk_error:
            sweep.stop_if_asked()
            before = len(sweep.journal.done)
            try:
                phase = sweep.phase if self._used is not None else "start"
                with self.status.ticking(partial(sweep.progress, phase)):
                    cluster = self._cluster()
                    await_workers(cluster, self.status.report, sweep.stop_if_asked)
                sweep.through(cluster, preparing=phase)
            except (Stalled, ConnectionError, TimeoutError) as error:
                sweep.untidy = True
                self._end()
                restarts = 0 if len(sweep.journal.done) > before else restarts + 1
                if restarts >= RESTARTS:
                    raise
                self.status.report(
                    f"no progress: {error} Starting the cluster anew, going on from the journal."
                )
                self.status.tell(sweep.progress("start"))

    def _cluster(self) -> Cluster:
        if self._used is None:
            self._used = self._held.enter_context(self._start())
            self._began = time.time()
            if address := self.status.watch.open(self._used):
                self.status.dashboard = address
                self.status.report(f"dashboard: {address}")
        return self._used

    def _end(self, *, report: bool = True) -> None:
        if self._used is not None and self._sweep is not None:
            self.status.notify_now(self._sweep.progress(self._sweep.phase))
        self.status.watch.close()
        # A cluster that was given goes on, and its report is its owner's.
        if report and self._used is not None and self._used.dashboard and self.given is None:
            write_report(self._used.client, self.directory, self._began)
        self._used = None
        self._held.close()

    def _start(self) -> AbstractContextManager[Cluster]:
        if self.given is not None:
            return nullcontext(self.given)
        kind = kind_of(self.choice)
        if kind.name != DEFAULT or self.choice.kind == AUTO:
            self.status.report(f"cluster: {kind.name}, {kind.why}")
        sweep_stale(self.directory.path / WORKERS)  # what a driver that was killed has left there
        start: Start = find("clusters", kind.name).start
        return start(
            Order(
                workers=self.run.count,
                memory_bytes=parse_bytes(self.run.memory_per_worker),
                choice=self.choice,
                folder=self.directory.path,
                stall_seconds=self.run.stall_seconds,
                report=self.status.report,
            )
        )
