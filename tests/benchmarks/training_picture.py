"""The picture of docs/training.md, drawn from the tables of docs/benchmarks.md: ``python tests/benchmarks/training_picture.py``."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.run import PAGES

PICTURE = PAGES / "images" / "training.png"
ROW = re.compile(
    r"\| (?P<case>\w+, [^|]*), (?P<minutes>[\d.]+) min of training: PSNR of (?P<other>\S+)[^|]* less ours \|"
    r".*\| (?P<ours>[\d.]+) dB / (?P<theirs>[\d.]+) dB \|"
)
COLOURS = {"halotile": "C0", "CAREamics": "C1", "tv": "0.35", "nlm": "0.6"}
Curves = dict[str, dict[float, float]]
"""PSNR by minutes, by program."""


def curves_in(page: str) -> dict[str, Curves]:
    """The curves in a page, by image and noise."""
    found: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    for row in ROW.finditer(page):
        minutes, curves = float(row["minutes"]), found[row["case"]]
        curves["halotile"][minutes] = float(row["ours"])
        curves[row["other"].strip("`")][minutes] = float(row["theirs"])
    return found


def draw(found: dict[str, Curves], path: Path) -> None:
    """Draw PSNR over minutes: trained networks as points that are joined, the others as lines across."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(3.2 * len(found), 3.6), layout="constrained")
    minutes = sorted({minute for curves in found.values() for minute in curves["halotile"]})
    for axis, (case, curves) in zip(axes, sorted(found.items(), reverse=True), strict=True):
        for name, colour in COLOURS.items():
            points = sorted(curves[name].items())
            if name in ("tv", "nlm"):
                axis.axhline(points[0][1], color=colour, linestyle="--", label=name)
            else:
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        axis.set_xscale("log")
        axis.set_xlim(0.8 * minutes[0], 1.25 * minutes[-1])
        axis.set_xticks(minutes, [f"{minute:g}" for minute in minutes])
        axis.minorticks_off()
        axis.set(title=case.replace(", ", "\n"), xlabel="minutes of training")
    axes[0].set_ylabel("PSNR (dB)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    draw(curves_in((PAGES / "benchmarks.md").read_text()), PICTURE)
