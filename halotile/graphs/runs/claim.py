"""Taking possession of an output: alone, with the right journal, nothing of anybody else's touched."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import (
    DamagedData,
    DiskRefused,
    HalotileError,
    OutputInUse,
    OutputRefused,
    ResumeRefused,
    Stopped,
)
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.detection.cluster_kind import check_startable
from halotile.graphs.jobs.base import OutputArray
from halotile.graphs.plans.plan import Plan, run_directory_of
from halotile.graphs.runs.damage import damaged_blocks, written_of
from halotile.graphs.runs.held_output import HeldOutput, HeldOutputs, repair_command
from halotile.graphs.runs.identity import differences, identity_words, may_be_same
from halotile.graphs.runs.signals import Signals
from halotile.graphs.waiting import log_line, patience_seconds, report_if_slow
from halotile.storage.disk.durable import is_full, sweep_partials
from halotile.storage.disk.ownership import (
    REPLACE,
    find_stranger,
    metadata_problems,
    other_pixels,
    restore_metadata,
)
from halotile.storage.disk.place import check_path, check_place
from halotile.storage.grid import Grid
from halotile.storage.run_directory.batch_files import BatchFiles
from halotile.storage.run_directory.directory import LOCK_SECONDS, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import Runs
from halotile.storage.run_directory.worker_lock import WorkerLock
from halotile.storage.sharded.output import Layout, create_output, open_output

HOW = ("version", "run", "cluster", "allow_import", "import_folder")
"""Parts of every job that do not say what it makes of what."""
ORPHAN_SECONDS = 60.0
"""Time that workers of a killed driver have to end before a new one may write."""


@dataclass(frozen=True)
class _Slot:
    """One output of a plan with the run directory beside it.

    The directory of the first output keeps the run; those of others keep their journals, and point to it.
    """

    plan: Plan
    output: OutputArray
    directory: RunDirectory
    first: RunDirectory

    @property
    def path(self) -> Path:
        """Where the output is."""
        return self.output.path

    @property
    def is_first(self) -> bool:
        """True for the output that the run directory lies beside."""
        return self.directory == self.first

    @property
    def is_of_this_run(self) -> bool:
        """True for the first output, and for others whose directory points to that of the first."""
        return self.is_first or self.directory.read_primary() == str(self.first.path)

    @property
    def fingerprint(self) -> str:
        """Owner of its journal."""
        return journal_fingerprint(self.plan.fingerprint, self.plan.outputs.index(self.output))


def journal_fingerprint(fingerprint: str, place: int) -> str:
    """Return the owner of the journal of an output, by its place among those of a plan."""
    return f"{fingerprint}-{place}" if place else fingerprint


def _slots(plan: Plan) -> tuple[_Slot, ...]:
    first = RunDirectory(plan.run_directory)
    return tuple(
        _Slot(plan, output, RunDirectory(run_directory_of(output.path)), first) for output in plan.outputs
    )


@contextmanager
def claim(plan: Plan, signals: Signals | None = None) -> Iterator[HeldOutputs]:
    """Hold the outputs of a plan, with the journals of what is done, for the length of the context.

    Parameters
    ----------
    plan : Plan
        What is to be written.
    signals : Signals, optional
        What cuts a wait for an output short; by default nothing does.

    Raises
    ------
    OutputRefused
        When something that is not this job's stands there, or another run is writing.
    ResumeRefused
        When the run directory belongs to a different job; the message lists what differs.
    DiskRefused
        When there is no room to begin.
    Stopped
        When a signal came while somebody else had the output; its cause is the :class:`OutputInUse` that would have come else.
    """
    signals = signals or Signals()
    slots = _slots(plan)
    # Before the lock, so that nothing is made beside an output that is refused, or for a cluster that cannot start.
    for slot in slots:
        _check_output(slot)
    first = slots[0].directory
    if not first.claims_output():
        check_startable(plan.cluster)
    with ExitStack() as held:
        try:
            for slot in slots:
                with _waiting(f"waiting for whoever holds {slot.directory.path}", signals) as cut_short:
                    held.enter_context(slot.directory.lock(patience_seconds(LOCK_SECONDS), cut_short))
            with _waiting(f"waiting for the workers of an earlier run in {first.path}", signals) as cut_short:
                WorkerLock(first).wait_for_all(patience_seconds(ORPHAN_SECONDS), cut_short)
            opened = []
            for output, journal in zip(plan.outputs, _open(slots), strict=True):
                held.enter_context(journal)
                place = os.open(output.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, place)
                opened.append(HeldOutput(output, journal, place))
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskRefused(
                f"the disk ran full before the first block: {error}. Free some space near {plan.output} and run again."
            ) from error
        yield HeldOutputs(plan, tuple(opened))


@contextmanager
def _waiting(what: str, signals: Signals) -> Iterator[Callable[[], bool]]:
    """Tell what is waited for where that takes a while; given is what asks whether a signal has cut it short."""
    try:
        with report_if_slow(log_line, what):
            yield lambda: signals.requested
    except OutputInUse as held:
        if not signals.requested:
            raise
        raise Stopped(f"stopped on {signals.name} while it waited: {held}", signals.name) from held


def look(plan: Plan) -> int:
    """Return how many blocks an earlier run of this plan has done, where a run would go on; nothing is touched.

    Raises
    ------
    OutputRefused, ResumeRefused
        When a run would be refused.
    """
    slots = _slots(plan)
    for slot in slots:
        _check_output(slot)
        slot.directory.check_place()
        slot.directory.check_free()
    if not _resumable(slots):
        return 0
    return sum(len(Journal.look(slot.directory.journal_path).done) for slot in slots)


def _open(slots: tuple[_Slot, ...]) -> list[Journal]:
    first = slots[0].directory
    first.clear_stop()
    BatchFiles(first).forget_end()
    if _resumable(slots):
        for slot in slots:
            sweep_partials(slot.path)
        _restore(slots[0].plan, first)
    else:
        _start_over(slots)
    return [
        Journal.open(slot.directory.journal_path, slot.fingerprint, len(slot.output.grid)) for slot in slots
    ]


def _check_output(slot: _Slot) -> None:
    """Refuse an output that is not this job's to make or to replace, and one that holds what the job reads."""
    if not slot.directory.claims_output():
        _check_new(slot)
    elif slot.plan.fresh or not slot.is_of_this_run:
        _check_replaceable(slot)
    else:
        check_path(str(slot.path), slot.output.key)
    for file in slot.plan.files:
        if file.resolve().is_relative_to(slot.path.resolve()):
            raise OutputRefused(
                f"{slot.output.key} is {slot.path}: the job reads {file} there. Write another path."
            )


