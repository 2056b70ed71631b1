"""Where the time of a block goes: ``python tests/benchmarks/budget.py [FOLDER] [EDGE]`` prints a table of milliseconds for each shard of 1024².

The functions of a worker are timed while a job runs, the median of three jobs. Reads and writes run beside the computation, and several
shards are encoded at once, so that the rows add up to more than what a block takes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.data import image
from tests.benchmarks.denoising import run_job
from tests.benchmarks.filters import OPTIONS
from tests.benchmarks.measuring import chosen, seconds_spent, take_turns, timed

SHARD = 1024
ROWS = ("read and decode", "compute", "encode", "write", "fsync", "whole block")


def time_stages(compiled: bool) -> None:
    """Time what a worker does for a block from now on."""
    from halotile.storage.disk.durable import Disk
    from halotile.storage.sharded import shards
    from halotile.tasks.block import BlockRunner
    from halotile.tasks.denoise_block import DenoiseStages
    from halotile.tasks.denoisers.compiled import library

    if not compiled:
        library.library = lambda: None  # type: ignore[assignment]
    DenoiseStages.read = timed("read and decode", DenoiseStages.read)  # type: ignore[method-assign]
    DenoiseStages.compute = timed("compute", DenoiseStages.compute)  # type: ignore[method-assign]
    shards.encode_shard = timed("encode", shards.encode_shard)
    Disk._write = timed("write", Disk._write)  # type: ignore[method-assign]
    Disk._fsync = timed("fsync", Disk._fsync)  # type: ignore[method-assign]
    BlockRunner.run = timed("whole block", BlockRunner.run)  # type: ignore[method-assign]


def budget_of(folder: Path, edge: int, name: str, *, compiled: bool = True) -> dict[str, float]:
    """Milliseconds of a worker for each shard, by what for."""
    found: list[dict[str, float]] = []
    run_job(
        image(folder, edge),
        folder / "budget.zarr",
        chosen(name, **OPTIONS.get(name, {})),
        before=lambda client: client.run(partial(time_stages, compiled)),
        after=lambda client: found.extend(client.run(seconds_spent).values()),
    )
    return {row: 1e3 * sum(one.get(row, 0.0) for one in found) / (edge / SHARD) ** 2 for row in ROWS}


def table(folder: Path, edge: int) -> str:
    """The table, in Markdown."""
    cases = {
        "copy": partial(budget_of, folder, edge, "none"),
        "gaussian σ 1.5, on tensors": partial(budget_of, folder, edge, "gaussian", compiled=False),
        "gaussian σ 1.5": partial(budget_of, folder, edge, "gaussian"),
    }
    measured = take_turns(cases, lambda title: cases[title](), 3)
    lines = ["| ms for each 1024² | " + " | ".join(measured) + " |", "|---|" + "---|" * len(measured)]
    for row in ROWS:
        middles = [statistics.median(result[row] for result in results) for results in measured.values()]
        lines.append(f"| {row} | " + " | ".join(f"{value:.1f}" for value in middles) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    edge = int(sys.argv[2]) if sys.argv[2:] else 16384
    with tempfile.TemporaryDirectory() as temporary:
        print(table(Path(sys.argv[1] if sys.argv[1:] else temporary), edge))


if __name__ == "__main__":
    main()
