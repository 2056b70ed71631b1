"""The table of a GPU: ``python tests/benchmarks/bench_gpu.py [--edge N] [--repeats N] [--out FILE] [--device cpu]``.

Programs take turns, each in a process of its own; ratios are of the medians of one run. With ``--device cpu`` the same programs
run on the CPU, on small images: a rehearsal, whose figures say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.bars import program
from tests.benchmarks.measuring import machine, take_turns, versions

DOCS = Path(__file__).parents[2] / "docs"
Results = dict[str, list[dict[str, Any]]]
Counted = Callable[[dict[str, Any]], float]
COLUMNS = "| case | bar | measured | single runs | medians | |\n|---|---|---|---|---|---|"
NOTES = """\
- **end to end** is a job from Zarr to Zarr on workers that are up and have begun with CUDA: the model brought to the GPU, blocks read,
  computed, encoded, written and synced, journal kept. The plan was made before; how long that took has a row of its own.
- **bare forward** is the same model on pixels that are on the GPU already, float32 without TF32, cuDNN choosing by stopwatch: no
  halo, no disk, the best of some tiles, batches and memory layouts. A job's cuDNN chooses by rule, so that all workers write the same bits; what that
  costs has a row of its own. It counts every pixel that goes through the model.
- **with the halo counted** is the same ratio with the pixels of the halo counted as work of ours.
- **pure copy** is one worker's reads and writes of the same blocks, with the same threads and nothing computed.
- **busy** is the time between the beginning and the end of each block's work on the GPU, by its own clock, of the time in which blocks
  streamed, for each worker. Gaps between the kernels of a block count as busy. Where two share a GPU, the clock of each runs on while the other computes.
- **VRAM** is torch's own peak of allocated memory, the larger of the workers'.
- **CDTools** is its own example with Adam on the GPU, ours the same job on one worker. Both refine object, probe and positions in float32. The
  bare loop is forward, backward and Adam on pixels that are on the GPU; a step draws its patches and masks them, and records its loss.
