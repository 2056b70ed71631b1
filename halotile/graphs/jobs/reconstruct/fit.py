"""Memory needs of a reconstruction, and advice where they are too large."""

from __future__ import annotations

from collections.abc import Iterator

from halotile.graphs.jobs.reconstruct.problem.inversion import Inversion
from halotile.graphs.jobs.reconstruct.problem.memory import StepFootprint
from halotile.graphs.plans.plan import Need
from halotile.graphs.plans.resources.memory import MIB

SMALLER = "a smaller tile.size, tile.block or output.shard"


def needs_of(work: Inversion, kept: int) -> Iterator[Need]:
    """Yield the memory of a block, and of each operator that sees the whole image; ``kept`` bytes of inputs stay decoded."""

    def need(what: str, footprint: StepFootprint, instead: str) -> Need:
        total = footprint.total_bytes + kept
        enough = f"Write run.memory_per_worker: {-(-total // MIB)}MiB, or {instead}."
        return Need(what, total, footprint.describe(), enough)

    yield need(f"one block of {list(work.grid.block)}", work.step_footprint(), SMALLER)
    for term, footprint in zip(work.form.whole, work.operator_footprints(), strict=True):
        number = next(n for n, other in enumerate(work.form.terms) if other is term)
        what = (
            f"operators[{number}] ({term.operator.name}) sees the whole image of {list(work.grid.shape)}, and"
        )
        yield need(what, footprint, "an operator that looks a few pixels far")
