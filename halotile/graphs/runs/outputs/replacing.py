"""Checks of the outputs that a run may create or replace: its own, or those that it was allowed to replace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, HalotileError, OutputRefused
from halotile.graphs.kinds.base import JobOutput
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.outputs.damage import damaged_blocks, written_of
from halotile.storage.disk.object_path import ObjectPath, OutputPath, lies_in, path_of
from halotile.storage.disk.place import check_path, check_place, refusing_silence
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.run_directory.object_claim import ObjectClaim
from halotile.storage.sharded.output import AnyLayout, FileLayout, open_output
from halotile.storage.sharded.ownership import REPLACE, find_foreign_entry, foreign_pixels_reason

HOW = ("version", "run", "cluster", "allow_import", "import_folder")
"""Parts of every job that do not affect its result."""


@dataclass(frozen=True)
class OutputSlot:
    """One output of a plan with the run directory beside it.

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
        """The claim of an output in a store; None on a disk, where the run directory lies beside it."""
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


def slots_of(plan: Plan) -> tuple[OutputSlot, ...]:
    first = RunDirectory(plan.run_directory)
    return tuple(OutputSlot(plan, output, RunDirectory.beside(output.path), first) for output in plan.outputs)


@refusing_silence()
def check_outputs(plan: Plan) -> None:
    """Refuse outputs that this job may not create or replace, as :func:`check_output`."""
    for slot in slots_of(plan):
        check_output(slot)


def check_output(slot: OutputSlot) -> None:
    """Refuse an output that this job may not create or replace, and one that contains files that the job reads."""
    if slot.claim:
        slot.claim.check(may_replace=slot.may_replace_claim)
    if not slot.directory.claims_output():
        check_new(slot)
    elif slot.plan.fresh or not slot.is_of_this_run:
        check_replaceable(slot)
    else:
        check_path(str(slot.path), slot.output.key)
    for file in (*slot.plan.files, *(path_of(source.path) for source in slot.plan.sources)):
        if lies_in(file.resolve(), slot.path.resolve()):
            raise OutputRefused(
                f"{slot.output.key} is {slot.path}: the job reads {file} there. Write another path."
            )


def check_new(slot: OutputSlot) -> None:
    """Refuse a place that no run has claimed, where an output cannot be made."""
    output = slot.output
    check_place(
        str(slot.path),
        overwrite=output.overwrite,
        key=output.key,
        remedy=slot.plan.kind.to_replace,
        is_file=slot.is_file,
    )


def check_replaceable(slot: OutputSlot) -> None:
    """Refuse to start over without permission where that discards a result or data of other jobs."""
    is_own = _is_own(slot)
    stranger = find_foreign_entry(slot.path, _existing_layout(slot)) if is_own else ""
    check_place(
        str(slot.path),
        overwrite=True,
        key=slot.output.key,
        may_lack_metadata=is_own and not stranger,
        is_file=slot.is_file,
    )
    if slot.output.overwrite:
        return
    if stranger:
        raise OutputRefused(
            f"{slot.output.key} is {slot.path}: {stranger}. --fresh discards only what a run of the same job wrote. Move it away, or "
            f"write {slot.plan.kind.to_replace} to remove all that is there."
        )
    keeps_run = slot.first.plan_path.exists() or slot.directory.plan_path.exists()
    if not is_own and (keeps_run or slot.path.exists()):
        raise OutputRefused(
            f"{slot.output.key} is {slot.path}: it is another job's, by {slot.directory.path}. --fresh discards only what a run of "
            "the same job did (the same input, denoiser or operators, and output). Write another path, or "
            f"{slot.plan.kind.to_replace} to replace it."
        )


def _existing_layout(slot: OutputSlot) -> AnyLayout:
    """Return the layout that the run there wrote, whose sizes may have been decided differently."""
    if written := _existing_output(slot):
        return written[0]
    layout = slot.output.layout
    if isinstance(layout, FileLayout):
        return layout
    with suppress(HalotileError):  # a run that was interrupted while it started over has lost its plan
        existing = open_output(slot.path)
        if (existing.shape, existing.dtype, existing.ome) == (layout.shape, layout.dtype, layout.ome):
            return existing
    return layout


def _existing_output(slot: OutputSlot) -> tuple[AnyLayout, Grid] | None:
    """Return layout and blocks of an output from the run directory; None where it does not have them."""
    stored_plan, number = slot.first.read_valid_plan(), slot.plan.outputs.index(slot.output)
    written = written_of(stored_plan) if stored_plan else []
    return written[number] if number < len(written) else None


def check_pixels(slot: OutputSlot) -> None:
    """Refuse to discard another result that replaced the run's own."""
    stored_plan, written = slot.first.read_valid_plan(), _existing_output(slot)
    if slot.output.overwrite or stored_plan is None or written is None:
        return
    layout, grid = written
    problems, done = dict[int, list[str]](), RangeSet()
    owner = journal_fingerprint(stored_plan["fingerprint"], slot.plan.outputs.index(slot.output))
    with suppress(HalotileError, FileNotFoundError):  # without a journal the owner is unknown
        journal = Journal.open(slot.directory.journal_path, owner, len(grid), read_only=True)
        done = journal.done
        blocks = map(grid.block_at, done)
        problems = dict(damaged_blocks(slot.path, layout, blocks, journal.digest, thorough=False))
    difference = foreign_pixels_reason(problems, len(done))
    if slot.is_file and not done and slot.path.exists() and Path(str(slot.path)).stat().st_size:
        difference = "the run has not written it yet"
    if difference:
        raise OutputRefused(f"{slot.path} is not what the run wrote there: {difference}. {REPLACE}")


def _is_own(slot: OutputSlot) -> bool:
    """Return True where the run there had the same job as this one, apart from how it is computed."""
    plan = slot.plan
    if not slot.is_of_this_run:
        return False
    try:
        stored_job = slot.first.read_job()
    except DamagedData:
        stored_job = None
    if stored_job is None:
        return (slot.first.read_valid_plan() or {}).get("fingerprint") == plan.fingerprint
    return _result_of(plan, stored_job) == _result_of(plan, plan.documents.asked)


def _result_of(plan: Plan, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job that define its result, as JSON has them."""
    how = {*HOW, *plan.kind.how}
    parts = {key: value for key, value in job.items() if key not in how}
    if isinstance(output := parts.get("output"), Mapping):
        parts["output"] = {key: value for key, value in output.items() if key != "overwrite"}
    essentials: dict[str, Any] = json.loads(json.dumps(plan.kind.essentials(parts)))
    return essentials


def to_start_over(plan: Plan) -> str:
    """Return the option with which a run starts over."""
    own = plan.overwrite or _is_own(slots_of(plan)[0])
    return "--fresh" if own else f"--fresh and {plan.kind.to_replace}"
