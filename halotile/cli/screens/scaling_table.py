"""The scaling report as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halotile.graphs.amounts import bytes_text, counted, precise_seconds_text

if TYPE_CHECKING:
    from halotile.graphs.scaling import Scaling


def scaling_table(scaling: Scaling) -> str:
    """Return the figures of each number of workers, with what was done above them, and notes below."""
    cells = table_cells(scaling)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([headline(scaling), "", *lines, "", *remarks(scaling)]).rstrip()


def table_cells(scaling: Scaling) -> list[list[str]]:
    """Return the table as rows of cells, the first with the names of the columns.

    Examples
    --------
    >>> from halotile.graphs.scaling import Scaling, TimedRun
    >>> runs = [TimedRun(1, 2.0, (0.5, 0.4), (), 2**20, 0, 0, 2**28, 0), TimedRun(2, 2.5, (0.25, 0.25), (), 2**20, 0, 0, 2**28, 0)]
    >>> print(scaling_table(Scaling("denoise", "block", 8, 9, 2, runs)))
    job denoise, 2 trials of 8 of 9 blocks
    <BLANKLINE>
    workers  start  time per block           range  speed-up  efficiency   read  written  exchanged  peak memory
          1    2 s          0.45 s  0.4 s to 0.5 s         1       100 %  1 MiB      0 B        0 B      256 MiB
          2  2.5 s          0.25 s          0.25 s       1.8        90 %  1 MiB      0 B        0 B      256 MiB
    """
    head = ["workers", "start", f"time per {scaling.unit}", "range", "speed-up", "efficiency", "read"]
    on_gpu = any(row.run.device_peak_bytes for row in scaling.rows)
    cells = [[*head, "written", "exchanged", "peak memory", *(["on GPU"] if on_gpu else [])]]
    for row in scaling.rows:
        run, (seconds, *ends) = row.run, map(precise_seconds_text, row.seconds)
        counts = [run.read_bytes, run.written_bytes, run.exchanged_bytes]
        peaks = [run.peak_memory_bytes, *([run.device_peak_bytes] if on_gpu else [])]
        texts = [
            str(run.workers),
            precise_seconds_text(run.start_seconds),
            seconds,
            " to ".join(dict.fromkeys(ends)),
            f"{row.speed_up:.3g}",
            f"{100 * row.efficiency:.0f} %",
        ]
        moved = ["-" if n is None else bytes_text(n) for n in counts]
        cells.append([*texts, *moved, *map(bytes_text, peaks)])
    return cells


def headline(scaling: Scaling) -> str:
    """Return what was run, in a line."""
    one = scaling.runs[0]
    steps = one.losses[-1][0] - one.losses[0][0] if one.losses else len(one.seconds)
    share = f"{counted(steps, scaling.unit)} after the first"
    if scaling.of_blocks:
        share = f"{scaling.blocks:,} of {counted(scaling.of_blocks, 'block')}"
    return f"job {scaling.job}, {counted(scaling.trials, 'trial')} of {share}"


def remarks(scaling: Scaling) -> list[str]:
    """Return the difference of the losses, and notes."""
    difference = scaling.largest_difference
    notes = [f"note: {note}" for note in scaling.notes]
    if difference is None:
        return notes
    text = f"{difference:.2g}" if difference else "0: the same bits"
    return [f"largest relative difference of a loss: {text}", *notes]
