"""Taking possession of an output: alone, with the right journal, nothing of anybody else's touched."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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
from halotile.graphs.jobs.reconstruct.continuation import identity_of
from halotile.graphs.plans.plan import RunPlan
from halotile.graphs.runs.damage import damaged_blocks, written_of
from halotile.graphs.runs.held_output import Claimed, repair_command
from halotile.graphs.runs.identity import INPUT_KEYS, KEYS, differences, may_be_same
from halotile.graphs.runs.signals import Signals
from halotile.graphs.waiting import log_line, patience_seconds, report_if_slow
from halotile.storage.disk.durable import is_full, remove_partials
from halotile.storage.disk.ownership import (
    REPLACE,
    find_foreign_entry,
    foreign_pixels_reason,
    metadata_problems,
    restore_metadata,
)
from halotile.storage.disk.place import check_path, check_place
from halotile.storage.run_directory.batch_files import BatchFiles
from halotile.storage.run_directory.directory import LOCK_SECONDS, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.run_directory.worker_lock import WorkerLock
from halotile.storage.sharded.output import Layout, create_output, open_output

HOW = ("version", "tile", "run", "cluster", "fuse", "exact", "allow_import", "import_folder")
"""The parts of a job that do not say what it makes of what."""
ORPHAN_SECONDS = 60.0
"""How long workers of a killed driver may take to end before a new one may write."""


@contextmanager
def claim(plan: RunPlan, directory: RunDirectory, signals: Signals | None = None) -> Iterator[Claimed]:
    """Hold the output of a plan, with the journal of what is done, for the length of the context.

    Parameters
    ----------
    plan : RunPlan
        What is to be written.
    directory : RunDirectory
        Where its run is kept.
    signals : Signals, optional
        What cuts a wait for the output short; by default nothing does.

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
    # Before the lock, so that nothing is made beside an output that is refused, or for a cluster that cannot start.
    _check_output(plan, directory)
    if not directory.claims_output():
        check_startable(plan.cluster)
    with ExitStack() as held:
        try:
            with _waiting(f"waiting for whoever holds {directory.path}", signals) as cut_short:
                held.enter_context(directory.lock(patience_seconds(LOCK_SECONDS), cut_short))
            with _waiting(
                f"waiting for the workers of an earlier run in {directory.path}", signals
            ) as cut_short:
                WorkerLock(directory).wait_for_all(patience_seconds(ORPHAN_SECONDS), cut_short)
            journal = held.enter_context(_open(plan, directory))
            place = os.open(plan.output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, place)
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskRefused(
                f"the disk ran full before the first block: {error}. Free some space near {plan.output} and run again."
            ) from error
        yield Claimed(plan, journal, place)


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


def look(plan: RunPlan) -> int:
    """How many blocks an earlier run of this plan has done, where a run would go on; nothing is touched.

    Raises
    ------
    OutputRefused, ResumeRefused
        When a run would be refused.
    """
    directory = RunDirectory(plan.run_directory)
    _check_output(plan, directory)
    directory.check_place()
    directory.check_free()
    return len(Journal.open_any(directory.journal_path).done) if _resumable(plan, directory) else 0


def _open(plan: RunPlan, directory: RunDirectory) -> Journal:
    directory.clear_stop()
    BatchFiles(directory).clear_end()
    if _resumable(plan, directory):
        remove_partials(plan.output)
        _restore(plan, directory)
    else:
        _start_over(plan, directory)
    return Journal.open(directory.journal_path, plan.fingerprint, len(plan.grid))


def _check_output(plan: RunPlan, directory: RunDirectory) -> None:
    """Refuse an output that is not this job's to make or to replace, and one that holds what the job reads."""
    if not directory.claims_output():
        check_place(plan.wanted.path, overwrite=plan.wanted.overwrite)
    elif plan.fresh:
        _check_replaceable(plan, directory)
    else:
        check_path(plan.wanted.path)
    for file in plan.reads():
        if file.resolve().is_relative_to(plan.output.resolve()):
            raise OutputRefused(
                f"output.path is {plan.output}: the job reads {file} there. Write another path."
            )


