"""Claim of an output: exclusive, with the right journal, and without touching files of any other job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from halotile.errors import (
    DamagedData,
    OutputInUse,
    OutputRefused,
    ResumeRefused,
    Stopped,
)
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.common.cluster_kind import check_startable
from halotile.graphs.plans.identity import differences_of_runs, identity_words, may_be_same
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.outputs.damage import holds_own_pixels
from halotile.graphs.runs.outputs.held_output import HeldFolder, HeldOutput, HeldOutputs, repair_command
from halotile.graphs.runs.outputs.replacing import (
    OutputSlot,
    check_new,
    check_outputs,
    check_pixels,
    check_replaceable,
    slots_of,
    to_start_over,
)
from halotile.graphs.runs.signals import Signals
from halotile.graphs.waiting import log_line, patience_seconds, report_if_slow
from halotile.storage.disk.durable import refusing_full, remove_partials
from halotile.storage.disk.place import refusing_silence
from halotile.storage.run_directory.directory import LOCK_SECONDS, BatchFiles, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.run_directory.object_claim import ObjectClaim
from halotile.storage.sharded.output import create_output
from halotile.storage.sharded.ownership import (
    metadata_problems,
    restore_metadata,
)

ORPHAN_SECONDS = 60.0
"""Time that workers of a killed driver have to end before a new driver may write."""


@contextmanager
def claim(plan: Plan, signals: Signals | None = None) -> Iterator[HeldOutputs]:
    """Hold the outputs of a plan, with the journals of the blocks that are done, for the duration of the context.

    ``plan``: outputs to claim; ``signals``: signals that end the wait for an output early; by default none.
    """
    signals = signals or Signals()
    slots = slots_of(plan)
    # Before the lock, so that nothing is created beside an output that is refused, or for a cluster that
    # cannot start.
    check_outputs(plan)
    first = slots[0].directory
    if not first.claims_output():
        check_startable(plan.cluster)
    with ExitStack() as stack:
        with refusing_full("no block was computed", f"Free some space near {plan.output} and run again."):
            # In one order, whatever that of the job: two runs of the same outputs do not wait for each other.
            for slot in sorted(slots, key=lambda slot: slot.directory.path):
                with _wait_for(f"waiting for whoever holds {slot.directory.path}", signals) as cut_short:
                    stack.enter_context(slot.directory.lock(patience_seconds(LOCK_SECONDS), cut_short))
            for directory in _with_workers(slots):
                operation = f"waiting for the workers of an earlier run in {directory.path}"
                with _wait_for(operation, signals) as cut_short:
                    WorkerLock(directory.path).wait_for_all(patience_seconds(ORPHAN_SECONDS), cut_short)
            for slot in slots:
                if slot.claim:
                    slot.claim.take(may_replace=slot.may_replace_claim)
            opened = []
            for slot, journal in zip(slots, _open(slots), strict=True):
                stack.enter_context(journal)
                opened.append(HeldOutput(slot.output, journal, stack.enter_context(_hold(slot))))
                if slot.claim and len(journal.done) < journal.total:
                    slot.claim.mark(is_finished=False)
        yield HeldOutputs(plan, tuple(opened))


@contextmanager
def _hold(slot: OutputSlot) -> Iterator[HeldFolder | ObjectClaim]:
    """Hold the folder of an output, or its claim in a store."""
    if slot.claim:
        yield slot.claim
        return
    path = Path(str(slot.path))
    folder = path.parent if slot.is_file else path
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield HeldFolder(folder, descriptor)
    finally:
        os.close(descriptor)


def _with_workers(slots: tuple[OutputSlot, ...]) -> list[RunDirectory]:
    """Return the directories of runs whose workers may still write one of these outputs."""
    directories = {slot.directory.path for slot in slots} | {slot.directory.of_run().path for slot in slots}
    return [RunDirectory(path) for path in sorted(directories) if path.is_dir()]


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
def look(plan: Plan) -> int:
    """Return the number of blocks of this plan that an earlier run has done; nothing is changed."""
    check_outputs(plan)
    slots = slots_of(plan)
    for slot in slots:
        slot.directory.check_place()
        slot.directory.check_free()
    if not _resumable(slots):
        return 0
    return _done_blocks(slots)


@refusing_silence()
def _open(slots: tuple[OutputSlot, ...]) -> list[Journal]:
    first = slots[0].directory
    first.clear_stop()
    BatchFiles(first).clear_end()
    if _resumable(slots):
        for slot in slots:
            remove_partials(slot.path)
        _restore(slots[0].plan, first)
    else:
        _start_over(slots)
    return [_journal_of(slot) for slot in slots]


def _journal_of(slot: OutputSlot) -> Journal:
    path, owner, total = slot.directory.journal_path, slot.fingerprint, len(slot.output.grid)
    if slot.plan.kind.revision and not Journal.open_any(path).done:  # its job may have been changed
        Journal.create(path, owner, total).close()
    return Journal.open(path, owner, total)


def _resumable(slots: tuple[OutputSlot, ...]) -> bool:
    """Return True where the directories hold this very job, with its outputs as they were left."""
    plan, first = slots[0].plan, slots[0].directory
    if plan.fresh:
        return False
    previous = first.read_valid_plan()
    if previous is not None:
        check_same_job(plan, previous)
    missing = [slot for slot in slots if not slot.directory.journal_path.exists()]
    if missing:
        if previous is not None and (done := _done_blocks(slots)):
            raise OutputRefused(
                f"{missing[0].directory.journal_path} is not there, and {counted(done, 'block')} of this run are done. Put the directory back "
                f"beside {missing[0].path} to go on, or run with --fresh to start over."
            )
        return False
    if previous is None:
        owned = [_is_journal_of(slot) for slot in slots]  # each is looked at: one of another job is refused
        if not any(owned):
            return False
    for slot in slots:
        if not slot.path.exists():
            _check_nothing_done(slot, _done_blocks(slots))
            return False
        own = partial(_holds_own_pixels, slot)
        if problems := metadata_problems(slot.path, slot.output.layout, own):
            raise OutputRefused(f"{problems[0]}. {repair_command(plan)} restores it.")
    return True


def _holds_own_pixels(slot: OutputSlot) -> bool:
    journal = Journal.open_any(slot.directory.journal_path)
    return holds_own_pixels(journal, slot.path, slot.output.layout, slot.output.grid)


def _done_blocks(slots: tuple[OutputSlot, ...]) -> int:
    """Return the number of blocks of all outputs that are done."""
    paths = (slot.directory.journal_path for slot in slots)
    return sum(len(Journal.open_any(path).done) for path in paths if path.exists())


def _check_nothing_done(slot: OutputSlot, done: int) -> None:
    """Refuse to start over, unasked, where blocks were done before the output disappeared: it may come back."""
    if done or slot.first.state_path.exists():
        work_done = f"{counted(done, 'block')} of it" if done else "intermediate results"
        again = f"{repair_command(slot.plan)} writes it again, " if slot.is_file else ""
        raise OutputRefused(
            f"{slot.path} is not there, and {slot.directory.path} keeps {work_done} that an earlier run has done. Put it back to go on, "
            f"{again}or run with --fresh to start over."
        )


def _is_journal_of(slot: OutputSlot) -> bool:
    """Return True where a journal that has lost its plan is this job's; a journal without a block has no owner."""
    directory = slot.directory
    journal = Journal.open_any(directory.journal_path)
    if not journal.done:
        return False
    if (journal.fingerprint, journal.total) != (slot.fingerprint, len(slot.output.grid)):
        raise ResumeRefused(
            f"{directory.journal_path} has {counted(len(journal.done), 'block')} of another job, and {directory.plan_path.name}, "
            f"which would tell what differs, is missing or damaged. `recon-cli resume {shlex.quote(str(directory.path))}` goes on with "
            f"the job that it was; run with {to_start_over(slot.plan)} to start over."
        )
    return True


