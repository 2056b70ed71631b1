"""How a run ended, as a value and in words."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from halotile.graphs.plan import Plan
from halotile.tasks.block import BadBlock


@dataclass(frozen=True)
class Outcome:
    """How a run ended: every block is done, or quarantined by name."""

    done: int
    total: int
    resumed: int
    quarantined: tuple[BadBlock, ...]
    seconds: float
    megapixels_per_second: float
    peak_memory_bytes: int
    output: str
    run_directory: str


def full_disk_in_words(plan: Plan, error: str, done: int) -> str:
    """What a full disk stopped, and how much room the rest takes."""
    total = len(plan.grid)
    left = plan.output_bytes * (total - done) / total
    free = shutil.disk_usage(plan.output).free
    return (
        f"the disk ran full: {error}. {done} of {total} blocks are safe; "
        f"the others take up to {left / 2**20:.1f} MiB, and {plan.output} has {free / 2**20:.1f} MiB free. "
        "Free some space and run again."
    )


def bad_blocks_in_words(plan: Plan, bad: tuple[BadBlock, ...]) -> str:
    """The blocks that failed, the first few by name."""
    lines = [
        f"block {b.number} (index {b.index}, region {b.region.start}–{b.region.stop}): {b.error}"
        for b in bad[:5]
    ]
    more = [f"and {len(bad) - 5} more"] if len(bad) > 5 else []
    return "\n".join(
        [
            f"{len(bad)} of {len(plan.grid)} blocks failed after {plan.job.run.retries} retries; the others are done.",
            *lines,
            *more,
            f"Tracebacks are in {plan.run_directory / 'events.jsonl'}. Mend the cause and run again: only these are redone.",
        ]
    )
