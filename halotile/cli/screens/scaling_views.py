"""The scaling report as a table, and as a page: the table, the time beside an ideal one, and the losses over one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.graphs.words import bytes_text, counted, precise_seconds_text
from halotile.storage.disk.durable import DISK

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


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px sans-serif; margin: 2em }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 14px }}
td, th {{ padding: .3em .6em; text-align: right; vertical-align: bottom; border-bottom: 1px solid #ddd }}
td {{ white-space: nowrap }}
</style>{scripts}</head><body><h1>{title}</h1><p>{about}</p><div class="wide"><table>{table}</table></div>{remarks}<div class="wide">{charts}</div></body></html>
"""


def write_page(path: Path, name: str, scaling: Scaling) -> None:
    from bokeh.embed import components
    from bokeh.resources import Resources

    tags = ["th", *["td"] * len(scaling.rows)]
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        for tag, cells in zip(tags, table_cells(scaling), strict=True)
    ]
    script, places = components(charts(scaling))
    text = PAGE.format(
        title=escape(f"Scaling of {name}"),
        about=escape(headline(scaling)),
        table="".join(f"<tr>{row}</tr>" for row in rows),
        remarks="".join(f"<p>{escape(text)}</p>" for text in remarks(scaling)),
        scripts=Resources("inline", components=["bokeh"]).render() + script,
        charts="".join(places),
    )
    DISK.write_file(path, [text.encode()])


def charts(scaling: Scaling) -> list[Any]:
    """Return the charts: seconds against workers, and where there are losses, these against steps."""
    rows = scaling.rows
    counts, one = [row.run.workers for row in rows], rows[0].seconds[0] * rows[0].run.workers
    seconds, least, most = zip(*(row.seconds for row in rows), strict=True)
    times = _chart(f"Seconds per {scaling.unit}", "workers", least, x_axis_type="log")
    times.xaxis.ticker = counts
    times.line(counts, [one / count for count in counts], color="#888", line_dash="dashed", legend_label="ideal")
    times.segment(counts, least, counts, most, color=COLORS[0], line_width=6)
    times.line(counts, seconds, color=COLORS[0], line_width=2, legend_label="measured")
    trained = [row.run for row in rows if row.run.losses]
    if not trained:
        return [times]
    losses = _chart("Loss", scaling.unit, [loss for run in trained for _, loss in run.losses])
    for number, (run, color) in enumerate(zip(trained, itertools.cycle(COLORS), strict=False)):
        steps, values = zip(*run.losses, strict=True)
        # Equal curves cover one another: the first is the widest.
        width = 2 + 3 * (len(trained) - number - 1)
        losses.line(steps, values, color=color, line_width=width, legend_label=counted(run.workers, "worker"))
    return [times, losses]


def _chart(title: str, label: str, values: Sequence[float], **axes: Any) -> Any:
    """Return an empty chart; its vertical axis is logarithmic unless a value is 0 or less."""
    from bokeh.plotting import figure

    kind = "log" if min(values) > 0 else "linear"
    return figure(title=title, x_axis_label=label, y_axis_type=kind, width=600, height=360, **axes)