def _check_replaceable(plan: RunPlan, directory: RunDirectory) -> None:
    """Refuse to start over where that would discard what no run of this job did, or holds, and nobody said that it may.

    Raises
    ------
    OutputRefused
        Saying how to replace it.
    """
    own = _is_own(plan, directory)
    stranger = find_foreign_entry(plan.output, _layout_there(plan, directory)) if own else ""
    check_place(plan.wanted.path, overwrite=True, may_lack_metadata=own and not stranger)
    if plan.wanted.overwrite:
        return
    if stranger:
        raise OutputRefused(
            f"output.path is {plan.output}: {stranger}. --fresh discards only what a run of the same job wrote. Move it away, or "
            "write output.overwrite: true to remove all that is there."
        )
    if not own and (directory.plan_path.exists() or os.path.lexists(plan.output)):
        raise OutputRefused(
            f"output.path is {plan.output}: it is another job's, by {directory.path}. --fresh discards only what a run of "
            "the same job did (the same input, denoiser or operators, and output). Write another path, or "
            "output.overwrite: true to replace it."
        )


def _layout_there(plan: RunPlan, directory: RunDirectory) -> Layout:
    """The layout of what the run there wrote, whose sizes may have been decided otherwise."""
    if kept := directory.read_valid_plan():
        return written_of(kept)[0]
    with suppress(HalotileError):  # a run that was cut off while it started over has lost its plan
        found = open_output(plan.output)
        if (found.shape, found.dtype, found.ome) == (plan.layout.shape, plan.layout.dtype, plan.layout.ome):
            return found
    return plan.layout


def _check_pixels(plan: RunPlan, directory: RunDirectory) -> None:
    """Refuse to discard another result that was put in the place of the run's own.

    Raises
    ------
    OutputRefused
        Saying how to replace it.
    """
    kept = directory.read_valid_plan()
    if plan.wanted.overwrite or kept is None:
        return
    layout, grid = written_of(kept)
    found, done = dict[int, list[str]](), RangeSet()
    with suppress(HalotileError, FileNotFoundError):  # without a journal nobody knows
        journal = Journal.open(directory.journal_path, kept["fingerprint"], len(grid), read_only=True)
        done = journal.done
        blocks = map(grid.block_at, done)
        found = dict(damaged_blocks(plan.output, layout, blocks, journal.digest, thorough=False))
    if others := foreign_pixels_reason(found, len(done)):
        raise OutputRefused(f"{plan.output} is not what the run wrote there: {others}. {REPLACE}")


def _is_own(plan: RunPlan, directory: RunDirectory) -> bool:
    """Whether the run there was asked for the same as this one, however it was to be computed."""
    try:
        requested = directory.read_job()
    except DamagedData:
        requested = None
    if requested is None:
        return (directory.read_valid_plan() or {}).get("fingerprint") == plan.fingerprint
    return _what_is_made(requested) == _what_is_made(plan.job_json())


