"""The cluster of a run: started when it is first needed, restarted when it is lost, ended with the run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from halotile.errors import Stalled, Stopped
from halotile.graphs.clusters.base import AUTO, DEFAULT, Order, RunningCluster
from halotile.graphs.clusters.common.answers import await_workers
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.security import remove_stale
from halotile.graphs.kinds.base import AnyPass
from halotile.graphs.kinds.sections import Cluster as ClusterChoice
from halotile.graphs.kinds.sections import Run, parse_bytes
from halotile.graphs.runs.status import RunContext, Status
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import WORKERS
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.tasks.block import BadBlock
from halotile.tasks.devices.device import release_memory

RESTARTS = 3  # restarts of a cluster without a finished block in between after which a run gives up


AnyJobPass = TypeVar("AnyJobPass", bound=AnyPass)


class ClusterPass(ABC, Generic[AnyJobPass]):
    """A pass of a run, on a cluster or on several, one after the other.

    Parameters
    ----------
    job_pass : Pass, Gather or RankProgram
        The work.
    journal : Journal
        Record of the blocks that are done.
    ledger : Ledger, optional
        Storage of the sums of the blocks.
    context : RunContext
        The run.
    """

    total = 1  # number of blocks that the pass is to do
    seconds = 0.0  # time in which workers were ready and blocks were left
    disk_error: str | None = None  # error of a full disk that ended the pass early
    untidy = False  # true once a worker was lost, which may have left part of a file behind

    def __init__(self, job_pass: AnyJobPass, journal: Journal, ledger: Ledger | None, context: RunContext) -> None:
        self.job_pass = job_pass
        self.journal = journal
        self.ledger = ledger
        self.context = context
        self.outputs, self.status, self.signals = context.outputs, context.status, context.signals
        self.bad: dict[int, BadBlock] = {}
        """Blocks that have been given up."""

    @property
    def phase(self) -> str:
        """Its phase, as progress shows it."""
        return self.job_pass.phase

    @property
    def done(self) -> int:
        """Number of its blocks that are done."""
        return len(self.journal.done)

    @property
    def counted(self) -> int:
        """Number of its blocks that are done in all outputs together."""
        return self.done

    @property
    @abstractmethod
    def if_stopped(self) -> str:
        """End of the message of a stop."""

    def left(self) -> int:
        """Return the number of blocks that are neither done nor given up."""
        return self.total - len(self.journal.done) - len(self.bad)

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal came and blocks are left."""
        if self.signals.requested and self.left():
            name = self.signals.name
            raise Stopped(f"stopped on {name}{self.job_pass.title}{self.if_stopped}", name)

    def progress(self, phase: str) -> Progress:
        """Return the progress of the run."""
        return self.status.progress(phase, done=self.counted, failed=len(self.bad))

    def record(self, sums: Mapping[int, Mapping[str, Any]], digests: Mapping[int, bytes]) -> None:
        """Record blocks as done."""
        if self.ledger is not None:
            self.ledger.enter(sums)
        self.journal.mark(digests)

    @abstractmethod
    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Process the remaining blocks on the cluster, until none is left or the disk is full.

        ``preparing``: name in reports of the time in which workers load the job.
        """


class SharedCluster(AbstractContextManager["SharedCluster"]):
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


class Session(AbstractContextManager["Session"]):
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
        self, run: Run, choice: ClusterChoice, status: Status, given: RunningCluster | SharedCluster | None = None
    ) -> None:
        self.run = run
        self.choice = choice
        self.status = status
        self.given = given
        self.directory = status.directory
        self._used: RunningCluster | None = None
        self._last: ClusterPass[Any] | None = None
        """The pass that used the cluster last."""
        self._held = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._end()

    def compute(self, under_way: ClusterPass[Any]) -> None:
        """Process a pass until none of its blocks is left, or its disk is full."""
        restarts = 0
        self._last = under_way
        while under_way.left() and not under_way.disk_error:
            under_way.stop_if_asked()
            before = under_way.done
            try:
                phase = under_way.phase if self._used is not None else "start"
                with self.status.ticking(partial(under_way.progress, phase)):
                    cluster = self._cluster()
                    await_workers(cluster, self.status.report, under_way.stop_if_asked)
                under_way.run_on(cluster, preparing=phase)
            except (Stalled, ConnectionError, TimeoutError) as error:
                under_way.untidy = True
                self._end()
                if isinstance(self.given, SharedCluster):
                    self.given.close()
                restarts = 0 if under_way.done > before else restarts + 1
                if restarts >= RESTARTS:
                    raise
                self.status.report(f"no progress: {error} Starting the cluster anew, going on from the journal.")
                self.status.notify(under_way.progress("start"))

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
        return kind.start(
            Order(
                workers=max(self.run.count, workers),
                memory_bytes=parse_bytes(self.run.memory_per_worker),
                choice=self.choice,
                folder=self.directory.path,
                gpus=self.run.device == "cuda",
                stall_seconds=self.run.stall_seconds,
                report=self.status.report,
            )
        )
