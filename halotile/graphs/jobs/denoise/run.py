"""The run of a denoising plan: its output claimed, its blocks swept, the end in words."""

from __future__ import annotations

from contextlib import suppress

from halotile.errors import DiskRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.held_output import Claimed
from halotile.graphs.runs.outcome import Outcome, describe_full_disk, ended_by, failure_of
from halotile.graphs.runs.progress import Observer
from halotile.graphs.runs.session import Session
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import StatusFile
from halotile.graphs.runs.sweep import TASK_SECONDS, Sweep
from halotile.storage.disk.durable import remove_partials
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.number_ranges import RangeSet

__all__ = ["Outcome", "run"]

PHASE = "denoise"
GPU_TASK_SECONDS = 10.0
"""What a run on GPUs loses at most when it is killed."""
STAGES = ("read", "write")
"""What else is done to a block."""


def run(plan: Plan, *, observer: Observer | None = None, cluster: Cluster | None = None) -> Outcome:
    """Run a plan to its end, or go on with one that was interrupted.

    Parameters
    ----------
    plan : Plan
        From :func:`halotile.graphs.jobs.denoise.plan.make_plan`.
    observer : callable, optional
        Called with a :class:`Progress` about twice a second.
    cluster : Cluster, optional
        A running cluster to use; by default the one the job names is started, and ended.

    Raises
    ------
    OutputRefused, ResumeRefused
        When the output is not this job's to write, another run is writing it, or it was moved or removed meanwhile.
    InputError
        When what is read was changed meanwhile.
    BlockFailed
        When blocks failed after their retries and ``run.on_bad_block`` is ``fail``. All others are done.
    DiskRefused
        When the disk is full. What is done stays done.
    Stopped
        When SIGTERM or SIGUSR1 asked the run to drain.
    """
    directory = RunDirectory(plan.run_directory)
    with Signals() as signals, claim(plan, directory, signals) as claimed:
        return _Driver(plan, directory, claimed, signals, observer, cluster).run()


class _Driver:
    """The driver's state during one run."""

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        claimed: Claimed,
        signals: Signals,
        observer: Observer | None,
        cluster: Cluster | None,
    ) -> None:
        self.plan = plan
        self.cluster = cluster
        self.claimed = claimed
        self.journal = claimed.journal
        self.status = StatusFile(directory, plan, observer)
        self.sweep = Sweep(
            plan.task,
            phase=PHASE,
            stages=STAGES,
            options=plan.job.run,
            claimed=claimed,
            journal=claimed.journal,
            directory=directory,
            signals=signals,
            status=self.status,
            import_folder=plan.job.import_folder,
            # A GPU stands still while the last block of a task is written and the first of the next is read.
            task_seconds=TASK_SECONDS if plan.task.device == "cpu" else GPU_TASK_SECONDS,
            seconds_per_block=plan.tuned.seconds_per_block if plan.tuned else None,
        )

    def run(self) -> Outcome:
        """Until nothing is left to do; a cluster that stops answering is started anew."""
        signals = self.sweep.signals
        struck = self.claimed.strike_damaged(self.journal.done, signals, thorough=False)
        self.earlier = RangeSet(self.journal.done)
        self.status.begin(self.sweep.progress("start"))
        self._report_struck(struck)
        if self.journal.warning:
            self.status.report(self.journal.warning)
        try:
            self._until_done()
            self._until_sound()
            self.claimed.finish(signals)
        except BaseException as error:
            with suppress(OSError):  # a mark that is lost with the disk repeats a block
                self.journal.sync()
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            self.status.end("stopped" if stopped else "failed", self.sweep.progress("stop"), ended_by(error))
            raise
        self.journal.sync()
        if self.sweep.untidy:
            remove_partials(self.plan.output)
        return self._conclude()

    def _report_struck(self, struck: int) -> None:
        if struck:
            are = "is" if struck == 1 else "are"
            self.status.report(f"{counted(struck, 'block')} of the earlier run {are} damaged and done again")

    def _until_sound(self) -> None:
        """Look at every byte that earlier runs wrote, and do again what is damaged: a run that ends well made a whole output."""
        if self.earlier and not self.sweep.disk_error:
            with self.status.ticking(lambda: self.sweep.progress("check")):
                damaged = self.claimed.strike_damaged(self.earlier, self.sweep.signals, thorough=True)
            self._report_struck(damaged)
            self._until_done()

    def _until_done(self) -> None:
        job = self.plan.job
        with Session(job.run, self.plan.cluster, self.status, self.cluster) as session:
            session.through(self.sweep)
        if self.sweep.disk_error:
            raise DiskRefused(describe_full_disk(self.plan, self.sweep.disk_error, len(self.journal.done)))

    def _conclude(self) -> Outcome:
        progress = self.sweep.progress("stop")
        bad = tuple(self.sweep.bad[number] for number in sorted(self.sweep.bad))
        if bad and self.plan.job.run.on_bad_block == "fail":
            self.status.end("failed", progress, f"{counted(len(bad), 'block')} failed")
            raise failure_of(self.plan, bad)
        self.status.end("finished", progress, "")
        return Outcome.of(self.plan, progress, bad)
