"""The run: blocks that are not yet done stream through a cluster, receipts come back, the journal grows."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

from distributed import KilledWorker

from halotile.errors import BlockFailed, BlockInputFailed, DiskRefused, Stalled, Stopped
from halotile.graphs.bars import show_blocks
from halotile.graphs.claim import claim
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.damage import damaged_blocks, output_grid
from halotile.graphs.outcome import Outcome, bad_blocks_in_words, full_disk_in_words
from halotile.graphs.plan import Plan
from halotile.graphs.progress import Observer, Progress
from halotile.graphs.setup import BlockPlugin, prepared, run_blocks
from halotile.graphs.signals import Signals
from halotile.graphs.status import StatusFile
from halotile.graphs.stream import Answer, Grouping, Stream
from halotile.registry import find
from halotile.storage.disk import is_full, sweep_partials
from halotile.storage.journal import Journal
from halotile.storage.rundir import RunDirectory
from halotile.tasks.block import BadBlock, Receipt

__all__ = ["Outcome", "run"]

PHASE = "denoise"
SYNC_SECONDS = 5.0
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
        self.directory = directory
        self.cluster = cluster
        self.journal = journal
        self.signals = signals
        self.status = StatusFile(directory, plan, observer)
        self.attempts: dict[int, int] = {}
        self.bad: dict[int, BadBlock] = {}
        self.disk_error: str | None = None
        self.untidy = False
        """Whether a worker was lost, which may have left half a file behind."""
        self.synced = time.monotonic()

    def run(self) -> Outcome:
        """Until nothing is left to do; a cluster that stops answering is started anew."""
        struck = self._strike_damaged()
        self.status.begin(self.progress("start"))
        if struck:
            blocks = (
                "1 block of the earlier run is" if struck == 1 else f"{struck} blocks of the earlier run are"
            )
            self.status.say(f"{blocks} damaged and done again")
        if self.journal.warning:
            self.status.say(self.journal.warning)
        try:
            self._until_done()
        except BaseException as error:
            with suppress(OSError):  # a mark that is lost with the disk repeats a block
                self.journal.sync()
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            self.status.end("stopped" if stopped else "failed", self.progress("stop"), str(error))
            raise
        self.journal.sync()
        if self.untidy:
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
        while self._left():
            self._stop_if_asked()
            before = len(self.journal.done)
            try:
                with self._cluster() as cluster:
                    self._stream(cluster)
            except (Stalled, ConnectionError, TimeoutError) as error:
                self.untidy = True
                restarts = 0 if len(self.journal.done) > before else restarts + 1
                if restarts >= RESTARTS:
                    raise
                self.status.say(f"no progress: {error} Starting the cluster anew, going on from the journal.")
                self.status.tell(self.progress("start"))

    def _left(self) -> int:
        return len(self.plan.grid) - len(self.journal.done) - len(self.bad)

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

    def _stream(self, cluster: Cluster) -> None:
        if cluster.dashboard:
            self.status.say(f"dashboard: {cluster.dashboard}")
        token = uuid.uuid4().hex[:12]
        plan = self.plan
        plugin = BlockPlugin(token, plan.task, plan.run_directory, plan.job.import_folder)
        with prepared(cluster.client, plugin):
            self._stop_if_asked()
            if cluster.dashboard:
                show_blocks(cluster.client, PHASE, done=len(self.journal.done), total=len(plan.grid))
            self._pass_through(cluster, token)
        if self.disk_error:
            raise DiskRefused(full_disk_in_words(self.plan, self.disk_error, len(self.journal.done)))
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.signals.asked and self._left():
            raise Stopped(
                f"stopped on {self.signals.name} with {len(self.journal.done)} of {len(self.plan.grid)} blocks done. "
                "Run again to go on."
            )

    def _pass_through(self, cluster: Cluster, token: str) -> None:
        least = 4 if self.plan.task.overlap else 1
        stream = Stream(
            cluster.client,
            partial(run_blocks, token=token, directory=self.directory),
            name=PHASE,
            grouping=Grouping(cluster.workers, least=least),
            stall_seconds=self.plan.job.run.stall_seconds,
        )
        self.status.work_begins()
        try:
            for answers in stream.answers(self._todo(), self._left()):
                for answer in sorted(answers, key=lambda answer: answer.error is not None):
                    self._take(answer, stream)
                self._watch(stream)
        finally:
            self.untidy |= stream.lost > 0
            stream.abandon()

    def _todo(self) -> Iterator[int]:
        todo = self.journal.done.complement(len(self.plan.grid))
        return itertools.filterfalse(self.bad.__contains__, iter(todo))

    def _take(self, answer: Answer, stream: Stream) -> None:
        """Enter an answer: good blocks into the journal, bad ones back into the stream."""
        if answer.error is not None:
            self._lost(answer, stream)
            return
        receipt: Receipt = answer.result
        self._mark(receipt.done, stream)
        self.status.count(receipt)
        for bad in receipt.bad:
            self._retry(bad, stream)

    def _mark(self, numbers: list[int], stream: Stream) -> None:
        try:
            self.journal.mark(numbers)
        except OSError as error:
            if not is_full(error):
                raise
            self._disk_is_full(f"{error} (the journal)", stream)

    def _disk_is_full(self, error: str, stream: Stream) -> None:
        self.disk_error = error
        stream.drain()

    def _lost(self, answer: Answer, stream: Stream) -> None:
        """A task that failed as a whole. If it was one block, the block is to blame."""
        error = answer.error
        if isinstance(error, ConnectionError):
            raise error
        if len(answer.numbers) > 1:
            stream.again(answer.numbers)
            return
        block = self.plan.grid.block_at(answer.numbers[0])
        if isinstance(error, KilledWorker):
            text = (
                "every worker that took it died. If it was for memory, write a smaller tile.size or tile.batch, "
                "or more run.memory_per_worker"
            )
        else:
            text = f"{type(error).__name__}: {error}"
        bad = BadBlock(block.number, block.index, block.core, text, str(error), "task")
        self._retry(bad, stream, alone=answer.alone)

    def _retry(self, bad: BadBlock, stream: Stream, *, alone: bool = False) -> None:
        if bad.kind == "disk":
            self._disk_is_full(bad.error, stream)
            return
        tried = self.attempts[bad.number] = self.attempts.get(bad.number, 0) + 1
        # What is refused once is refused again.
        if bad.kind != "input" and tried <= self.plan.job.run.retries:
            self.status.retried += 1
            self.status.event("retry", block=bad.number, error=bad.error)
            stream.again([bad.number], alone=alone)
            return
        self.bad[bad.number] = bad
        self.status.event(
            "bad block", block=bad.number, index=bad.index, error=bad.error, traceback=bad.traceback
        )
        self.status.say(f"block {bad.number} at {bad.region.start}–{bad.region.stop} failed: {bad.error}")

    def _watch(self, stream: Stream) -> None:
        """Between answers: heed signals, sync the journal, tell how far it is."""
        if self.signals.asked and not stream.draining:
            stream.drain()
            self.directory.ask_to_stop()
            self.status.say(f"{self.signals.name}: finishing the blocks in flight, starting no more")
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.journal.sync()
            self.synced = time.monotonic()
        self.status.tell(self.progress("drain" if stream.draining else PHASE))

    def progress(self, phase: str) -> Progress:
        """How far the run is now."""
        return self.status.progress(phase, done=len(self.journal.done), failed=len(self.bad))

    def _conclude(self) -> Outcome:
        progress = self.progress("stop")
        bad = tuple(self.bad[number] for number in sorted(self.bad))
        if bad and self.plan.job.run.on_bad_block == "fail":
            self.status.end("failed", progress, f"{len(bad)} blocks failed")
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