def _what_is_made(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a job makes of what, as JSON has it."""
    parts = {key: value for key, value in job.items() if key not in HOW}
    parts["output"] = {key: value for key, value in parts.get("output", {}).items() if key != "overwrite"}
    if "solver" in parts:
        parts["solver"] = identity_of(parts["solver"])
    prior = parts.get("prior") or {}
    if prior.get("name") != "tv":  # others have none, and the default was another in earlier versions
        parts["prior"] = {key: value for key, value in prior.items() if key != "iterations"}
    what: dict[str, Any] = json.loads(json.dumps(parts))
    return what


def _to_start_over(plan: RunPlan) -> str:
    """What a run needs to be told to begin anew."""
    own = plan.wanted.overwrite or _is_own(plan, RunDirectory(plan.run_directory))
    return "--fresh" if own else "--fresh and output.overwrite: true"


def _resumable(plan: RunPlan, directory: RunDirectory) -> bool:
    """Whether the directory holds this very job, with its output as it was left."""
    if plan.fresh:
        return False
    previous = directory.read_valid_plan()
    if previous is not None:
        check_same_job(plan, previous)
    if not directory.journal_path.exists() or (previous is None and not _is_journal_of(plan, directory)):
        return False
    if not plan.output.exists():
        _check_nothing_done(plan, directory)
        return False
    if problems := metadata_problems(plan.output, plan.layout):
        raise OutputRefused(f"{problems[0]}. {repair_command(plan)} restores it.")
    return True


def _check_nothing_done(plan: RunPlan, directory: RunDirectory) -> None:
    """Refuse to begin anew, where nobody said so, what was done before the output went away: it may come back.

    Raises
    ------
    OutputRefused
        Saying what is done.
    """
    done = len(Journal.open_any(directory.journal_path).done)
    if done or directory.state_path.exists():
        what = f"{counted(done, 'block')} of it" if done else "a solver's iterations"
        raise OutputRefused(
            f"{plan.output} is not there, and {directory.path} tells of {what} that an earlier run has done. Put it back to go on, "
            "or run with --fresh to start over."
        )


def _is_journal_of(plan: RunPlan, directory: RunDirectory) -> bool:
    """Whether a journal that has lost its plan is this job's; one without a block is nobody's.

    Raises
    ------
    ResumeRefused
        When it is another job's.
    """
    journal = Journal.open_any(directory.journal_path)
    if not journal.done:
        return False
    if (journal.fingerprint, journal.total) != (plan.fingerprint, len(plan.grid)):
        raise ResumeRefused(
            f"{directory.journal_path} has {len(journal.done)} blocks of another job, and {directory.plan_path.name}, "
            f"which would tell what differs, is missing or damaged. `recon-cli resume {shlex.quote(str(directory.path))}` goes on with "
            f"the job that it was; run with {_to_start_over(plan)} to start over."
        )
    return True


def _restore(plan: RunPlan, directory: RunDirectory) -> None:
    """Write down again what the directory has lost, or what may change from one run to the next."""
    kept = directory.read_valid_plan() or {}
    now = kept_of(plan)
    if any(kept.get(part) != now[part] for part in ("identity", "same_inputs")):
        directory.write_plan(kept | now)
    try:
        known = directory.read_job() is not None
    except DamagedData:
        known = False
    if not known:
        directory.write_job(plan.job_json())


def kept_of(plan: RunPlan) -> dict[str, Any]:
    """What the run directory keeps of a plan."""
    return {
        "fingerprint": plan.fingerprint,
        "identity": plan.identity,
        "same_inputs": list(plan.same_inputs),
        "layout": plan.layout.to_json(),
        "block": list(plan.grid.block),
        "summary": plan.summary(),
    }


def check_same_job(plan: RunPlan, previous: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of another job.

    Not by ``plan.differs``: another run may have begun there since the plan was made.

    Raises
    ------
    ResumeRefused
        Listing what differs.
    """
    if differs := differences(previous["identity"], plan.identity):
        listed = "\n".join(f"  {line}" for line in differs)
        images = tuple(f"{KEYS.get(name, name)}." for name in INPUT_KEYS)
        mended, moved = "", ""
        if may_be_same(previous["identity"], plan.identity) and all(d.startswith(images) for d in differs):
            if any(".path was " in line for line in differs):
                moved = " --same-input takes your word that these are the same pixels at another place: every block that is done stays."
            else:
                mended = "If these are the same images, mended or copied, run with --same-input. "
        raise ResumeRefused(
            f"{plan.run_directory} belongs to a different job:\n{listed}\n"
            f"{mended}Write what it was, or run with {_to_start_over(plan)} to start over.{moved}"
        )


def _start_over(plan: RunPlan, directory: RunDirectory) -> None:
    """An empty output and an empty journal.

    The job comes first: it claims the output, so that a run cut off in here may begin again. The plan
    comes last: without one, nothing is resumed.
    """
    overwrite = directory.claims_output()
    if overwrite:
        _check_replaceable(plan, directory)
        _check_pixels(plan, directory)
    else:
        check_place(plan.wanted.path, overwrite=plan.wanted.overwrite)
    directory.forget()
    directory.write_job(plan.job_json())
    directory.write_config(plan.resolved_json())
    if overwrite and plan.output.exists():
        restore_metadata(plan.output, plan.layout)  # what is half removed can be told by them
    create_output(plan.output, plan.layout, overwrite=overwrite or plan.wanted.overwrite)
    Journal.create(directory.journal_path, plan.fingerprint, len(plan.grid)).close()
    directory.write_plan(kept_of(plan))
