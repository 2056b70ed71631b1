"""The scaling report as a table, and as a page: the table, the time beside an ideal one, and the losses over one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.graphs.amounts import bytes_text, counted, precise_seconds_text
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


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 600, 360, 70, 40, 130, 50
LEAST_GAP = 14
"""Pixels between labels of an axis."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
FAINT = "#888"
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px sans-serif; margin: 2em }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 14px }}
td, th {{ padding: .3em .6em; text-align: right; vertical-align: bottom; border-bottom: 1px solid #ddd }}
td {{ white-space: nowrap }}
svg {{ margin: 1.5em 2em 0 0 }}
</style></head><body><h1>{title}</h1><p>{about}</p><div class="wide"><table>{table}</table></div>{remarks}<div class="wide">{charts}</div></body></html>
"""


@dataclass(frozen=True)
class Line:
    """Points that a chart connects, with a range at each where there is one."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    width: float = 2
    dash: str = ""
    ranges: Sequence[tuple[float, float]] = ()


def write_page(path: Path, name: str, scaling: Scaling) -> None:
    tags = ["th", *["td"] * len(scaling.rows)]
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        for tag, cells in zip(tags, table_cells(scaling), strict=True)
    ]
    text = PAGE.format(
        title=escape(f"Scaling of {name}"),
        about=escape(headline(scaling)),
        table="".join(f"<tr>{row}</tr>" for row in rows),
        remarks="".join(f"<p>{escape(text)}</p>" for text in remarks(scaling)),
        charts=charts(scaling),
    )
    DISK.write_file(path, [text.encode()])


def charts(scaling: Scaling) -> str:
    """Return the charts as SVG: seconds against workers, and where there are losses, these against steps."""
    rows, runs = scaling.rows, [row.run for row in scaling.rows]
    counts, one = [run.workers for run in runs], rows[0].seconds[0] * runs[0].workers
    measured = [(row.run.workers, row.seconds[0]) for row in rows]
    lines = [
        Line("ideal", [(count, one / count) for count in counts], FAINT, dash="6 4"),
        Line("measured", measured, COLORS[0], ranges=[row.seconds[1:] for row in rows]),
    ]
    parts = [_chart(f"Seconds per {scaling.unit}", "workers", lines, counts, log_x=True)]
    if steps := [step for step, _ in max((run.losses for run in runs), key=len)]:
        # Equal curves cover one another: the first is the widest.
        widths = [2 + 3 * number for number in range(len(runs))][::-1]
        losses = [
            Line(counted(run.workers, "worker"), run.losses, color, width)
            for run, color, width in zip(runs, itertools.cycle(COLORS), widths, strict=False)
        ]
        parts.append(_chart("Loss", scaling.unit, losses, steps))
    return "".join(parts)


def _chart(title: str, label: str, lines: Sequence[Line], ticks: Sequence[int], *, log_x: bool = False) -> str:
    """Return a chart as SVG; its vertical axis is logarithmic unless a value is 0 or less."""
    values = [y for line in lines for _, y in line.points] + [y for line in lines for r in line.ranges for y in r]
    log_y = min(values) > 0
    x_of = _scale([float(n) for n in ticks], (LEFT + 15, WIDTH - RIGHT - 15), log=log_x)
    y_of = _scale(values, (HEIGHT - BOTTOM - 10, TOP + 10), log=log_y)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [_text(middle, 20, title, "middle", 16), _text(middle, HEIGHT - 10, label, "middle")]
    some = ticks[:: -(-len(ticks) // 12)]
    parts += [_text(x_of(n), HEIGHT - BOTTOM + 18, str(n), "middle") for n in some]
    for value in _apart(_ticks(min(values), max(values), log=log_y), y_of):
        y = y_of(value)
        parts += [_path([(LEFT, y), (WIDTH - RIGHT, y)], "#ddd", 1), _text(LEFT - 8, y + 4, f"{value:.3g}", "end")]
    for number, line in enumerate(lines):
        drawn = [(x_of(x), y_of(y)) for x, y in line.points]
        parts.append(_path(drawn, line.color, line.width, line.dash))
        for (x, _), (low, high) in zip(drawn, line.ranges, strict=False):
            parts.append(_path([(x, y_of(low)), (x, y_of(high))], line.color, 6))
        y = TOP + 15 + 18 * number
        parts += [
            _path([(WIDTH - RIGHT + 10, y - 4), (WIDTH - RIGHT + 35, y - 4)], line.color, line.width, line.dash),
            _text(WIDTH - RIGHT + 42, y, line.label, "start"),
        ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">{"".join(parts)}</svg>'


def _scale(values: Sequence[float], span: tuple[float, float], *, log: bool) -> Callable[[float], float]:
    """Return a function that takes values to places on an axis, the least and the largest to its ends."""
    onto = math.log if log else float
    least, most = onto(min(values)), onto(max(values))
    stretch = (span[1] - span[0]) / (most - least) if most > least else 0.0
    middle = 0.0 if stretch else (span[1] - span[0]) / 2
    return lambda value: span[0] + middle + stretch * (onto(value) - least)


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Return values for an axis.

    >>> _ticks(0.3, 6, log=True), _ticks(1.1, 1.2, log=True), _ticks(-1, 1, log=False)
    ([0.5, 1.0, 2.0, 5.0], [1.1, 1.2], [-1.0, -0.5, 0.0, 0.5, 1.0])
    """
    if not log:
        return [low + (high - low) * k / 4 for k in range(5)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    inside = [n * 10.0**decade for decade in decades for n in (1, 2, 5) if low <= n * 10.0**decade <= high]
    return inside if len(inside) > 2 else sorted({low, high, *inside})


def _apart(ticks: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Leave out values whose labels would overlap those of others; the first and the last stay.

    >>> _apart([0.0963, 0.1, 0.2, 0.3], lambda value: 1000 * value), _apart([2.0], float)
    ([0.0963, 0.2, 0.3], [2.0])
    """
    kept = list(dict.fromkeys([ticks[0], ticks[-1]]))
    for value in ticks[1:-1]:
        if all(abs(place(value) - place(other)) >= LEAST_GAP for other in kept):
            kept.append(value)
    return sorted(kept)


def _path(points: Sequence[tuple[float, float]], color: str, width: float, dash: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
