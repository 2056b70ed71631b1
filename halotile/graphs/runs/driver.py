"""The one driver of all kinds of jobs: outputs claimed, passes taken through a cluster, the end reported."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from halotile.errors import DiskRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.jobs.base import Books, Gather, OutputArray, Pass, Sums
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.block_pass import BlockPass
from halotile.graphs.runs.books import open_books
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.context import RunContext
from halotile.graphs.runs.gather_pass import ONE_BLOCK, GatherPass
from halotile.graphs.runs.outcome import Outcome, describe_full_disk, ended_by, failure_of
from halotile.graphs.runs.progress import Observer, Progress
from halotile.graphs.runs.session import ClusterPass, Session
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import Status
from halotile.storage.disk.durable import remove_partials
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.tasks.block import BadBlock


def run(plan: Plan, *, observer: Observer | None = None, cluster: Cluster | None = None) -> Outcome:
    """Run a plan to its end, or go on with one that was interrupted.

    Parameters
    ----------
    plan : Plan
        From :func:`halotile.graphs.plans.make.make_plan`.
    observer : callable, optional
        Called with a :class:`Progress` about twice a second.
    cluster : Cluster, optional
        A running cluster to use; by default the one the job names is started, and ended.

    Raises
    ------
    OutputRefused, ResumeRefused
        When an output is not this job's to write, another run is writing it, or it was moved or removed meanwhile.
    InputError
        When what is read was changed meanwhile.
    Diverged
        When a solver's numbers grow without bound.
    BlockFailed
        When blocks failed after their retries and ``run.on_bad_block`` is ``fail``. All others of that pass are done.
    DiskRefused
        When the disk is full. What is done stays done.
    Stopped
        When SIGTERM or SIGUSR1 asked the run to drain.
    """
    directory = RunDirectory(plan.run_directory)
    with Signals() as signals, claim(plan, signals) as held:
        context = RunContext(plan, held, directory, signals, Status(directory, plan, observer))
        return _Driver(context, cluster).run()


@dataclass(frozen=True)
class _Place:
    """The run as the generator of passes sees it."""

    directory: RunDirectory
    fingerprint: str
    status: Status

    def report(self, line: str) -> None:
        """Report a line."""
        self.status.report(line)

    def report_row(self, rows: Sequence[Mapping[str, float]], total: int) -> None:
        """Report the figures of all iterations so far."""
        self.status.report_row(rows, total)


class _Driver:
    """Takes the passes of one run through a cluster."""

    def __init__(self, context: RunContext, cluster: Cluster | None) -> None:
        self.context = context
        self.cluster = cluster
        self.plan, self.held, self.status = context.plan, context.held, context.status
        self.bad: dict[str, dict[int, BadBlock]] = {}
        """Blocks of each output that are given up."""
        self.pace: dict[str, float | None] = {}
        """Duration of a block in the last pass of each phase, in seconds."""
        self.under_way: ClusterPass | None = None

    def run(self) -> Outcome:
        """Do what is left, until every byte of the outputs is as it was written."""
        signals = self.context.signals
        struck = self.held.strike_damaged(signals, thorough=False)
        if self.held.done and self.plan.work.is_outdated(self.context.directory):
            self.held.strike_all()
        earlier = [each.journal.done.copy() for each in self.held.held]
        self.status.begin(self.held.done)
        self._report_struck(struck)
        for warning in filter(None, (each.journal.warning for each in self.held.held)):
            self.status.report(warning)
        try:
            self._finish_passes()
            self._check_earlier(earlier)
            self.held.finish(signals)
        except BaseException as error:
            with suppress(OSError):  # a mark that is lost with the disk repeats a block
                self.held.sync()
            state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            self.status.end(state, self._progress("stop"), ended_by(error))
            raise
        self.held.sync()
        if not self.plan.work.keeps_state:
            self.context.directory.forget_state()
        return self._conclude()

    def _report_struck(self, struck: int) -> None:
        if struck:
            are = "is" if struck == 1 else "are"
            self.status.report(f"{counted(struck, 'block')} of the earlier run {are} damaged and done again")

    def _check_earlier(self, earlier: Sequence[RangeSet]) -> None:
        """Read every byte that earlier runs wrote, and do again what is damaged: a run that ends well made a whole output."""
        if not any(earlier):
            return
        with self.status.ticking(lambda: self._progress("check")):
            damaged = self.held.strike_damaged(self.context.signals, thorough=True, only=earlier)
        self._report_struck(damaged)
        self._finish_passes()

    def _finish_passes(self) -> None:
        """Take passes through a cluster until no block of an output is left."""
        bad = sum(map(len, self.bad.values()))
        if self.held.done + bad == self.plan.blocks:
            return
        place = _Place(self.context.directory, self.plan.fingerprint, self.status)
        with (
            closing(self.plan.work.run(place)) as passes,
            Session(self.plan.run, self.plan.cluster, self.status, self.cluster) as session,
        ):
            sums = None
            while (wanted := _next_of(passes, sums)) is not None:
                sums = self._do(wanted, session)

    def _do(self, wanted: Pass | Gather, session: Session) -> Sums:
        if isinstance(wanted.books, OutputArray):
            assert isinstance(wanted, Pass)
            return self._write_output(wanted, wanted.books, session)
        return self._fill_books(wanted, wanted.books, session)

    def _write_output(self, wanted: Pass, output: OutputArray, session: Session) -> Sums:
        journal = self.held.journal_of(output)
        given_up = self.bad.setdefault(str(output.path), {})
        blocks = BlockPass(
            wanted, journal, self.context, bad=given_up, seconds_per_block=self.pace.get(wanted.phase)
        )
        self._through(wanted, blocks, len(journal.done), session)
        given_up.update(blocks.bad)
        if given_up and self.plan.run.on_bad_block == "fail":
            raise failure_of(self.plan, wanted.grid, given_up)
        return Sums({})

    def _fill_books(self, wanted: Pass | Gather, books: Books, session: Session) -> Sums:
        grid = wanted.grid if isinstance(wanted, Pass) else ONE_BLOCK
        with open_books(books, grid, self.plan.fingerprint) as opened:
            if isinstance(wanted, Gather):
                gathering = GatherPass(wanted, opened.journal, opened.ledger, self.context)
                self._through(wanted, gathering, 0, session)
                return opened.sums()
            blocks = BlockPass(
                wanted,
                opened.journal,
                self.context,
                ledger=opened.ledger,
                seconds_per_block=self.pace.get(wanted.phase),
            )
            self._through(wanted, blocks, len(opened.journal.done), session)
            if blocks.bad:
                raise failure_of(self.plan, grid, blocks.bad)
            return opened.sums()

    def _through(
        self, wanted: Pass | Gather, work: BlockPass | GatherPass, done: int, session: Session
    ) -> None:
        self.status.pass_begins(wanted.phase, wanted.number, done)
        self.under_way = work
        session.through(work)
        if isinstance(work, BlockPass):
            self.pace[wanted.phase] = work.seconds_per_block
        if work.disk_error:
            raise DiskRefused(describe_full_disk(self.plan, work.disk_error, self.held.done))
        if work.untidy:
            for output in self.plan.outputs:
                remove_partials(output.path)
            if self.context.directory.state_path.is_dir():
                remove_partials(self.context.directory.state_path)

    def _progress(self, phase: str) -> Progress:
        if self.under_way is None:
            return self.status.progress(phase, done=self.held.done, failed=0)
        return self.under_way.progress(phase)

    def _conclude(self) -> Outcome:
        bad = tuple(block for blocks in self.bad.values() for _, block in sorted(blocks.items()))
        self.status.all_passes_are_over()
        progress = self.status.progress("stop", done=self.held.done, failed=len(bad))
        self.status.end("finished", progress, "")
        return Outcome.of(self.plan, progress, bad)


def _next_of(passes: Generator[Pass | Gather, Sums, None], sums: Sums | None) -> Pass | Gather | None:
    """Return the next pass of a job, which receives the sums of the one before; None after the last."""
    try:
        return passes.send(sums) if sums is not None else next(passes)
    except StopIteration:
        return None
