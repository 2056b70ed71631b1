"""The run of a plan: its output claimed, a cluster started (and anew when it is lost), its blocks swept, the end in words."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

from halotile.errors import BlockFailed, BlockInputFailed, DiskRefused, Stalled, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.claim import claim
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.damage import damaged_blocks, output_grid
from halotile.graphs.outcome import Outcome, bad_blocks_in_words, full_disk_in_words
from halotile.graphs.plan import Plan
from halotile.graphs.progress import Observer
from halotile.graphs.signals import Signals
from halotile.graphs.status import StatusFile
from halotile.graphs.sweep import Sweep
from halotile.registry import find
from halotile.storage.disk import sweep_partials
from halotile.storage.journal import Journal
from halotile.storage.rundir import RunDirectory

__all__ = ["Outcome", "run"]

PHASE = "denoise"
RESTARTS = 3
"""Times that a cluster is started anew without a block done in between before a run gives up."""


def run(plan: Plan, *, observer: Observer | None = None, cluster: Cluster | None = None) -> Outcome:
    """Run a plan to its end, or go on with one that was interrupted.

    Parameters
    ----------
    plan : Plan
        From :func:`halotile.graphs.planner.make_plan`.
    observer : callable, optional
        Called with a :class:`Progress` about twice a second.
    cluster : Cluster, optional
        A running cluster to use; by default the one the job names is started, and ended.

    Raises
    ------
    OutputRefused, ResumeRefused
        When the output is not this job's to write, or another run is writing it.
    BlockFailed
        When blocks failed after their retries and ``run.on_bad_block`` is ``fail``. All others are done.
    DiskRefused
        When the disk is full. What is done stays done.
    Stopped
        When SIGTERM or SIGUSR1 asked the run to drain.
    """
    directory = RunDirectory(plan.run_directory)
    with claim(plan, directory) as journal, Signals() as signals:
        return _Driver(plan, directory, journal, signals, observer, cluster).run()


class _Driver:
    """The driver's state during one run."""

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        journal: Journal,
        signals: Signals,
        observer: Observer | None,
        cluster: Cluster | None,
    ) -> None:
        self.plan = plan
        self.cluster = cluster
        self.journal = journal
        self.status = StatusFile(directory, plan, observer)
        self.sweep = Sweep(
            plan.task,
            phase=PHASE,
            options=plan.job.run,
            journal=journal,
            directory=directory,
            signals=signals,
            status=self.status,
            import_folder=plan.job.import_folder,
        )

    def run(self) -> Outcome:
        """Until nothing is left to do; a cluster that stops answering is started anew."""
        struck = self._strike_damaged()
        self.status.begin(self.sweep.progress("start"))
        if struck:
            are = "is" if struck == 1 else "are"
            self.status.say(f"{counted(struck, 'block')} of the earlier run {are} damaged and done again")
        if self.journal.warning:
            self.status.say(self.journal.warning)
        try:
            self._until_done()
        except BaseException as error:
            with suppress(OSError):  # a mark that is lost with the disk repeats a block
                self.journal.sync()
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            self.status.end("stopped" if stopped else "failed", self.sweep.progress("stop"), str(error))
            raise
        self.journal.sync()
        if self.sweep.untidy:
            sweep_partials(self.plan.output)
        return self._conclude()

    def _strike_damaged(self) -> int:
        """Take the blocks out of the journal whose files are gone or cut short; returns how many there were."""
        grid = output_grid(self.plan.layout, self.plan.grid.shape, self.plan.grid.block)
        done = map(grid.block_at, self.journal.done)
        damaged = [n for n, _ in damaged_blocks(self.plan.output, self.plan.layout, done, thorough=False)]
        self.journal.strike(damaged)
        return len(damaged)

    def _until_done(self) -> None:
        restarts = 0
        while self.sweep.left():
            self.sweep.stop_if_asked()
            before = len(self.journal.done)
            try:
                with self._cluster() as cluster:
                    self._through(cluster)
            except (Stalled, ConnectionError, TimeoutError) as error:
                self.sweep.untidy = True
                restarts = 0 if len(self.journal.done) > before else restarts + 1
                if restarts >= RESTARTS:
                    raise
                self.status.say(f"no progress: {error} Starting the cluster anew, going on from the journal.")
                self.status.tell(self.sweep.progress("start"))

    def _through(self, cluster: Cluster) -> None:
        if cluster.dashboard:
            self.status.say(f"dashboard: {cluster.dashboard}")
        self.sweep.through(cluster)
        if self.sweep.disk_error:
            raise DiskRefused(full_disk_in_words(self.plan, self.sweep.disk_error, len(self.journal.done)))

    def _cluster(self) -> AbstractContextManager[Cluster]:
        if self.cluster is not None:
            return nullcontext(self.cluster)
        run = self.plan.job.run
        kind = find("clusters", self.plan.job.cluster.kind)
        started: AbstractContextManager[Cluster] = kind.start(
            workers=run.workers,
            memory_bytes=self.plan.memory_bytes,
            dashboard=self.plan.job.cluster.dashboard,
            **self.plan.job.cluster.options,
        )
        return started

    def _conclude(self) -> Outcome:
        progress = self.sweep.progress("stop")
        bad = tuple(self.sweep.bad[number] for number in sorted(self.sweep.bad))
        if bad and self.plan.job.run.on_bad_block == "fail":
            self.status.end("failed", progress, f"{counted(len(bad), 'block')} failed")
            kind = BlockInputFailed if all(b.kind in ("input", "damaged") for b in bad) else BlockFailed
            raise kind(bad_blocks_in_words(self.plan, bad))
        self.status.end("finished", progress, "")
        return Outcome(
            done=progress.done,
            total=progress.total,
            resumed=progress.resumed,
            quarantined=bad,
            seconds=progress.seconds,
            megapixels_per_second=progress.megapixels_per_second,
            peak_memory_bytes=progress.peak_memory_bytes,
            output=str(self.plan.output),
            run_directory=str(self.plan.run_directory),
        )
