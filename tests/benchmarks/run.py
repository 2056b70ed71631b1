"""Runs the benchmarks and writes their tables: ``python tests/benchmarks/run.py [GROUP or CASE ...] [--repeats N] [--quick]``.

Each ratio comes from programs that take turns (A B A B ...) in one run, each in a process of its
own; the table shows the ratio of their medians with the range of the single pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.bars import Ratio, program
from tests.benchmarks.measuring import machine, take_turns, versions
from tests.benchmarks.rows import FIGURES, GROUPS, LONG_GROUPS, RATIOS

LONGER = 1.03
"""Most of the time of a peer's training that ours may take."""
PAGES = Path(__file__).parents[2] / "docs"


def measure_ratios(case: str, folder: Path, repeats: int | None) -> list[str]:
    """The rows of one case: its programs take turns, so that all of them see the same machine."""
    rows = [ratio for ratio in RATIOS if ratio.case == case]
    edges = dict.fromkeys(row.edge for row in rows)
    return [line for edge in edges for line in _ratios_of([row for row in rows if row.edge == edge], folder, repeats)]


def _ratios_of(rows: list[Ratio], folder: Path, repeats: int | None) -> list[str]:
    """Rows of the same edge."""
    names = [name for row in rows for name in (row.ours, row.peer)]
    results = take_turns(names, lambda name: program(name, folder, rows[0].edge), repeats or rows[0].repeats)
    lines = []
    for row in rows:
        ours, peer = ([result[row.figure] for result in results[name]] for name in (row.ours, row.peer))
        unit = " dB" if row.figure == "decibels" else ""
        middle = _compared(statistics.median(ours), statistics.median(peer), row.figure)
        pairs = [_compared(a, b, row.figure) for a, b in zip(ours, peer, strict=True)]
        bar, verdict = ("", "") if row.bar is None else (f"≤ {row.bar:g}{unit}", _verdict(middle, row.bar))
        verdict = _with_times(verdict, results[row.ours], results[row.peer])
        lines.append(
            f"| {row.title} | {bar} | **{middle:.3f}{unit}** | {min(pairs):.3f}–{max(pairs):.3f} | "
            f"{_amount(ours, row.figure)} / {_amount(peer, row.figure)} | {verdict} |"
        )
    return lines


def measure_figures(case: str, folder: Path, repeats: int | None) -> list[str]:
    """The rows of one case that are figures of ours alone."""
    lines = []
    for figure in (f for f in FIGURES if f.case == case):
        values = [figure.measure(folder) for _ in range(repeats or figure.repeats)]
        middle = statistics.median(values)
        print(f"  {figure.title}: {middle:.3g} {figure.unit}", file=sys.stderr, flush=True)
        lines.append(
            f"| {figure.title} | ≤ {figure.bar:g} {figure.unit} | **{middle:.3g} {figure.unit}** | "
            f"{min(values):.3g}–{max(values):.3g} | {len(values)} runs | {_verdict(middle, figure.bar)} |"
        )
    return lines


def _compared(ours: float, peer: float, figure: str) -> float:
    """What has to be at most the bar."""
    return peer - ours if figure == "decibels" else ours / peer


def _amount(values: list[float], figure: str) -> str:
    """The median in its unit."""
    middle = statistics.median(values)
    if figure.endswith("bytes"):
        return f"{middle / 1e6:.0f} MB"
    if figure.endswith("seconds") and middle < 0.1:
        return f"{1e3 * middle:.2f} ms"
    form, _, unit = {"decibels": ".2f dB", "seconds": ".2f s", "cpu_seconds": ".2f s"}.get(figure, ".3f").partition(" ")
    return f"{middle:{form}} {unit}".rstrip()


def _verdict(value: float, bar: float) -> str:
    return "reached" if value <= bar else "missed"


def _with_times(verdict: str, ours: list[dict[str, float]], peer: list[dict[str, float]]) -> str:
    """The verdict with the seconds that both trained; without a verdict where ours did so for longer."""
    if not all("trained_seconds" in result for result in (*ours, *peer)):
        return verdict
    times = [statistics.median(result["trained_seconds"] for result in each) for each in (ours, peer)]
    text = f"trained {times[0]:.0f} s / {times[1]:.0f} s"
    if times[0] > LONGER * times[1]:
        return f"**not the same time**: {text}"
    return f"{verdict}, {text}" if verdict else text


def write_table(group: str, rows: list[str]) -> None:
    """Put a table between the two marks of its group, on the page that has them, if any."""
    table = "\n".join(
        [
            f"Measured {date.today().isoformat()}, {machine()}, {versions('dask', 'zarr', 'torch', 'numpy', 'deepinv', 'monai')}.",
            "",
            "| case | bar | measured | single pairs | medians | |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    begin, end = f"<!-- {group} -->", f"<!-- /{group} -->"
    for page in PAGES.glob("*.md"):
        head, mark, rest = page.read_text().partition(begin)
        _, closing, tail = rest.partition(end)
        if mark and closing:
            page.write_text(f"{head}{begin}\n{table}\n{end}{tail}")


def main() -> None:
    """Measure the groups and cases named, or all but the long ones; the table of each group that is measured as a whole is written."""
    groups = GROUPS | LONG_GROUPS
    cases = [case for group in groups.values() for case in group]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="GROUP|CASE", help=", ".join([*groups, *cases]))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="training: small, to try it; no table is written")
    given = parser.parse_args()
    wanted = [f"{name}-quick" if given.quick else name for name in given.names or GROUPS]
    if unknown := [name for name in wanted if name not in groups and name not in cases]:
        parser.error(f"there is no {unknown[0]}; write some of {', '.join([*groups, *cases])}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each program would compile the package anew
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        for name in wanted:
            rows = []
            for case in groups.get(name, (name,)):
                print(case, file=sys.stderr, flush=True)
                rows += measure_ratios(case, folder, given.repeats)
                rows += measure_figures(case, folder, given.repeats)
            print("\n".join(rows))
            if name in groups:
                write_table(name, rows)


if __name__ == "__main__":
    main()