- **MONAI** and **deepinv.distributed** get the image on the GPU and leave the result there: no disk. Windows of 2048 with as little
  overlap as the network allows, or their defaults, which leave seams where the network looks farther. The memory layout is that in which the
  bare forward is faster."""


@dataclass(frozen=True)
class Case:
    """One subject of the table, and what is asked of it."""

    word: str
    title: str
    edge: int
    small_edge: int
    """Of the rehearsal on the CPU."""
    bare_bar: float | None = None
    copy_bar: float | None = None
    peers: bool = True
    share: float = 0.25
    """Of the minutes."""


CASES = {
    "cnn": Case("cnn", "7-layer 32-channel CNN", 32768, 512, bare_bar=0.7),
    "gaussian": Case("gaussian", "gaussian, σ = 2", 32768, 512, copy_bar=0.8, peers=False),
    "unet": Case("unet", "residual U-Net, {}", 24576, 384, bare_bar=0.9, share=0.5),
}
STAGES = {
    "waiting for blocks to be read, decoded and staged": "read_ms",
    "computing blocks, by the GPU's clock": "compute_ms",
    "converting, encoding, writing and syncing blocks": "write_ms",
}
LOOPS = "loops"
"""The case with rows of training and ptychography, whose steps take milliseconds."""
PEERS = {
    "monai": ("monai least", "MONAI, windows of 2048"),
    "monai default": ("monai default", "MONAI, its default overlap"),
    "deepinv": ("deepinv large", "deepinv.distributed, patches of 2048"),
    "deepinv default": ("deepinv default", "deepinv.distributed, its defaults"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table; 1 where a program failed or a bar is missed, 2 without a GPU."""
    given = _arguments(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        device = program("gpu_programs.gpu", folder, 0, given.device)
        if device["name"] is None:
            print("no GPU here: torch sees no CUDA device, so there is nothing to measure", file=sys.stderr)
            return 2
        if given.look:
            print(f"{device['name']} is here", file=sys.stderr)
            return 0
        bench = Bench(folder, given.device, given.repeats, given.minutes, given.unet_width)
        lines = [*head(device, given.device), "", COLUMNS]
        print("\n".join(lines), flush=True)
        for name in given.only or (*CASES, LOOPS):
            print(name, file=sys.stderr, flush=True)
            rows = bench.rows(CASES[name], given.edge) if name in CASES else bench.loop_rows()
            lines += rows
            print("\n".join(rows), flush=True)
            if given.out:  # what is measured by now is safe
                given.out.write_text("\n".join([*lines, "", NOTES, ""]))
    print(f"\n{NOTES}", flush=True)
    missed = sum(line.endswith("| missed |") for line in lines)
    if missed:
        print(f"{missed} of the bars {'is' if missed == 1 else 'are'} missed", file=sys.stderr)
    # On the CPU bars mean nothing.
    return 1 if bench.failed or (missed and given.device == "cuda") else 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="CASE", help=", ".join((*CASES, LOOPS)))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--edge", type=int, help="edge of the images in pixels, a multiple of 128")
    parser.add_argument("--look", action="store_true", help="only look whether there is a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="no round but the first begins that would end later")
    parser.add_argument("--unet-width", type=int, help="channels of the U-Net at full resolution")
    parser.add_argument("--folder", type=Path, help="where images and outputs go; by default a temporary one")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    given = parser.parse_args(words)
    if given.repeats < 1 or (given.edge is not None and (given.edge < 1 or given.edge % 128)):
        parser.error("--repeats is at least 1, and --edge a multiple of 128 pixels")
    if unknown := set(given.only) - {*CASES, LOOPS}:
        parser.error(f"there is no {unknown.pop()}; write some of {', '.join((*CASES, LOOPS))}")
    if given.device == "cpu" and given.out and DOCS in given.out.resolve().parents:
        parser.error("figures of the CPU do not belong into the documentation: write another --out")
    given.unet_width = given.unet_width or (64 if given.device == "cuda" else 8)
    return given


def head(device: dict[str, Any], kind: str) -> list[str]:
    """Where and with what the table was measured; that it was not, on the CPU."""
    packages = versions("dask", "zarr", "torch", "numpy")
    if kind == "cpu":
        return [
            f"**A rehearsal on the CPU**, {date.today().isoformat()}, {machine()}, {packages}: the same programs on small images. "
            "None of these figures says anything about a GPU."
        ]
    return [
        f"Measured {date.today().isoformat()} on one {device['name']} ({device['memory_bytes'] / 2**30:.0f} GiB), {machine()}, "
        f"{packages}, CUDA {device['cuda']}, cuDNN {device['cudnn']}."
    ]


@dataclass
class Bench:
    """Runs the programs and makes rows of what they give.

    Parameters
    ----------
    folder : Path
        Where images and outputs go.
    device : str
        ``cuda``, or ``cpu`` for a rehearsal.
    repeats, minutes
        Rounds, and how long all of them may take.
    width : int
        Channels of the U-Net.
    run : callable
        Runs a program of a name, a folder, an edge and further words.
    """

    folder: Path
    device: str
    repeats: int
    minutes: float
    width: int
    run: Callable[..., dict[str, Any]] = program
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self, case: Case, edge: int | None) -> list[str]:
        """The rows of a case."""
        edge = edge or (case.edge if self.device == "cuda" else case.small_edge)
        word = f"{case.word}-{self.width}" if case.word == "unet" else case.word
        keys = ["ours 1", "ours 2", "bare", "copy", "lanes"]
        if case.bare_bar is not None:
            keys.append("bare rule")
        if case.peers:
            keys += [key for key, _ in PEERS.values() if is_installed(key)]
        return list(self._table(keys, case.share, edge, word).lines(case, f"{self._title(case)} {edge}²"))

    def loop_rows(self) -> list[str]:
        """The rows of training and of ptychography."""
        peers = ["cdtools petra", "cdtools far"] if is_installed("cdtools") else []
        table = self._table(["scan petra", "scan far", *peers, "step", "loop"], 0.25, 512)
        return [
            table.times("an epoch of the scan of PETRA III / CDTools", "scan petra", "cdtools petra"),
            table.times("an epoch of 32 × 32 patterns of 128², 2 modes / CDTools", "scan far", "cdtools far"),
            table.times("a step of training, 16 patches of 64² / a bare loop", "step", "loop"),
        ]

    def _table(self, keys: Sequence[str], share: float, edge: int, *words: str) -> Table:
        """What programs give that take turns, in their share of the minutes."""
        self.failed_here: dict[str, str] = {}
        results = take_turns(keys, lambda key: self._once(key, edge, *words), self.repeats, 60 * self.minutes * share)
        self.failed |= self.failed_here
        return Table(results, self.failed_here)

    def _title(self, case: Case) -> str:
        if case.word != "unet":
            return case.title
        from tests.benchmarks.unets import parameters

        return case.title.format(f"{parameters(self.width) / 1e6:.3g} M parameters")

    def _once(self, key: str, edge: int, *words: str) -> dict[str, Any]:
        """One run of a program; one that failed is not tried again, and the others go on."""
        if key in self.failed_here:
            return {}
        name, *more = key.split()
        try:
            return self.run(f"gpu_programs.{name}", self.folder, edge, self.device, *words, *more)
        except SystemExit as error:
            print(error, file=sys.stderr, flush=True)
            self.failed_here[key] = str(error).strip().splitlines()[-1]
            return {}


def is_installed(key: str) -> bool:
    """Whether the peer that a program runs is."""
    return importlib.util.find_spec(key.split()[0]) is not None


