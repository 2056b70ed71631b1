"""Claim of an output: exclusive, with the right journal, and without touching files of any other job.

An output is requested by a plan, claimed by a run directory (or by a claim in a store), locked by a driver, and held until the run ends.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import HalotileError, OutputInUse, OutputRefused, ResumeRefused, Stopped
from halotile.graphs.clusters.common.cluster_kind import check_startable
from halotile.graphs.kinds.base import JobOutput
from halotile.graphs.plans.identity import differences_of_runs, identity_words, may_be_same
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.held_output import HeldFolder, HeldOutput, HeldOutputs, repair_command
from halotile.graphs.runs.records import RecordedImage, output_grid, written_of
from halotile.graphs.runs.signals import Signals
from halotile.graphs.waiting import log_line, patience_seconds, report_if_slow
from halotile.graphs.words import counted
from halotile.storage.disk.durable import refusing_full, remove_partials
from halotile.storage.disk.object_path import ObjectPath, OutputPath, lies_in, path_of
from halotile.storage.disk.place import check_path, check_place, refusing_silence
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import LOCK_SECONDS, BatchFiles, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.run_directory.object_claim import ObjectClaim
from halotile.storage.sharded.output import AnyLayout, FileLayout, create_output, open_output
from halotile.storage.sharded.ownership import REPLACE, find_foreign_entry, foreign_pixels_reason, restore_metadata

# Parts of every job that do not affect its result.
EXECUTION_KEYS = ("version", "run", "cluster", "allow_import", "import_folder")
ORPHAN_SECONDS = 60.0  # time that workers of a killed driver have to end before a new driver may write


@dataclass(frozen=True)
class RequestedOutput:
    """One output that a plan wants to write, with the run directory beside it.

    The directory of the first output keeps the run; those of others keep their journals, and point to it.
    """

    plan: Plan
    output: JobOutput
    directory: RunDirectory
    first: RunDirectory

    @property
    def path(self) -> OutputPath:
        return self.output.path

    @property
    def blocks(self) -> Grid:
        """Blocks of the run as they are in the output."""
        grid = self.output.grid
        return output_grid(self.output.layout, grid.shape, grid.block)

    @property
    def folder(self) -> Path:
        """Folder of an output on a disk: of its files, or of its one file."""
        path = Path(str(self.path))
        return path.parent if self.is_file else path

    @property
    def is_file(self) -> bool:
        return isinstance(self.output.layout, FileLayout)

    @property
    def is_first(self) -> bool:
        """True for the output that the run directory belongs to."""
        return self.directory == self.first

    @property
    def is_of_this_run(self) -> bool:
        """True unless the directory keeps, or belongs to, another run."""
        primary = self.directory.read_primary()
        return primary == str(self.first.path) or (self.is_first and primary is None)

    @property
    def claim(self) -> ObjectClaim | None:
        """The claim of an output in a store; None on a disk, where the run directory is beside it."""
        return ObjectClaim(self.path, self.directory) if isinstance(self.path, ObjectPath) else None

    @property
    def may_replace_claim(self) -> bool:
        """True where an output that another run directory has claimed may be replaced."""
        return self.plan.fresh and self.output.overwrite

    @property
    def fingerprint(self) -> str:
        """Fingerprint that owns the journal."""
        return journal_fingerprint(self.plan.fingerprint, self.plan.outputs.index(self.output))


def journal_fingerprint(fingerprint: str, place: int) -> str:
    """Return the fingerprint that owns the journal of an output, by its place among those of a plan."""
    return f"{fingerprint}-{place}" if place else fingerprint


def requested_outputs(plan: Plan) -> tuple[RequestedOutput, ...]:
    first = RunDirectory(plan.run_directory)
    return tuple(RequestedOutput(plan, output, RunDirectory.beside(output.path), first) for output in plan.outputs)


@refusing_silence()
def check_outputs(plan: Plan) -> None:
    """Refuse outputs that this job may not create or replace, and those that contain files that the job reads."""
    read = [*plan.files, *(path_of(source.path) for source in plan.sources)]
    for requested in requested_outputs(plan):
        if requested.claim:
            requested.claim.check(may_replace=requested.may_replace_claim)
        if requested.directory.claims_output() and requested.is_of_this_run and not plan.fresh:
            check_path(str(requested.path), requested.output.key)
        else:
            check_replaceable(requested)
        if file := next((file for file in read if lies_in(file.resolve(), requested.path.resolve())), None):
            raise OutputRefused(
                f"{requested.output.key} is {requested.path}: the job reads {file} there. Write another path."
            )


def check_replaceable(requested: RequestedOutput) -> None:
    """Refuse a place where no output can be made, and to discard a result or data of other jobs without permission."""
    output, is_claimed = requested.output, requested.directory.claims_output()
    is_own = is_claimed and _is_own(requested)
    stranger = find_foreign_entry(requested.path, _existing_layout(requested)) if is_own else ""
    check_place(
        str(requested.path),
        overwrite=is_claimed or output.overwrite,
        key=output.key,
        remedy=requested.plan.kind.to_replace,
        may_lack_metadata=is_own and not stranger,
        is_file=requested.is_file,
    )
    if output.overwrite or not is_claimed:
        return
    if stranger:
        raise OutputRefused(
            f"{output.key} is {requested.path}: {stranger}. --fresh discards only what a run of the same job wrote. Move it away, or "
            f"write {requested.plan.kind.to_replace} to remove all that is there."
        )
    keeps_run = requested.first.plan_path.exists() or requested.directory.plan_path.exists()
    if not is_own and (keeps_run or requested.path.exists()):
        raise OutputRefused(
            f"{output.key} is {requested.path}: it belongs to another job (run directory {requested.directory.path}). --fresh discards only what a run of "
            "the same job did (the same input, denoiser or operators, and output). Write another path, or "
            f"{requested.plan.kind.to_replace} to replace it."
        )


def _existing_layout(requested: RequestedOutput) -> AnyLayout:
    """Return the layout that the run there wrote, whose sizes may have been decided differently."""
    if written := _existing_output(requested):
        return written[0]
    layout = requested.output.layout
    if isinstance(layout, FileLayout):
        return layout
    with suppress(HalotileError):  # a run that was interrupted while it started over has lost its plan
        existing = open_output(requested.path)
        if (existing.shape, existing.dtype, existing.ome) == (layout.shape, layout.dtype, layout.ome):
            return existing
    return layout


def _existing_output(requested: RequestedOutput) -> tuple[AnyLayout, Grid] | None:
    """Return layout and blocks of an output from the run directory; None where it does not have them."""
    stored_plan, number = requested.first.read_valid_plan(), requested.plan.outputs.index(requested.output)
    written = written_of(stored_plan) if stored_plan else []
    return written[number] if number < len(written) else None


def check_pixels(requested: RequestedOutput) -> None:
    """Refuse to discard another result that replaced the run's own."""
    stored_plan, written = requested.first.read_valid_plan(), _existing_output(requested)
    if requested.output.overwrite or stored_plan is None or written is None:
        return
    layout, grid = written
    problems, done = dict[int, list[str]](), RangeSet()
    owner = journal_fingerprint(stored_plan["fingerprint"], requested.plan.outputs.index(requested.output))
    with suppress(HalotileError, FileNotFoundError):  # without a journal the owner is unknown
        journal = Journal.open(requested.directory.journal_path, owner, len(grid), read_only=True)
        done = journal.done
        problems = RecordedImage(requested.path, layout, grid, journal).damaged()
    difference = foreign_pixels_reason(problems, len(done))
    if requested.is_file and not done and requested.path.exists() and Path(str(requested.path)).stat().st_size:
        difference = "the run has not written it yet"
    if difference:
        raise OutputRefused(f"{requested.path} is not what the run wrote there: {difference}. {REPLACE}")