def _check_new(slot: _Slot) -> None:
    """Refuse a place that no run has claimed, where an output cannot be made."""
    output = slot.output
    check_place(str(slot.path), overwrite=output.overwrite, key=output.key, remedy=slot.plan.kind.to_replace)


def _check_replaceable(slot: _Slot) -> None:
    """Refuse to start over where that would discard what no run of this job did, or holds, and nobody allowed it.

    Raises
    ------
    OutputRefused
        With what to write to replace it.
    """
    own = _is_own(slot)
    stranger = find_stranger(slot.path, _layout_there(slot)) if own else ""
    check_place(str(slot.path), overwrite=True, key=slot.output.key, may_lack_metadata=own and not stranger)
    if slot.output.overwrite:
        return
    if stranger:
        raise OutputRefused(
            f"{slot.output.key} is {slot.path}: {stranger}. --fresh discards only what a run of the same job wrote. Move it away, or "
            f"write {slot.plan.kind.to_replace} to remove all that is there."
        )
    if not own and (slot.first.plan_path.exists() or os.path.lexists(slot.path)):
        raise OutputRefused(
            f"{slot.output.key} is {slot.path}: it is another job's, by {slot.directory.path}. --fresh discards only what a run of "
            "the same job did (the same input, denoiser or operators, and output). Write another path, or "
            f"{slot.plan.kind.to_replace} to replace it."
        )