@dataclass
class Table:
    """What the programs gave, as rows."""

    results: Results
    failed: dict[str, str]

    def lines(self, case: Case, title: str) -> Iterator[str]:
        """The rows of a case, in order."""
        one, two, rate = "ours 1", "ours 2", "mpix_per_s"
        yield self.figure(f"{title}, end to end, one worker", one, rate, "Mpix/s")
        yield self.figure("the same while blocks stream", one, "streaming_mpix_per_s", "Mpix/s")
        yield self.ratio("end to end / bare forward", one, "bare", case.bare_bar)
        yield self.ratio(
            "the same with the halo counted", one, "bare", None, lambda ours: ours[rate] * ours["redundancy"]
        )
        if case.bare_bar is not None:
            yield self.ratio("bare forward, cuDNN choosing by rule / by stopwatch", "bare rule", "bare", None)
        yield self.ratio(
            "while blocks stream / pure copy", one, "copy", case.copy_bar, lambda ours: ours["streaming_mpix_per_s"]
        )
        yield self.figure("busy, one worker", one, "busy", "")
        for stage, name in STAGES.items():
            yield self.figure(f"{stage}, for each million pixels", "lanes", name, "ms")
        yield self.memory(one)
        yield self.ratio("two workers on the GPU / one", two, one, None)
        yield self.figure("busy, two workers", two, "busy", "")
        if case.peers:
            for peer, shown in PEERS.values():
                yield self.ratio(f"end to end / {shown}", one, peer, 1.0)
        yield self.figure("the plan, made once", one, "plan_seconds", "s")
        yield self.chosen(one)

    def figure(self, title: str, key: str, name: str, unit: str) -> str:
        """A row of one figure."""
        if key in self.failed:
            return self._failure(title, key)
        values = self.values(key, name)
        middle = statistics.median(values)
        runs = f"{len(values)} run{'s' if len(values) > 1 else ''}"
        return _row(title, "", f"{middle:.3g} {unit}".strip(), _range(values), runs, "")

    def ratio(
        self,
        title: str,
        key: str,
        other: str,
        least: float | None,
        counted: Counted = lambda result: result["mpix_per_s"],
    ) -> str:
        """A row of one throughput over another, perhaps with the least that it may be."""
        return self._compared(title, key, other, least, counted, "mpix_per_s", "Mpix/s")

    def times(self, title: str, key: str, other: str) -> str:
        """A row of the time of one over that of another, if there is one."""
        return self._compared(title, key, other, None, lambda result: 1e3 * result["seconds"], "seconds", "ms")

    def _compared(
        self, title: str, key: str, other: str, least: float | None, counted: Counted, name: str, unit: str
    ) -> str:
        bar = f"≥ {least:g}" if least is not None else ""
        for each in (key, other):
            if each in self.failed:
                return self._failure(title, each, bar)
        ours = [counted(result) for result in self.results[key]]
        if other not in self.results:
            middle = f"{statistics.median(ours):.3g} ms; " if unit == "ms" else ""
            return _row(title, bar, "not measured", "", f"{middle}{other.split()[0]} is not installed", "")
        theirs = [(1e3 if unit == "ms" else 1) * each for each in self.values(other, name)]
        middles = statistics.median(ours), statistics.median(theirs)
        ratio = middles[0] / middles[1]
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        verdict = "" if least is None else _verdict(ratio >= least)
        way = self.results[other][-1].get("way")
        medians = f"{middles[0]:.3g} / {middles[1]:.3g} {unit}" + (f" ({way})" if way else "")
        return _row(title, bar, f"{ratio:.3f}", _range(pairs), medians, verdict)

    def memory(self, key: str) -> str:
        """Peak VRAM over what was planned."""
        title, bar = "peak VRAM / plan", "0.9 to 1.1"
        if key in self.failed:
            return self._failure(title, key, bar)
        peaks, plans = self.values(key, "peak_bytes"), self.values(key, "planned_bytes")
        if not min(plans):
            return _row(title, bar, "not measured", "", "nothing is planned of the device's memory", "")
        ratios = [peak / plan for peak, plan in zip(peaks, plans, strict=True)]
        middle = statistics.median(ratios)
        medians = f"{statistics.median(peaks) / 1e6:.0f} / {statistics.median(plans) / 1e6:.0f} MB"
        return _row(title, bar, f"{middle:.3f}", _range(ratios), medians, _verdict(0.9 <= middle <= 1.1))

    def chosen(self, key: str) -> str:
        """The sizes that the plan chose."""
        if key in self.failed:
            return self._failure("tile, batch and block of the plan", key)
        last = self.results[key][-1]
        sizes = f"{last['batch']} × {_edges(last['tile'])}, blocks of {_edges(last['block'])}"
        return _row("tile, batch and block of the plan", "", sizes, "", "", "")

    def values(self, key: str, name: str) -> list[float]:
        """One figure of every run."""
        return [result[name] for result in self.results[key]]

    def _failure(self, title: str, key: str, bar: str = "") -> str:
        return _row(title, bar, "failed", "", f"{key}: {self.failed[key].replace('|', '/')}", "failed")


def _row(title: str, bar: str, measured: str, spread: str, medians: str, verdict: str) -> str:
    return f"| {title} | {bar} | **{measured}** | {spread} | {medians} | {verdict} |"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _range(values: list[float]) -> str:
    return f"{min(values):.3g}–{max(values):.3g}"


def _edges(shape: list[int]) -> str:
    return " × ".join(map(str, shape))


if __name__ == "__main__":
    sys.exit(main())
