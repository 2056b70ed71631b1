"""The end of a run, as a value and in words."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from halotile.errors import BlockFailed, BlockInputFailed
from halotile.graphs.amounts import IMAGE, bytes_text, counted, faulty_input, first_line
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.plans.plan import Plan
from halotile.graphs.watching.progress import Progress
from halotile.graphs.watching.report import as_html
from halotile.storage.grid import Grid
from halotile.tasks.block import BadBlock


@dataclass(frozen=True, kw_only=True)
class Outcome(Progress):
    """The end of a run, with its last progress: every block is done, or quarantined by name."""

    output: str
    run_directory: str
    quarantined: tuple[BadBlock, ...] = ()
    inspection: Inspection = field(default_factory=Inspection)
    """Figures of the result."""
    retired: tuple[str, ...] = ()
    """Workers that were given no more blocks, with host and reason."""

    @classmethod
    def of(cls, plan: Plan, progress: Progress, **found: Any) -> Outcome:
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
        return "Mend the cause and run again. Where that changed what the job reads, or your code, run with --fresh to start over."
    if not all(b.kind in ("input", "damaged") for b in bad):
        return (
            "Mend the cause and run again: only these are redone. After a change of the image or of your code run with "
            "--fresh to start over; other options are another job, which also takes output.overwrite: true."
        )
    may_stay = any("run.on_nan: propagate" in b.error for b in bad)
    redo = "Run again with run.on_nan: propagate to do only these. " if may_stay else ""
    faulty = faulty_input(b.error for b in bad)
    return f"{redo}Once {faulty} is repaired, run with --same-input: only these are redone."