def _is_own(requested: RequestedOutput) -> bool:
    """Return True where the run there had the same job as this one, apart from how it is computed."""
    plan = requested.plan
    if not requested.is_of_this_run:
        return False
    if (stored_job := requested.first.read_valid_job()) is None:
        return (requested.first.read_valid_plan() or {}).get("fingerprint") == plan.fingerprint
    return _result_of(plan, stored_job) == _result_of(plan, plan.documents.asked)


def _result_of(plan: Plan, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job that define its result, as JSON has them."""
    left_out = {*EXECUTION_KEYS, *plan.kind.execution_keys}
    parts = {key: value for key, value in job.items() if key not in left_out}
    if isinstance(output := parts.get("output"), Mapping):
        parts["output"] = {key: value for key, value in output.items() if key != "overwrite"}
    essentials: dict[str, Any] = json.loads(json.dumps(plan.kind.essentials(parts)))
    return essentials


def to_start_over(plan: Plan) -> str:
    """Return the option with which a run starts over."""
    own = any(output.overwrite for output in plan.outputs) or _is_own(requested_outputs(plan)[0])
    return "--fresh" if own else f"--fresh and {plan.kind.to_replace}"


@contextmanager
def claim(plan: Plan, signals: Signals | None = None) -> Iterator[HeldOutputs]:
    """Hold the outputs of a plan, with the journals of the blocks that are done, for the duration of the context.

    ``plan``: outputs to claim; ``signals``: signals that end the wait for an output early; by default none.
    """
    signals = signals or Signals()
    outputs = requested_outputs(plan)
    # Before the lock, so that nothing is created beside an output that is refused, or for a cluster that
    # cannot start.
    check_outputs(plan)
    first = outputs[0].directory
    if not first.claims_output():
        check_startable(plan.cluster)
    with ExitStack() as stack:
        with refusing_full("no block was computed", f"Free some space near {plan.output} and run again."):
            # In one order, whatever that of the job: two runs of the same outputs do not wait for each other.
            for requested in sorted(outputs, key=lambda requested: requested.directory.path):
                with _wait_for(f"waiting for whoever holds {requested.directory.path}", signals) as cut_short:
                    stack.enter_context(requested.directory.lock(patience_seconds(LOCK_SECONDS), cut_short))
            # Workers of these runs may still write one of the outputs.
            runs = {run.path for requested in outputs for run in (requested.directory, requested.directory.of_run())}
            for path in sorted(filter(Path.is_dir, runs)):
                operation = f"waiting for the workers of an earlier run in {path}"
                with _wait_for(operation, signals) as cut_short:
                    WorkerLock(path).wait_for_all(patience_seconds(ORPHAN_SECONDS), cut_short)
            for requested in outputs:
                if requested.claim:
                    requested.claim.take(may_replace=requested.may_replace_claim)
            opened = []
            for requested, journal in zip(outputs, _open(outputs), strict=True):
                stack.enter_context(journal)
                hold = requested.claim or stack.enter_context(HeldFolder.opened(requested.folder))
                opened.append(HeldOutput(requested.path, requested.output.layout, requested.blocks, journal, hold))
                if requested.claim and len(journal.done) < journal.total:
                    requested.claim.mark(is_finished=False)
        yield HeldOutputs(plan, tuple(opened))


@contextmanager
def _wait_for(operation: str, signals: Signals) -> Iterator[Callable[[], bool]]:
    """Report a slow wait; the context yields a function that returns True once a signal has ended the wait."""
    try:
        with report_if_slow(log_line, operation):
            yield lambda: signals.requested
    except OutputInUse as held:
        if not signals.requested:
            raise
        raise Stopped(f"stopped on {signals.name} while it waited: {held}", signals.name) from held


@refusing_silence()
def count_done(plan: Plan) -> int:
    """Return the number of blocks of this plan that an earlier run has done; nothing is changed."""
    check_outputs(plan)
    outputs = requested_outputs(plan)
    for requested in outputs:
        requested.directory.check_place()
        requested.directory.check_free()
    return _done_before(outputs) or 0


@refusing_silence()
def _open(outputs: tuple[RequestedOutput, ...]) -> list[Journal]:
    first = outputs[0].directory
    first.clear_stop()
    BatchFiles(first).clear_end()
    if _done_before(outputs) is not None:
        for requested in outputs:
            remove_partials(requested.path)
        _restore(outputs[0].plan, first)
    else:
        _start_over(outputs)
    return [_journal_of(requested) for requested in outputs]


def _journal_of(requested: RequestedOutput) -> Journal:
    path, owner, total = requested.directory.journal_path, requested.fingerprint, len(requested.output.grid)
    if requested.plan.kind.revision and not Journal.open_any(path).done:  # its job may have been changed
        Journal.create(path, owner, total).close()
    return Journal.open(path, owner, total)


def _done_before(outputs: tuple[RequestedOutput, ...]) -> int | None:
    """Return the number of blocks done where the directories hold this very job, with its outputs as they were left."""
    plan, first = outputs[0].plan, outputs[0].directory
    if plan.fresh:
        return None
    previous = first.read_valid_plan()
    if previous is not None:
        check_same_job(plan, previous)
    paths = [requested.directory.journal_path for requested in outputs]
    journals = [Journal.open_any(path) for path in paths if path.exists()]
    done = sum(len(journal.done) for journal in journals)
    if len(journals) < len(outputs):
        if previous is not None and done:
            requested = next(requested for requested in outputs if not requested.directory.journal_path.exists())
            raise OutputRefused(
                f"{requested.directory.journal_path} is not there, and {counted(done, 'block')} of this run are done. Put the directory back "
                f"beside {requested.path} to go on, or run with --fresh to start over."
            )
        return None
    if previous is None:
        owned = [*map(_is_own_journal, outputs, journals)]  # each is checked: one of another job is refused
        if not any(owned):
            return None
    for requested, journal in zip(outputs, journals, strict=True):
        if not requested.path.exists() and (journal.done or not requested.is_file):
            _check_nothing_done(requested, done)
            return None
        if problems := RecordedImage(
            requested.path, requested.output.layout, requested.blocks, journal
        ).metadata_problems():
            raise OutputRefused(f"{problems[0]}. {repair_command(plan)} restores it.")
    return done


def _check_nothing_done(requested: RequestedOutput, done: int) -> None:
    """Refuse to start over, unasked, where blocks were done before the output disappeared: it may come back."""
    if done or requested.first.state_path.exists():
        work_done = f"{counted(done, 'block')} of it" if done else "intermediate results"
        again = f"{repair_command(requested.plan)} writes it again, " if requested.is_file else ""
        raise OutputRefused(
            f"{requested.path} is not there, and {requested.directory.path} keeps {work_done} that an earlier run has done. Put it back to go on, "
            f"{again}or run with --fresh to start over."
        )


def _is_own_journal(requested: RequestedOutput, journal: Journal) -> bool:
    """Return True where a journal that has lost its plan is this job's; a journal without a block has no owner."""
    directory = requested.directory
    if not journal.done:
        return False
    if (journal.fingerprint, journal.total) != (requested.fingerprint, len(requested.output.grid)):
        raise ResumeRefused(
            f"{directory.journal_path} has {counted(len(journal.done), 'block')} of another job, and {directory.plan_path.name}, "
            f"which would tell what differs, is missing or damaged. `recon-cli resume {shlex.quote(str(directory.path))}` goes on with "
            f"the job that it was; run with {to_start_over(requested.plan)} to start over."
        )
    return True


def _restore(plan: Plan, directory: RunDirectory) -> None:
    """Write again the files that the directory has lost, or that may change from one run to the next."""
    stored_job = directory.read_valid_job()
    if stored_job is None or plan.kind.changes(stored_job) != plan.kind.changes(plan.documents.asked):
        directory.write_job(plan.documents.asked)
        directory.write_config(plan.documents.resolved)
    stored_plan, now = directory.read_valid_plan() or {}, kept_of(plan)
    if any(stored_plan.get(part) != now[part] for part in ("identity", "same_inputs")):
        directory.write_plan(stored_plan | now)  # last: until then it is the job of before


def kept_of(plan: Plan) -> dict[str, Any]:
    """Return the mapping that the run directory stores of a plan."""
    return {
        "job": plan.job.kind,
        "fingerprint": plan.fingerprint,
        "identity": plan.identity,
        "same_inputs": list(plan.earlier.same_inputs),
        "outputs": [
            {
                "path": str(output.path),
                "layout": output.layout.to_json(),
                "shape": list(output.grid.shape),
                "block": list(output.grid.block),
            }
            for output in plan.outputs
        ],
        "scratch": plan.scratch_bytes > 0,
        "summary": plan.summary(),
    }


def check_same_job(plan: Plan, previous: Mapping[str, Any]) -> None:
    """Refuse to resume a run of another job.

    This does not use ``plan.earlier``: another run may have begun there since the plan was made.
    """
    if (kind := previous.get("job", plan.job.kind)) != plan.job.kind:
        differs: Sequence[str] = (f"job was {kind}, is {plan.job.kind}",)
    else:
        directory = RunDirectory(plan.run_directory)
        differs = differences_of_runs(plan.kind, directory, previous["identity"], plan.identity)
    if differs:
        listed = "\n".join(f"  {line}" for line in differs)
        words = identity_words(plan.kind.identity_words)
        images = tuple(f"{words.get(name, name)}." for name in plan.kind.inputs)
        same_image, moved = "", ""
        is_alike = may_be_same(previous["identity"], plan.identity, plan.kind.inputs)
        if is_alike and all(line.startswith(images) for line in differs):
            if any(".path was " in line for line in differs):
                moved = " If these are the same pixels at another path, run with --same-input: halotile does not check that, and keeps every finished block."
            else:
                same_image = "If these are the same images, repaired or copied, run with --same-input. "
        raise ResumeRefused(
            f"{plan.run_directory} belongs to a different job:\n{listed}\n"
            f"{same_image}Write what it was, or run with {to_start_over(plan)} to start over.{moved}"
        )


def _start_over(outputs: tuple[RequestedOutput, ...]) -> None:
    """Create empty outputs and empty journals.

    The job is written first: it claims the output, so that a run interrupted in here may begin again. The plan
    is written last: without a plan, nothing is resumed.
    """
    plan, first = outputs[0].plan, outputs[0].directory
    claimed = [requested.directory.claims_output() for requested in outputs]
    for requested in outputs:
        check_replaceable(requested)
        check_pixels(requested)
    first.forget()
    first.write_job(plan.documents.asked)
    first.write_config(plan.documents.resolved)
    first.keep_run()
    for requested, is_claimed in zip(outputs, claimed, strict=True):
        if not requested.is_first:
            requested.directory.belong_to(first.path)
        layout = requested.output.layout
        if is_claimed and requested.path.exists():
            restore_metadata(requested.path, layout)  # a half-removed output can be recognised by its metadata
        create_output(requested.path, layout, overwrite=is_claimed or requested.output.overwrite)
        Journal.create(requested.directory.journal_path, requested.fingerprint, len(requested.output.grid)).close()
    first.write_plan(kept_of(plan))
