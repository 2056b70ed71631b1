"""The figures of a plan and of a finished run, as rows for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from halotile.cli.screen import Row
from halotile.cli.units import bytes_text, counted, rate_text, seconds_text, shape_text

if TYPE_CHECKING:
    from halotile.graphs.tiles import Outcome
    from halotile.graphs.verify import Verdict


def plan_rows(figures: Mapping[str, Any]) -> list[Row]:
    """What ``Plan.summary()`` says, in the order in which it is asked."""
    return [
        ("input", str(figures["input"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}, axes {figures['axes']}"),
        ("output", str(figures["output"])),
        ("", f"{shape_text(figures['output_shape'])} {figures['output_dtype']}"),
        ("denoiser", str(figures["denoiser"])),
        ("", ""),
        ("blocks", _blocks(figures)),
        ("shards", f"{shape_text(figures['shard'])}, in chunks of {shape_text(figures['chunk'])}"),
        ("tiles", f"{shape_text(figures['tile'])}, {figures['batch']} at once"),
        ("depth", f"{_depth(figures['depth'])} pixels, {figures['depth_from']}"),
        ("boundary", str(figures["boundary"])),
        ("read", f"{figures['read_amplification']:.2f} × the picture"),
        ("computed", f"{figures['compute_redundancy']:.2f} × the picture"),
        ("", ""),
        ("memory", _memory(figures)),
        ("disk", _disk(figures)),
        ("workers", str(figures["workers"])),
        *[("note", str(note)) for note in figures.get("notes", ())],
    ]


def headline(figures: Mapping[str, Any]) -> str:
    """A plan in one line."""
    blocks, workers = counted(figures["blocks"], "block"), counted(figures["workers"], "worker")
    return (
        f"{figures['denoiser']}: {shape_text(figures['shape'])} {figures['dtype']} in {blocks}, "
        f"depth {_depth(figures['depth'])} ({figures['depth_from']}), {workers}"
    )


def _blocks(figures: Mapping[str, Any]) -> str:
    text = f"{figures['blocks']:,} of {shape_text(figures['block'])}"
    resumed = figures.get("resumed_blocks", 0)
    if resumed:
        return f"{text}; {resumed:,} {'is' if resumed == 1 else 'are'} done already"
    return f"{text}; goes on with the run that stands there" if figures.get("resumes") else text


def _depth(depth: Any) -> str:
    """Halo widths: one number where all sides are alike.

    Examples
    --------
    >>> _depth([[8, 8], [8, 8]]), _depth([[8, 8], [4, 2]])
    ('8', '8 × 4+2')
    """
    pairs = [(pair, pair) if isinstance(pair, int) else tuple(pair) for pair in depth]
    words = [str(before) if before == after else f"{before}+{after}" for before, after in pairs]
    return words[0] if len(set(words)) == 1 else " × ".join(words)


def _memory(figures: Mapping[str, Any]) -> str:
    peak, allowed = figures["peak_memory_per_worker_bytes"], figures["memory_per_worker_bytes"]
    return f"{bytes_text(peak)} at the peak in each worker, of {bytes_text(allowed)} allowed"


def _disk(figures: Mapping[str, Any]) -> str:
    text = f"up to {bytes_text(figures['output_bytes'])} of output"
    scratch = figures["scratch_bytes"]
    text += f" and {bytes_text(scratch)} of scratch" if scratch else ", no scratch"
    return f"{text}; {bytes_text(figures['free_disk_bytes'])} free"


def outcome_rows(outcome: Outcome) -> list[Row]:
    """How a run went, and how to look at what it made."""
    resumed = f", {outcome.resumed:,} of them by an earlier run" if outcome.resumed else ""
    rows = [
        ("output", outcome.output),
        ("blocks", f"{outcome.done:,} of {outcome.total:,} done{resumed}"),
    ]
    if outcome.done > outcome.resumed:
        rate = rate_text(outcome.megapixels_per_second)
        rows += [
            ("throughput", f"{rate} over {seconds_text(outcome.seconds)}"),
            ("peak memory", f"{bytes_text(outcome.peak_memory_bytes)} in one worker"),
        ]
    return [
        *rows,
        ("journal", outcome.run_directory),
        ("look at it", f"recon-cli preview {_quoted(outcome.output)} {_quoted(_picture_of(outcome.output))}"),
        ("", f"napari {_quoted(outcome.output)}"),
    ]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """How a run went, for programs."""
    plain = (
        "output",
        "run_directory",
        "done",
        "total",
        "resumed",
        "seconds",
        "megapixels_per_second",
        "peak_memory_bytes",
    )
    quarantined = [
        {
            "number": bad.number,
            "index": list(bad.index),
            "region": [list(bad.region.start), list(bad.region.stop)],
            "error": bad.error,
        }
        for bad in outcome.quarantined
    ]
    return {name: getattr(outcome, name) for name in plain} | {"quarantined": quarantined}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """What a check found, for programs."""
    return {
        "ok": verdict.sound and not verdict.undone,
        "blocks": verdict.blocks,
        "checked": verdict.checked,
        "undone": len(verdict.undone),
        "undone_blocks": verdict.undone.to_text(),
        "problems": list(verdict.problems),
        "repaired": verdict.repaired,
    }


def verdict_lines(output: PurePath, verdict: Verdict) -> list[str]:
    """What a check found, for people."""
    lines = list(verdict.problems)
    if not lines:
        checked = f"{verdict.checked:,} of {counted(verdict.blocks, 'block')} checked"
        lines.append(f"{output}: {'all that is done is ' if verdict.undone else ''}sound, {checked}")
    elif verdict.sound:
        lines.append(f"{output}: {counted(verdict.repaired, 'problem')} repaired")
    if count := len(verdict.undone):
        are = "block is" if count == 1 else "blocks are"
        lines.append(
            f"{count:,} {are} not done: {_cut(verdict.undone.to_text())} (quarantined, or not yet run)"
        )
    return lines


def remedy(output: PurePath, verdict: Verdict, *, at_work: bool, imports: str = "") -> str:
    """What is wrong with an output and what to do, as the end of a sentence; nothing where all is well.

    Parameters
    ----------
    output : path
        As it was typed.
    verdict : Verdict
        What the check found.
    at_work : bool
        Whether a run was writing the output at the time: nobody else may, then.
    imports : str
        What ends a command for a job that imports code.
    """
    if not verdict.sound and not verdict.repairable:
        return (
            f"damaged, and has no run directory {output}.run beside it to repair it from. Copy that here, or run "
            "its configuration again with output.overwrite: true."
        )
    if not verdict.sound:
        wait = "A run is still writing it: when that is over, " if at_work else ""
        return f"damaged. {wait}`recon-cli verify {output} --repair{imports}` {_repairs(verdict.problems)}."
    if not verdict.undone:
        return ""
    if at_work:
        return (
            f"not complete: a run is still writing it. Wait until that is over; `recon-cli status {output} --watch` "
            "shows how far it is."
        )
    return f"not complete. `recon-cli resume {output}{imports}` does the blocks that are left."


def _repairs(problems: Iterable[str]) -> str:
    """What a repair does about problems.

    Examples
    --------
    >>> _repairs(["metadata: zarr.json is missing", "block 3: cut short"])
    'restores the metadata and does the damaged blocks again'
    """
    metadata = [problem.startswith("metadata: ") for problem in problems]
    doings = ["restores the metadata"] if any(metadata) else []
    doings += [] if all(metadata) else ["does the damaged blocks again"]
    return " and ".join(doings)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _picture_of(output: str) -> str:
    """A file name for a picture of an output.

    Examples
    --------
    >>> _picture_of("/data/clean.zarr")
    'clean.png'
    """
    return f"{PurePath(output).stem}.png"


def _quoted(path: str) -> str:
    return shlex.quote(path)
