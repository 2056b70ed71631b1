"""The driver of all kinds of jobs: claim the outputs, take passes through a cluster, report the end."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import DiskRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.scheduler import workers_given
from halotile.graphs.kinds.base import AnyPass, Gather, Inspection, JobOutput, Pass, RankProgram, Records, Sums
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.plan import Plan
from halotile.graphs.rules.arguments import Words, cluster_of_script
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.outcome import Outcome, describe_full_disk, ended_by, failure_of, spread_warning
from halotile.graphs.runs.passes.block_pass import BlockPass
from halotile.graphs.runs.passes.ranks_pass import GatherPass, RanksPass
from halotile.graphs.runs.passes.records import open_records
from halotile.graphs.runs.session import ClusterPass, Session, SharedCluster
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import RunContext, Status
from halotile.graphs.watching.page import with_report
from halotile.graphs.watching.progress import Observer, Progress, progress_shown
from halotile.graphs.watching.report import report_of
from halotile.storage.disk.durable import remove_partials
from halotile.storage.run_directory.directory import PAGE, RunDirectory
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.tasks.block import ONE_BLOCK, BadBlock

if TYPE_CHECKING:
    from distributed import Client


def run(
    plan: Plan,  # result of `make_plan`
    *,
    observer: Observer | None = None,  # called with a `Progress` about twice a second
    # running cluster to use, or one of several runs; by default the cluster of the job is started, and ended
    cluster: RunningCluster | SharedCluster | None = None,
    signals: Signals | None = None,  # signals that are heeded for several runs
) -> Outcome:
    """Run a plan to its end, or resume an interrupted run."""
    directory = RunDirectory(plan.run_directory)
    with Signals() if signals is None else nullcontext(signals) as signals, claim(plan, signals) as outputs:
        context = RunContext(plan, outputs, directory, signals, Status(directory, plan, observer))
        return _Driver(context, cluster).run()


def run_call(job: Job, cluster: str | Words | Client, *, fresh: bool, observer: Observer | None) -> Outcome:
    """Run the job of a call in a script on the workers that its argument describes."""
    job = replace(job, cluster=cluster_of_script(cluster), allow_import=True)
    with progress_shown(observer) as observe:
        return run(make_plan(job, fresh=fresh), observer=observe, cluster=workers_given(cluster))


class _Driver:
    """Takes the passes of one run through a cluster."""

    def __init__(self, context: RunContext, cluster: RunningCluster | SharedCluster | None) -> None:
        self.context = context
        self.cluster = cluster
        self.plan, self.outputs, self.status = context.plan, context.outputs, context.status
        self.bad: dict[str, dict[int, BadBlock]] = {}
        """Blocks of each output that have been given up."""
        self.pace: dict[str, float | None] = {}
        """Duration of a block in the last pass of each phase, in seconds."""
        self.under_way: ClusterPass[Any] | None = None

    def run(self) -> Outcome:
        """Compute the remaining blocks, until every byte of the outputs is as it was written."""
        signals = self.context.signals
        unmarked, removed = self.outputs.unmark_damaged(signals, thorough=False), 0
        if self.outputs.done and self.plan.work.is_outdated(self.context.directory):
            removed = self.outputs.unmark_all()
        earlier = [output.journal.done.copy() for output in self.outputs.held]
        self.status.begin(self.outputs.done)
        self._report_damaged(unmarked)
        if removed:
            self.status.report(
                f"{counted(removed, 'level')} that were added to the image before it changes now are removed"
            )
        for warning in filter(None, (output.journal.warning for output in self.outputs.held)):
            self.status.report(warning)
        try:
            self._finish_passes()
            self._check_earlier(earlier)
            self.outputs.finish(signals)
        except BaseException as error:
            with suppress(OSError):  # a mark that the disk loses repeats a block
                self.outputs.sync()
            state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            self.status.end(state, self._progress("stop"), ended_by(error))
            raise
        self.outputs.sync()
        if not self.plan.work.keeps_state:
            self.context.directory.forget_state()
        return self._conclude()

    def _report_damaged(self, unmarked: int) -> None:
        if unmarked:
            are = "is" if unmarked == 1 else "are"
            self.status.report(f"{counted(unmarked, 'block')} of the earlier run {are} damaged and done again")

    def _check_earlier(self, earlier: Sequence[RangeSet]) -> None:
        """Read every byte of earlier runs, and redo damaged blocks: a run that succeeds has a complete output."""
        if not any(earlier):
            return
        with self.status.ticking(lambda: self._progress("check")):
            damaged = self.outputs.unmark_damaged(self.context.signals, thorough=True, only=earlier)
        if damaged:
            self.status.uncount(damaged)
        self._report_damaged(damaged)
        self._finish_passes()

    def _finish_passes(self) -> None:
        """Take passes through a cluster until no block of an output is left."""
        bad = sum(map(len, self.bad.values()))
        if self.outputs.done + bad == self.plan.blocks:
            return
        with (
            closing(self.plan.work.run(self.status)) as passes,
            Session(self.plan.run, self.plan.cluster, self.status, self.cluster) as session,
        ):
            sums = None
            while (next_pass := next_of(passes, sums)) is not None:
                sums = self._do(next_pass, session)

    def _do(self, next_pass: AnyPass, session: Session) -> Sums:
        if isinstance(next_pass.records, JobOutput):
            assert isinstance(next_pass, Pass)
            return self._write_output(next_pass, next_pass.records, session)
        return self._fill_records(next_pass, next_pass.records, session)

    def _write_output(self, next_pass: Pass, output: JobOutput, session: Session) -> Sums:
        if next_pass.grid != output.grid:
            raise ValueError(f"the task of pass {next_pass.phase} has other blocks than its output")
        journal, *others = (self.outputs.journal_of(each) for each in (output, *next_pass.also))
        for other in others:
            journal.unmark(number for number in list(journal.done) if number not in other.done)
        given_up = self.bad.setdefault(str(output.path), {})
        pace = self.pace.get(next_pass.phase)
        blocks = BlockPass(next_pass, journal, None, self.context, bad=given_up, seconds_per_block=pace, others=others)
        self._through(blocks, session)
        given_up.update(blocks.bad)
        if given_up and self.plan.run.on_bad_block == "fail":
            raise failure_of(self.plan, next_pass.grid, given_up)
        return Sums({}, seconds=blocks.seconds)

    def _fill_records(self, next_pass: AnyPass, records: Records, session: Session) -> Sums:
        grid = next_pass.grid if isinstance(next_pass, Pass) else ONE_BLOCK
        with open_records(records, grid, self.plan.fingerprint) as opened:
            kept = opened.journal, opened.ledger, self.context
            under_way: ClusterPass[Any]
            if isinstance(next_pass, Gather):
                under_way = GatherPass(next_pass, *kept)
            elif isinstance(next_pass, RankProgram):
                under_way = RanksPass(next_pass, *kept)
            else:
                under_way = BlockPass(next_pass, *kept, seconds_per_block=self.pace.get(next_pass.phase))
            self._through(under_way, session)
            if under_way.bad:
                raise failure_of(self.plan, grid, under_way.bad)
            return replace(opened.sums(), seconds=under_way.seconds)

    def _through(self, under_way: ClusterPass[Any], session: Session) -> None:
        next_pass = under_way.wanted
        self.status.pass_begins(next_pass.phase, next_pass.number, under_way.counted)
        self.under_way = under_way
        session.compute(under_way)
        if isinstance(under_way, BlockPass):
            self.pace[next_pass.phase] = under_way.seconds_per_block
        if under_way.disk_error:
            records = next_pass.records
            written = records.path if isinstance(records, JobOutput) else records.folder
            place = written if isinstance(written, Path) else self.context.directory.path
            raise DiskRefused(describe_full_disk(self.plan, under_way.disk_error, self.outputs.done, place))
        if under_way.untidy:
            for output in self.plan.outputs:
                remove_partials(output.path)
            if self.context.directory.state_path.is_dir():
                remove_partials(self.context.directory.state_path)

    def _progress(self, phase: str) -> Progress:
        if self.under_way is None:
            return self.status.progress(phase, done=self.outputs.done, failed=0)
        return self.under_way.progress(phase)

    def _conclude(self) -> Outcome:
        bad = tuple(block for blocks in self.bad.values() for _, block in sorted(blocks.items()))
        self.status.all_passes_are_over()
        inspection = self._inspect() if not bad else Inspection()
        progress = self.status.progress("stop", done=self.outputs.done, failed=len(bad))
        with suppress(Exception):  # the page does without
            page = (self.context.directory.path / PAGE).read_text("utf-8")
            self.context.directory.write_page(with_report(page, report_of(self.plan, inspection, progress)))
        self.status.end("finished", progress, "")
        found = {"quarantined": bad, "inspection": inspection, "retired": tuple(self.status.retired.values())}
        return Outcome.of(self.plan, progress, **found)

    def _inspect(self) -> Inspection:
        """Look at the result; a run that has finished does not fail because of that."""
        try:
            run = self._progress("stop")
            speed = run.compute_seconds / run.pixels_done if run.pixels_done else math.inf
            inspection = self.plan.work.inspect(run.seconds, speed)
        except Exception as error:
            self.status.event("not inspected", error=f"{type(error).__name__}: {error}")
            return Inspection()
        spread = spread_warning(self.status.not_finite, self.status.spoiled)
        inspection = replace(inspection, warnings=[*inspection.warnings, *spread])
        self.status.event("inspected", **inspection.figures)
        for warning in inspection.warnings:
            self.status.report(f"warning: {warning}")
        return inspection


def next_of(passes: Generator[AnyPass, Sums, None], sums: Sums | None) -> AnyPass | None:
    """Return the next pass of a job, after sending it the sums of the pass before; None after the last."""
    try:
        return passes.send(sums) if sums is not None else next(passes)
    except StopIteration:
        return None
