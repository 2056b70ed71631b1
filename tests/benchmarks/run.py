"""Runs the benchmarks and writes their table: ``python tests/benchmarks/run.py [CASE ...] [--repeats N]``.

Each ratio comes from programs that take turns (A B A B ...) in one run, each in a process of its
own; the table shows the ratio of their medians with the range of the single pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Ratio:
    """One bar: a program of ours over a peer's, by a figure of theirs."""

    case: str
    title: str
    ours: str
    peer: str
    edge: int
    bar: float
    repeats: int = 3


@dataclass(frozen=True)
class Figure:
    """One bar on a figure of one program."""

    case: str
    title: str
    measure: Callable[[Path], float]
    unit: str
    bar: float
    repeats: int = 3


RATIOS = [
    Ratio("box", "box filter 8192², job / stock `map_overlap` → Zarr", "ours_box", "stock_box", 8192, 0.22),
    Ratio(
        "box",
        "box filter 8192², job / plain one-process copy, same layout and codecs",
        "ours_box",
        "copy",
        8192,
        1.2,
    ),
    Ratio(
        "cnn",
        "7-layer 32-channel CNN 4096², job / stock `map_overlap` → Zarr",
        "ours_cnn",
        "stock_cnn",
        4096,
        0.58,
    ),
    Ratio("cnn", "the same / best bare torch forward over tiles in RAM", "ours_cnn", "bare_cnn", 4096, 1.08),
    Ratio(
        "cnn",
        "the same / deepinv.distributed, 2 processes, patch 256, overlap 32",
        "ours_cnn",
        "deepinv_cnn",
        4096,
        0.60,
    ),
    Ratio(
        "cnn",
        "the same / deepinv.distributed at its defaults 256/64",
        "ours_cnn",
        "deepinv_cnn_default",
        4096,
        0.40,
    ),
    Ratio("cnn", "the same / MONAI sliding window, least overlap", "ours_cnn", "monai_cnn", 4096, 0.62),
    Ratio(
        "cnn",
        "the same / MONAI sliding window, its default overlap",
        "ours_cnn",
        "monai_cnn_default",
        4096,
        0.62,
    ),
]


def program(name: str, folder: Path, edge: int) -> dict[str, float]:
    """One run of one program."""
    done = subprocess.run(
        [sys.executable, str(HERE / "programs.py"), name, str(folder), str(edge)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def memory_growth(folder: Path) -> float:
    """MB that the peak of all processes grows by when the picture has 16 times the pixels."""
    small = program("ours_gaussian", folder, 4096)["peak_bytes"]
    large = program("ours_gaussian", folder, 16384)["peak_bytes"]
    return (large - small) / 1e6


def start_up(*arguments: str) -> Callable[[Path], float]:
    """Seconds that a recon-cli command takes as a whole process."""

    def measure(folder: Path) -> float:
        job = folder / "job.yaml"
        job.write_text(
            f"version: 1\njob: denoise\ninput: {{path: {folder}}}\noutput: {{path: {folder / 'no.zarr'}}}\n"
            "denoiser: {name: tv, strength: 0.1}\n"
        )
        command = [
            str(Path(sys.executable).with_name("recon-cli")),
            *(a.replace("JOB", str(job)) for a in arguments),
        ]
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        return time.perf_counter() - began

    return measure


def noop(blocks: int, figure: str) -> Callable[[Path], float]:
    """A figure of a run of blocks that do nothing; runs of one number of blocks serve all figures."""
    asked = itertools.count()

    def measure(folder: Path) -> float:
        runs = _noop_runs.setdefault(blocks, [])
        number = next(asked)
        while len(runs) <= number:
            runs.append(program("ours_noop", folder, blocks))
        return runs[number][figure]

    return measure


_noop_runs: dict[int, list[dict[str, float]]] = {}


FIGURES = [
    Figure("memory", "peak memory of all processes, growth from 4096² to 16384²", memory_growth, "MB", 40),
    Figure("noop", "orchestration for each no-op block, 10⁵ blocks", noop(10**5, "per_block_ms"), "ms", 0.06),
    Figure("noop", "the same, 10⁶ blocks", noop(10**6, "per_block_ms"), "ms", 0.06),
    Figure("noop", "growth of all processes over 10⁵ blocks", noop(10**5, "grown_mb"), "MB", 40),
    Figure("noop", "growth of all processes over 10⁶ blocks", noop(10**6, "grown_mb"), "MB", 40),
    Figure("noop", "submit to first answer of a job of 10⁶ blocks", noop(10**6, "first_s"), "s", 0.3),
    Figure("start", "`recon-cli --help`", start_up("--help"), "s", 0.5, 7),
    Figure("start", "`recon-cli validate`", start_up("validate", "JOB"), "s", 0.5, 7),
]


def measure_ratios(case: str, folder: Path, repeats: int | None) -> list[str]:
    """The rows of one case: its programs take turns, so that all of them see the same machine."""
    rows = [ratio for ratio in RATIOS if ratio.case == case]
    if not rows:
        return []
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats or rows[0].repeats):
        for name in dict.fromkeys(name for row in rows for name in (row.ours, row.peer)):
            seconds.setdefault(name, []).append(program(name, folder, rows[0].edge)["seconds"])
            print(f"  {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    lines = []
    for row in rows:
        ours, peer = seconds[row.ours], seconds[row.peer]
        ratio = statistics.median(ours) / statistics.median(peer)
        pairs = [a / b for a, b in zip(ours, peer, strict=True)]
        lines.append(
            f"| {row.title} | ≤ {row.bar:g} | **{ratio:.3f}** | {min(pairs):.3f}–{max(pairs):.3f} | "
            f"{statistics.median(ours):.2f} s / {statistics.median(peer):.2f} s | {_verdict(ratio, row.bar)} |"
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


def _verdict(value: float, bar: float) -> str:
    return "reached" if value <= bar else "missed"


def write_page(rows: list[str]) -> None:
    """Put the table into docs/benchmarks.md, between its two marks."""
    packages = ["dask", "zarr", "torch", "numpy", "deepinv", "monai"]
    table = "\n".join(
        [
            f"Measured {date.today().isoformat()}, {_machine()}, Python {platform.python_version()}, "
            + ", ".join(f"{name} {version(name)}" for name in packages)
            + ".",
            "",
            "| case | bar | measured | single pairs | medians | |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    text = PAGE.read_text()
    head, _, rest = text.partition("<!-- table -->")
    _, _, tail = rest.partition("<!-- /table -->")
    PAGE.write_text(f"{head}<!-- table -->\n{table}\n<!-- /table -->{tail}")


def _machine() -> str:
    import psutil

    return f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}"


def main() -> None:
    """Measure the cases named, or all of them; with all of them the page is written."""
    cases = list(dict.fromkeys([row.case for row in RATIOS] + [row.case for row in FIGURES]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        rows = []
        for case in given.cases or cases:
            print(case, file=sys.stderr, flush=True)
            rows += measure_ratios(case, folder, given.repeats) + measure_figures(case, folder, given.repeats)
        print("\n".join(rows))
    if not given.cases:
        write_page(rows)


if __name__ == "__main__":
    main()