def _layout_there(slot: _Slot) -> Layout:
    """Return the layout of what the run there wrote, whose sizes may have been decided otherwise."""
    if written := _written_there(slot):
        return written[0]
    layout = slot.output.layout
    with suppress(HalotileError):  # a run that was cut off while it started over has lost its plan
        found = open_output(slot.path)
        if (found.shape, found.dtype, found.ome) == (layout.shape, layout.dtype, layout.ome):
            return found
    return layout


def _written_there(slot: _Slot) -> tuple[Layout, Grid] | None:
    """Return layout and blocks of an output as the run directory keeps them; None where it keeps none."""
    kept, place = slot.first.whole_plan(), slot.plan.outputs.index(slot.output)
    written = written_of(kept) if kept else []
    return written[place] if place < len(written) else None


def _check_pixels(slot: _Slot) -> None:
    """Refuse to discard another result that was put in the place of the run's own.

    Raises
    ------
    OutputRefused
        With what to write to replace it.
    """
    kept, written = slot.first.whole_plan(), _written_there(slot)
    if slot.output.overwrite or kept is None or written is None:
        return
    layout, grid = written
    found, done = dict[int, list[str]](), Runs()
    owner = journal_fingerprint(kept["fingerprint"], slot.plan.outputs.index(slot.output))
    with suppress(HalotileError, FileNotFoundError):  # without a journal nobody knows
        journal = Journal.open(slot.directory.journal_path, owner, len(grid), read_only=True)
        done = journal.done
        blocks = map(grid.block_at, done)
        found = dict(damaged_blocks(slot.path, layout, blocks, journal.digest, thorough=False))
    if others := other_pixels(found, len(done)):
        raise OutputRefused(f"{slot.path} is not what the run wrote there: {others}. {REPLACE}")


def _is_own(slot: _Slot) -> bool:
    """Return True where the run there was asked for the same as this one, however it was to be computed."""
    plan = slot.plan
    if not slot.is_of_this_run:
        return False
    try:
        asked = slot.first.read_job()
    except DamagedData:
        asked = None
    if asked is None:
        return (slot.first.whole_plan() or {}).get("fingerprint") == plan.fingerprint
    return _what_is_made(plan, asked) == _what_is_made(plan, plan.documents.asked)


