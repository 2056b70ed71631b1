"""The memory that a reconstruction takes, and what to write where it is too much."""

from __future__ import annotations

from collections.abc import Iterator

from halotile.graphs.jobs.reconstruct.inversion import Inversion
from halotile.graphs.jobs.reconstruct.memory import StepFootprint
from halotile.graphs.plans.memory import MIB
from halotile.graphs.plans.plan import Need

SMALLER = "a smaller tile.size, tile.block or output.shard"


def needs_of(work: Inversion) -> Iterator[Need]:
    """Yield the memory of a block, and of each operator that sees the whole image."""

    def need(what: str, footprint: StepFootprint, instead: str) -> Need:
        enough = f"Write run.memory_per_worker: {-(-footprint.total_bytes // MIB)}MiB, or {instead}."
        return Need(what, footprint.total_bytes, footprint.describe(), enough)

    yield need(f"one block of {list(work.grid.block)}", work.step_footprint(), SMALLER)
    for term, footprint in zip(work.form.whole, work.operator_footprints(), strict=True):
        number = next(n for n, other in enumerate(work.form.terms) if other is term)
        what = (
            f"operators[{number}] ({term.operator.name}) sees the whole image of {list(work.grid.shape)}, and"
        )
        yield need(what, footprint, "an operator that looks a few pixels far")
