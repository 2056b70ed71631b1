"""The driver of all kinds of jobs: claim the outputs, take passes through a cluster, report the end; for one image, or for many on one cluster."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import BlockFailed, BlockInputFailed, ClusterFailed, DiskRefused, HalotileError, Stalled, Stopped
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.scheduler import workers_given
from halotile.graphs.kinds.base import AnyPass, Gather, Inspection, JobOutput, Pass, RankProgram, Records, Sums
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.plan import Plan, check_inodes, existing_parent, make_plan
from halotile.graphs.rules.arguments import Words, cluster_of_script
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.passes.cluster_passes import BlockPass, GatherPass, RanksPass
from halotile.graphs.runs.records import open_records
from halotile.graphs.runs.session import ClusterPass, Session, SharedCluster
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import STATUS_SECONDS, Counts, RunContext, Status, status_of
from halotile.graphs.watching.page import with_report
from halotile.graphs.watching.progress import Observer, Progress, progress_shown
from halotile.graphs.watching.report import as_html, report_of
from halotile.graphs.words import IMAGE, bytes_text, counted, faulty_input, first_line
from halotile.storage.disk.durable import remove_partials
from halotile.storage.disk.object_path import full_path
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import PAGE, RunDirectory
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.stored_array import closing_files
from halotile.tasks.block import ONE_BLOCK, BadBlock

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True, kw_only=True)
class Outcome(Progress):
    """The end of a run, with its last progress: every block is done, or quarantined by name."""

    output: str
    run_directory: str
    quarantined: tuple[BadBlock, ...] = ()
    inspection: Inspection = field(default_factory=Inspection)  # figures of the result
    retired: tuple[str, ...] = ()  # workers that were given no more blocks, with host and reason

    @classmethod
    def from_progress(cls, plan: Plan, progress: Progress, **found: Any) -> Outcome:
        """Return the outcome of a plan with this final progress."""
        last = {each.name: getattr(progress, each.name) for each in fields(progress)}
        return cls(**last, output=str(plan.output), run_directory=str(plan.run_directory), **found)

    def _repr_html_(self) -> str:
        counts = ("done", f"{self.done:,} of {counted(self.total, self.counted)}")
        return as_html([("output", self.output), counts, *self.inspection.rows], self.inspection.places[:1])


def spread_warning(read: int, written: int) -> list[str]:
    """Warn where blocks have more pixels without a value than their input.

    >>> spread_warning(1, 25)[0].partition(", ")[0], spread_warning(3, 3)
    ('the blocks of this run have 25 pixels of NaN or infinity where their input has 1', [])
    """
    if written <= read:
        return []
    return [
        f"the blocks of this run have {counted(written, 'pixel')} of NaN or infinity where their input has {read:,}, because input.nodata: none "
        "takes them for measurements. Leave nodata out, or write nodata: nan: then they stay as they are, and spoil no other pixel"
    ]


def ended_by(error: BaseException) -> str:
    """Describe the error that ended a run, by its message or, where it has none, by its name."""
    return str(error) or ("stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__)


def describe_full_disk(plan: Plan, error: str, done: int, place: Path) -> str:
    """Describe the effect of a disk that is full at a place, and the space that the remaining blocks need."""
    remaining_bytes = plan.output_bytes * (plan.blocks - done) / plan.blocks
    free = shutil.disk_usage(place).free
    return (
        f"the disk ran full: {error}. {done:,} of {counted(plan.blocks, 'block')} are safe; "
        f"the others take up to {bytes_text(remaining_bytes)}, and {place} has {bytes_text(free)} free. "
        "Free some space and run again."
    )


def failure_of(plan: Plan, grid: Grid, failed: Mapping[int, BadBlock]) -> BlockFailed:
    """Return the error for blocks of a pass that failed."""
    bad = tuple(block for _, block in sorted(failed.items()))
    kind = BlockInputFailed if all(b.kind in ("input", "damaged") for b in bad) else BlockFailed
    return kind(describe_bad_blocks(plan, grid, bad))


def describe_bad_blocks(plan: Plan, grid: Grid, bad: tuple[BadBlock, ...]) -> str:
    """Describe blocks that failed, the first few by name."""
    faulty = faulty_input(b.error for b in bad)
    listed = 5 if faulty == IMAGE else 1  # a side input is at fault in every block alike
    lines = [
        f"block {b.number} (index {b.index}, region {b.region.start}–{b.region.stop}): {first_line(b.error)}"
        for b in bad[:listed]
    ]
    like = "" if faulty == IMAGE else f" for {faulty}"
    unlisted = [f"and {len(bad) - listed:,} more{like}"] if len(bad) > listed else []
    refused = all(b.kind == "input" for b in bad)
    retries = plan.run.retries
    its = "its" if len(bad) == 1 else "their"
    why = f"for {its} input" if refused else f"after {counted(retries, 'retry')}"
    rest_text = "; the others are done" if len(bad) < len(grid) else ""
    return "\n".join(
        [
            f"{len(bad):,} of {counted(len(grid), 'block')} failed {why}{rest_text}.",
            *lines,
            *unlisted,
            f"Tracebacks are in {plan.run_directory / 'events.jsonl'}. {_remedy(plan, bad)}",
        ]
    )


def _remedy(plan: Plan, bad: tuple[BadBlock, ...]) -> str:
    """Return advice about blocks that failed: it may not change the input and the code, which define the job."""
    if not plan.kind.inputs:
        return "Fix the cause and run again. If the fix changed a file that the job reads, or your code, run with --fresh to start over."
    if not all(b.kind in ("input", "damaged") for b in bad):
        return (
            "Fix the cause and run again: only these blocks are recomputed. After a change to the image or to your code, run with "
            "--fresh to start over. Changed options make another job, which needs output.overwrite: true as well."
        )
    may_stay = any("run.on_nan: propagate" in b.error for b in bad)
    redo = "Run again with run.on_nan: propagate to do only these. " if may_stay else ""
    faulty = faulty_input(b.error for b in bad)
    return f"{redo}Once {faulty} is repaired, run with --same-input: only these are redone."


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
                f"removed {counted(removed, 'level')} that `recon-cli levels` had added, because the image changes"
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
        next_pass = under_way.job_pass
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
            digests = [output.journal.image_digest(0).hex() for output in self.outputs.held]
            page = (self.context.directory.path / PAGE).read_text("utf-8")
            self.context.directory.write_page(with_report(page, report_of(self.plan, inspection, progress, digests)))
        self.status.end("finished", progress, "")
        found = {"quarantined": bad, "inspection": inspection, "retired": tuple(self.status.retired.values())}
        return Outcome.from_progress(self.plan, progress, **found)

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


AHEAD = 100  # images that are planned before any is run, at most
MOST_NAMED = 20  # images that failed, at most, which a status names
_OF_ALL = (DiskRefused, ClusterFailed, Stalled, Stopped)  # errors that the next image would meet as well


_SUMMED = (
    "done", "resumed", "pixels_done", "seconds", "read_bytes", "written_bytes", "compute_seconds", "retried", "failed", "holes", "defects",
)  # fmt: skip
_OF_THE_CLUSTER = ("cluster: ", "dashboard: ")  # beginnings of messages that are the same for every image
_LARGEST = ("peak_memory_bytes", "device_peak_bytes", "start_seconds")


@dataclass(frozen=True)
class ManyPlans:
    """The plans of the images by their paths, and the errors of those that cannot be planned; of very many, of some that are spread evenly."""

    plans: Mapping[str, Plan]
    failed: Mapping[str, HalotileError]
    later: Mapping[str, Job] = field(default_factory=dict)  # jobs of the images that are planned when their turn comes
    make_plan: Callable[[Job], Plan] | None = None

    @property
    def paths(self) -> list[str]:
        """The images that are run, in the order of their paths."""
        return sorted([*self.plans, *self.later])

    @property
    def ratio(self) -> float:
        """Number of images for each one that is planned."""
        return 1 + len(self.later) / len(self.plans)

    def plan_of(self, path: str) -> Plan:
        """The plan of an image, made now if it was not made before."""
        if (plan := self.plans.get(path)) is None:
            assert self.make_plan is not None
            plan = self.make_plan(self.later[path])
        return plan

    def check_disk(self) -> None:
        """Refuse outputs that together need more disk than there is."""
        disks: dict[int, list[Plan]] = {}
        for plan in self.plans.values():
            if not plan.resumes:
                disks.setdefault(os.stat(existing_parent(plan.run_directory)).st_dev, []).append(plan)
        for plans in disks.values():
            folder = existing_parent(plans[0].run_directory)
            needed = round(self.ratio * sum(plan.disk_bytes for plan in plans))
            free = shutil.disk_usage(folder).free
            check_inodes(round(self.ratio * sum(plan.inodes for plan in plans)), folder)
            if needed > free:
                raise DiskRefused(
                    f"the outputs of {counted(round(self.ratio * len(plans)), 'image')} take up to {bytes_text(needed)}, and {folder} has {bytes_text(free)} free. "
                    "Write output.path on a larger disk, or a pattern of fewer images."
                )

    @property
    def new_folders(self) -> list[Path]:
        """Folders of the outputs that are missing, and made before the run."""
        places = [
            *(plan.output for plan in self.plans.values()),
            *(full_path(job.place) for job in self.later.values()),
        ]
        folders = {place.parent for place in places if isinstance(place, Path)}
        return sorted(folder for folder in folders if not folder.is_dir())


@dataclass(frozen=True)
class ManyOutcomes:
    """The outcomes of the images by their paths, and the errors of those that failed."""

    outcomes: Mapping[str, Outcome]
    failed: Mapping[str, HalotileError]


def plan_many(jobs: Mapping[str, Job], make_plan: Callable[[Job], Plan]) -> ManyPlans:
    """Plan the job of each image; of more than :data:`AHEAD`, of that many."""
    plans, failed, paths = {}, {}, list(jobs)
    for path in paths if len(paths) <= AHEAD else [paths[n * len(paths) // AHEAD] for n in range(AHEAD)]:
        try:
            with closing_files():
                plans[path] = make_plan(jobs[path])
        except HalotileError as error:
            failed[path] = error
    if not plans:
        raise next(iter(failed.values()))
    later = {path: job for path, job in jobs.items() if path not in plans and path not in failed}
    return ManyPlans(plans, failed, later, make_plan)


def run_many(
    many: ManyPlans,
    *,
    observer: Observer | None = None,  # called with the progress of all of them together
    # returns the message at the beginning of an image
    introduce: Callable[[str, Plan], str] = lambda path, _: path,
    directory: RunDirectory | None = None,  # keeps the status of all of them together
) -> ManyOutcomes:
    """Run the plans one after the other; an image that fails does not keep the others from being finished."""
    outcomes, failed = {}, dict(many.failed)
    together = _Together(many, observer, directory)
    for folder in many.new_folders:
        folder.mkdir(exist_ok=True)
    with Signals() as signals, SharedCluster(max(plan.run.count for plan in many.plans.values())) as cluster:
        for path in many.paths:
            if signals.requested:  # by a signal that came when the image before had no block left
                stopped = f"stopped on {signals.name} before {path}. Run again to go on."
                together.record("stopped", stopped)
                raise Stopped(stopped, signals.name)
            together.left -= 1
            try:
                with closing_files():
                    plan = many.plan_of(path)
                    together.begin(path, plan, introduce(path, plan))
                    outcome = run(plan, observer=together, cluster=cluster, signals=signals)
                # The images of thousands would fill the memory; the page of each has them.
                outcomes[path] = replace(outcome, inspection=replace(outcome.inspection, places=()))
            except _OF_ALL as error:
                together.record("stopped" if isinstance(error, Stopped) else "failed", str(error))
                raise
            except HalotileError as error:
                failed[path] = error
            together.end()
    together.failed = {
        path: first_line(str(error).removeprefix(f"{path}: ")) for path, error in list(failed.items())[:MOST_NAMED]
    }
    named = f"{counted(len(failed), 'image')}: {', '.join(together.failed)}" if failed else ""
    together.record("failed" if failed else "finished", named)
    return ManyOutcomes(outcomes, failed)


class _Together:
    """Adds the progress of an image to that of the images before it: one start, one end, and its cluster reported once."""

    def __init__(self, many: ManyPlans, observer: Observer | None, directory: RunDirectory | None) -> None:
        self.observer = observer
        self.directory = self.of_image = directory
        self.written = 0.0
        self.failed: Mapping[str, str] = {}
        counts = Counts([phase for plan in many.plans.values() for phase in plan.work.passes])
        self.total, self.pixels = round(many.ratio * counts.total), round(many.ratio * counts.pixels)
        self.later = set(many.later)
        self.usual = counts.total // len(many.plans), counts.pixels // len(many.plans)
        """Blocks and pixels that an image is taken to have before it is planned."""
        self.left = len(many.paths)
        self.before = self.now = Progress("start", 0, 0, self.total, 0, self.pixels, 0.0)
        self.lines: list[str] = []
        """Lines that the observer has not been given yet."""
        self.seen: set[str] = set()
        self.warning = "warning: "

    def begin(self, path: str, plan: Plan, line: str) -> None:
        """Begin an image with a line, which goes with its first progress; warnings have the name of the image."""
        if path in self.later:
            counts = Counts(plan.work.passes)
            self.total += counts.total - self.usual[0]
            self.pixels += counts.pixels - self.usual[1]
        self.of_image = RunDirectory(plan.run_directory)
        self.lines = [line]
        self.warning = f"warning: {Path(path).name}: "

    def end(self) -> None:
        """Keep what the image has added."""
        self.before = self.now

    def record(self, state: str, reason: str = "") -> None:
        """Write the status of all images, with what that of the current one says of its workers."""
        if self.directory is None:
            return
        self.written = time.monotonic()
        theirs = (self.of_image and self.of_image.read_status()) or {}
        status = status_of(self.now, state, reason, output=str(self.directory.output))
        with suppress(OSError):  # the journals count
            self.directory.write_status(
                status
                | {"failed_images": self.failed}
                | {key: theirs[key] for key in ("dashboard", "retired") if key in theirs}
            )

    def __call__(self, progress: Progress) -> None:
        """Pass the progress on, with that of the images before."""
        lines = [line for line in progress.message.splitlines() if line not in self.seen]
        self.seen.update(line for line in lines if line.startswith(_OF_THE_CLUSTER))
        lines = [re.sub("^warning: ", lambda _: self.warning, line) for line in lines]
        message, self.lines = "\n".join([*self.lines, *lines]), []
        has_begun, is_last = self.before.seconds > 0, self.left == 0
        is_between = (progress.phase == "start" and has_begun) or (progress.phase == "stop" and not is_last)
        values = {name: getattr(self.before, name) + getattr(progress, name) for name in _SUMMED}
        values |= {name: max(getattr(self.before, name), getattr(progress, name)) for name in _LARGEST}
        phase = self.now.phase if is_between else progress.phase
        self.now = replace(progress, phase=phase, total=self.total, pixels_total=self.pixels, message="", **values)
        if time.monotonic() - self.written >= STATUS_SECONDS:
            self.record("draining" if progress.phase == "drain" else "running")
        if self.observer is not None:
            self.observer(replace(self.now, message=message))
