"""Results of a run or a check, as rows for people and as JSON."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from halotile.errors import HalotileError
from halotile.graphs.kinds.base import Row, find_kind
from halotile.graphs.watching.progress import Progress, describe_figures, pixel_rows
from halotile.graphs.words import bytes_text, counted, rate_text, seconds_text
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.run_directory.directory import EXAMPLES, RunDirectory
from halotile.storage.sharded.output import ABSENT

if TYPE_CHECKING:
    from halotile.graphs.runs.driver import Outcome
    from halotile.graphs.runs.verify import Verdict

BARS, PLAIN_BARS, MOST_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@", 32
"""Bars of a curve, by height, those where a terminal has no others, and how many there are at most."""


JSON = (
    "output", "run_directory", "done", "total", "resumed", "seconds", "start_seconds", "megapixels_per_second",
    "peak_memory_bytes", "device_peak_bytes", "compute_seconds", "holes", "defects",
)  # fmt: skip
"""Figures of an outcome for programs."""


def outcome_rows(outcome: Outcome, plan_seconds: float, total_seconds: float) -> list[Row]:
    """Return the outcome of a run, with commands to inspect the result. The total is from the command to its end."""
    resumed = f", {outcome.resumed:,} of them by an earlier run" if outcome.resumed else ""
    rows = [("output", outcome.output), (f"{outcome.counted}s", f"{outcome.done:,} of {outcome.total:,} done{resumed}")]
    rows += pixel_rows(outcome)
    if outcome.done > outcome.resumed:
        if rate := outcome.megapixels_per_second:
            rows.append(("throughput", f"{rate_text(rate)} over {seconds_text(outcome.seconds)}"))
        total, plan, start = map(seconds_text, (total_seconds, plan_seconds, outcome.start_seconds))
        rows.append(("time", f"{total} in total, {plan} of it planning and {start} starting workers"))
    rows += peak_rows(outcome)
    if outcome.figures:
        rows.append(("iterations", iteration_text(outcome.figures)))
    return [
        *rows,
        *(("retired", worker) for worker in outcome.retired),
        *outcome.inspection.rows,
        ("journal", outcome.run_directory),
        *look_rows(outcome.output),
    ]


def peak_rows(progress: Progress) -> list[Row]:
    """Return the peaks of memory in one worker that are known."""
    rows: list[Row] = []
    if progress.peak_memory_bytes:
        rows.append(("peak memory", f"{bytes_text(progress.peak_memory_bytes)} in one worker"))
    if progress.device_peak_bytes:
        rows.append(("GPU memory", f"{bytes_text(progress.device_peak_bytes)} at the peak in one worker"))
    return rows


def curve_rows(directory: RunDirectory) -> list[Row]:
    """Return the losses of a run that iterates as bars, and the path of its drawing."""
    losses: list[float] = []
    # It may be written at this moment.
    with suppress(HalotileError, OSError, KeyError, TypeError, ValueError):
        steps = find_kind((directory.read_valid_plan() or {})["job"]).steps
        names = steps.losses if steps else ()
        for line in directory.iterations_path.read_text("utf-8").splitlines():
            row = json.loads(line)
            losses += [float(row[name]) for name in names if name in row][:1]
    losses = [loss for loss in losses if math.isfinite(loss)]
    rows = [("curve", f"{losses[0]:.4g} {bars(losses, _levels())} {losses[-1]:.4g}")] if len(losses) > 1 else []
    drawing = directory.path / EXAMPLES
    return [*rows, *([("drawing", str(drawing))] if drawing.is_file() else [])]


def _levels() -> str:
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BARS
    return BARS


def bars(values: Sequence[float], levels: str = BARS) -> str:
    """Draw values as bars of text, by their logarithms where all are above 0.

    >>> bars([100.0, 10.0, 1.0]), bars([3.0, -1.0, 1.0]), bars([2.0, 2.0]), bars([3.0, 1.0], PLAIN_BARS)
    ('█▅▁', '█▁▅', '▁▁', '@_')
    """
    count = min(len(values), MOST_BARS)
    thinned = [values[n * (len(values) - 1) // max(1, count - 1)] for n in range(count)]
    scaled = [math.log(value) for value in thinned] if min(thinned) > 0 else list(thinned)
    least, span = min(scaled), max(scaled) - min(scaled)
    heights = (round((value - least) / span * (len(levels) - 1)) if span else 0 for value in scaled)
    return "".join(levels[height] for height in heights)


def look_rows(output: str) -> list[Row]:
    """Return commands that show an output; none for a file, which is no image."""
    if os.path.isfile(output):
        return []
    return [
        ("look at it", f"recon-cli preview {_quoted(output)} {_quoted(_image_of(output))}"),
        ("", f"napari {_quoted(output)}"),
    ]


def iteration_text(figures: Mapping[str, float]) -> str:
    """Describe the progress of a solver, with the figures of its last iteration.

    >>> iteration_text({"iteration": 3, "iterations": 20, "change": 0.0123, "psnr": 27.31})
    '3 of 20: change 0.0123, PSNR 27.31 dB'
    """
    count = f"{figures['iteration']:.0f} of {figures['iterations']:.0f}"
    text = describe_figures(figures)
    return f"{count}: {text}" if text else count


def outcome_json(outcome: Outcome, plan_seconds: float, total_seconds: float) -> dict[str, Any]:
    """Return the outcome of a run, for programs."""
    quarantined = [
        {"number": bad.number, "index": list(bad.index), "region": regions, "error": bad.error}
        for bad in outcome.quarantined
        for regions in [[list(bad.region.start), list(bad.region.stop)]]
    ]
    return {
        **{name: getattr(outcome, name) for name in JSON},
        **{"plan_seconds": plan_seconds, "total_seconds": total_seconds, "quarantined": quarantined},
        **{"figures": dict(outcome.figures), **outcome.inspection.figures},
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the result of a check, for programs."""
    return {
        "ok": verdict.sound and not verdict.undone,
        "blocks": verdict.blocks,
        "checked": verdict.checked,
        "checked_against": "journal" if verdict.repairable else "checksums",
        "undone": len(verdict.undone),
        "undone_blocks": verdict.undone.to_text(),
        "problems": list(verdict.problems),
        "repaired": verdict.repaired,
        "unchecked_levels": verdict.unchecked_levels,
    }