def _what_is_made(plan: Plan, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job makes of what, as JSON has it."""
    how = {*HOW, *plan.kind.how}
    parts = {key: value for key, value in job.items() if key not in how}
    if isinstance(output := parts.get("output"), Mapping):
        parts["output"] = {key: value for key, value in output.items() if key != "overwrite"}
    what: dict[str, Any] = json.loads(json.dumps(plan.kind.essentials(parts)))
    return what


def _to_start_over(plan: Plan) -> str:
    """Return what a run needs to be told to begin anew."""
    own = plan.overwrite or _is_own(_slots(plan)[0])
    return "--fresh" if own else f"--fresh and {plan.kind.to_replace}"


def _resumable(slots: tuple[_Slot, ...]) -> bool:
    """Return True where the directories hold this very job, with its outputs as they were left."""
    plan, first = slots[0].plan, slots[0].directory
    if plan.fresh:
        return False
    previous = first.whole_plan()
    if previous is not None:
        check_same_job(plan, previous)
    if not all(slot.directory.journal_path.exists() for slot in slots):
        return False
    if previous is None and not all(map(_is_journal_of, slots)):
        return False
    for slot in slots:
        if not slot.path.exists():
            _check_nothing_done(slot)
            return False
        if problems := metadata_problems(slot.path, slot.output.layout):
            raise OutputRefused(f"{problems[0]}. {repair_command(plan)} restores it.")
    return True


def _check_nothing_done(slot: _Slot) -> None:
    """Refuse to begin anew what was done before the output went away, unless that is said: it may come back.

    Raises
    ------
    OutputRefused
        With what is done.
    """
    done = len(Journal.look(slot.directory.journal_path).done)
    if done or slot.first.state_path.exists():
        what = f"{counted(done, 'block')} of it" if done else "scratch arrays"
        raise OutputRefused(
            f"{slot.path} is not there, and {slot.directory.path} keeps {what} that an earlier run has done. Put it back to go on, "
            "or run with --fresh to start over."
        )


def _is_journal_of(slot: _Slot) -> bool:
    """Return True where a journal that has lost its plan is this job's; one without a block is nobody's.

    Raises
    ------
    ResumeRefused
        When it is another job's.
    """
    directory = slot.directory
    journal = Journal.look(directory.journal_path)
    if not journal.done:
        return False
    if (journal.fingerprint, journal.total) != (slot.fingerprint, len(slot.output.grid)):
        raise ResumeRefused(
            f"{directory.journal_path} has {len(journal.done)} blocks of another job, and {directory.plan_path.name}, "
            f"which would tell what differs, is missing or damaged. `recon-cli resume {shlex.quote(str(directory.path))}` goes on with "
            f"the job that it was; run with {_to_start_over(slot.plan)} to start over."
        )
    return True


def _restore(plan: Plan, directory: RunDirectory) -> None:
    """Write down again what the directory has lost, or what may change from one run to the next."""
    kept = directory.whole_plan() or {}
    now = kept_of(plan)
    if any(kept.get(part) != now[part] for part in ("identity", "same_inputs")):
        directory.write_plan(kept | now)
    try:
        asked = directory.read_job()
    except DamagedData:
        asked = None
    if asked is None or plan.kind.changes(asked) != plan.kind.changes(plan.documents.asked):
        directory.write_job(plan.documents.asked)
        directory.write_config(plan.documents.resolved)


def kept_of(plan: Plan) -> dict[str, Any]:
    """Return what the run directory keeps of a plan."""
    return {
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
        "scratch": plan.resources.scratch_bytes > 0,
        "summary": plan.summary(),
    }


def check_same_job(plan: Plan, previous: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of another job.

    Not by ``plan.earlier``: another run may have begun there since the plan was made.

    Raises
    ------
    ResumeRefused
        With what differs.
    """
    if differs := differences(previous["identity"], plan.identity, plan.kind.identity_words):
        listed = "\n".join(f"  {line}" for line in differs)
        words = identity_words(plan.kind.identity_words)
        images = tuple(f"{words.get(name, name)}." for name in plan.kind.inputs)
        mended, moved = "", ""
        if (
            images
            and may_be_same(previous["identity"], plan.identity)
            and all(d.startswith(images) for d in differs)
        ):
            if any(".path was " in line for line in differs):
                moved = " --same-input takes your word that these are the same pixels at another place: every block that is done stays."
            else:
                mended = "If these are the same images, mended or copied, run with --same-input. "
        raise ResumeRefused(
            f"{plan.run_directory} belongs to a different job:\n{listed}\n"
            f"{mended}Write what it was, or run with {_to_start_over(plan)} to start over.{moved}"
        )


def _start_over(slots: tuple[_Slot, ...]) -> None:
    """Make empty outputs and empty journals.

    The job comes first: it claims the output, so that a run cut off in here may begin again. The plan
    comes last: without one, nothing is resumed.
    """
    plan, first = slots[0].plan, slots[0].directory
    claimed = [slot.directory.claims_output() for slot in slots]
    for slot, is_claimed in zip(slots, claimed, strict=True):
        if is_claimed:
            _check_replaceable(slot)
            _check_pixels(slot)
        else:
            _check_new(slot)
    first.forget()
    first.write_job(plan.documents.asked)
    first.write_config(plan.documents.resolved)
    for slot, is_claimed in zip(slots, claimed, strict=True):
        if not slot.is_first:
            slot.directory.forget()
            slot.directory.write_primary(first.path)
        layout = slot.output.layout
        if is_claimed and slot.path.exists():
            restore_metadata(slot.path, layout)  # what is half removed can be recognised by them
        create_output(slot.path, layout, overwrite=is_claimed or slot.output.overwrite)
        Journal.create(slot.directory.journal_path, slot.fingerprint, len(slot.output.grid)).close()
    first.write_plan(kept_of(plan))