def _restore(plan: Plan, directory: RunDirectory) -> None:
    """Write again the files that the directory has lost, or that may change from one run to the next."""
    try:
        stored_job = directory.read_job()
    except DamagedData:
        stored_job = None
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
        mended, moved = "", ""
        is_alike = may_be_same(previous["identity"], plan.identity, plan.kind.inputs)
        if is_alike and all(line.startswith(images) for line in differs):
            if any(".path was " in line for line in differs):
                moved = " --same-input takes your word that these are the same pixels at another place: every block that is done stays."
            else:
                mended = "If these are the same images, mended or copied, run with --same-input. "
        raise ResumeRefused(
            f"{plan.run_directory} belongs to a different job:\n{listed}\n"
            f"{mended}Write what it was, or run with {to_start_over(plan)} to start over.{moved}"
        )


def _start_over(slots: tuple[OutputSlot, ...]) -> None:
    """Create empty outputs and empty journals.

    The job is written first: it claims the output, so that a run interrupted in here may begin again. The plan
    is written last: without a plan, nothing is resumed.
    """
    plan, first = slots[0].plan, slots[0].directory
    claimed = [slot.directory.claims_output() for slot in slots]
    for slot, is_claimed in zip(slots, claimed, strict=True):
        if is_claimed:
            check_replaceable(slot)
            check_pixels(slot)
        else:
            check_new(slot)
    first.forget()
    first.write_job(plan.documents.asked)
    first.write_config(plan.documents.resolved)
    first.keep_run()
    for slot, is_claimed in zip(slots, claimed, strict=True):
        if not slot.is_first:
            slot.directory.belong_to(first.path)
        layout = slot.output.layout
        if is_claimed and slot.path.exists():
            restore_metadata(slot.path, layout)  # a half-removed output can be recognised by its metadata
        create_output(slot.path, layout, overwrite=is_claimed or slot.output.overwrite)
        Journal.create(slot.directory.journal_path, slot.fingerprint, len(slot.output.grid)).close()
    first.write_plan(kept_of(plan))