def verdict_lines(output: OutputPath, verdict: Verdict) -> list[str]:
    """Return the result of a check, for people."""
    lines = list(verdict.problems)
    if not lines:
        checked = f"{verdict.checked:,} of {counted(verdict.blocks, 'block')} checked"
        sound = "sound" if verdict.repairable else "checksums are right"
        lines.append(f"{output}: {'all that is done is ' if verdict.undone else ''}{sound}, {checked}")
    elif verdict.sound:
        lines.append(f"{output}: {counted(verdict.repaired, 'problem')} repaired")
    if count := len(verdict.undone):
        are = "block is" if count == 1 else "blocks are"
        lines.append(f"{count:,} {are} not done: {_cut(verdict.undone.to_text())} (quarantined, or not yet run)")
    if verdict.unchecked_levels:
        lines.append(
            f"not checked: {counted(verdict.unchecked_levels, 'level')} that `recon-cli levels` added. To make them anew, remove their folders "
            f"and their entries in {output}/zarr.json"
        )
    if not verdict.repairable:
        absent = "" if verdict.unmark else "; where a chunk is missing, its pixels have the fill value"
        lines.append(
            f"no run directory {RunDirectory.beside(output).path}: checked against its checksums only, not whether each shard is in its place{absent}"
        )
    return lines


def remedy(output: OutputPath, verdict: Verdict, *, at_work: bool, imports: str = "") -> str:
    """Describe the problem of an output and the remedy, as the end of a sentence; empty where all is well.

    ``output``: output as it was typed; ``verdict``: result of the check; ``at_work``: true where a run was writing the output at the time: then no
    other process may write; ``imports``: option that ends a command for a job that imports code.
    """
    unmark = verdict.unmark if any(problem.endswith(ABSENT) for problem in verdict.problems) else ""
    if not verdict.sound and not verdict.repairable:
        edited = unmark and f" If another program wrote pixels of the fill value, {unmark}."
        return (
            f"damaged, and has no run directory {RunDirectory.beside(output).path} to repair it from. Copy that there, or run "
            f"its configuration again with output.overwrite: true.{edited}"
        )
    if not verdict.sound:
        wait = "A run is still writing it: when that is over, " if at_work else ""
        repair = f"{wait}`recon-cli verify {_quoted(output)} --repair{imports}` {_repairs(verdict)}"
        if all(problem.startswith("metadata: ") for problem in verdict.problems):
            return f"damaged. {repair}."
        keep = f"move {RunDirectory.beside(output).path} away{unmark and f', and {unmark}'}"
        return f"damaged, or was edited after the run. {repair}, and discards edits. To keep edits, {keep}."
    if not verdict.undone:
        return ""
    if at_work:
        return (
            f"not complete: a run is still writing it. Wait until that is over; `recon-cli status {_quoted(output)} --watch` "
            "shows how far it is."
        )
    return f"not complete. `recon-cli resume {_quoted(output)}{imports}` does the blocks that are left."


def _repairs(verdict: Verdict) -> str:
    """Describe the effect of a repair on an output."""
    metadata = [problem.startswith("metadata: ") for problem in verdict.problems]
    doings = ["restores the metadata"] if any(metadata) else []
    blocks = "does the damaged blocks again"
    if verdict.iterates:
        blocks = "does all passes again, from the start, and writes the damaged blocks"
    doings += [] if all(metadata) else [blocks]
    if undone := len(verdict.undone):
        doings.append(f"does the {counted(undone, 'block')} that {'is' if undone == 1 else 'are'} not done")
    *before, last = doings
    return f"{', '.join(before)} and {last}" if before else last


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _image_of(output: str) -> str:
    """Return a file name for an image of an output.

    >>> _image_of("/data/clean.zarr")
    'clean.png'
    """
    return f"{PurePath(output).stem}.png"


def _quoted(path: str | OutputPath) -> str:
    return shlex.quote(str(path))
