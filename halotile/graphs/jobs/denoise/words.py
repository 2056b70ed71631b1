"""A denoising job and its plan as text."""

from __future__ import annotations

from typing import Any

from halotile.graphs.amounts import counted
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.plans.probe_rows import probe_rows
from halotile.graphs.plans.rows import cost_rows, device_text, output_rows, tiles_text
from halotile.graphs.units import shape_text


def title(job: Denoising) -> str:
    """Describe a job in a few words."""
    return f"{job.denoiser.name} from {job.input.path} to {job.output.path}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return the figures of ``Plan.summary()`` as rows, in the order of the questions they answer."""
    return [
        ("input", str(figures["input"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}, axes {figures['axes']}"),
        ("output", str(figures["output"])),
        ("", f"{shape_text(figures['output_shape'])} {figures['output_dtype']}"),
        ("denoiser", f"{figures['denoiser']}, {device_text(figures)}"),
        ("", ""),
        *output_rows(figures),
        ("tiles", tiles_text(figures)),
        ("depth", f"{_depth(figures['depth'])} pixels, {figures['depth_from']}"),
        ("boundary", str(figures["boundary"])),
        ("read", f"{figures['read_amplification']:.2f} × the image"),
        ("computed", f"{figures['compute_redundancy']:.2f} × the image"),
        ("", ""),
        *cost_rows(figures),
        *probe_rows(figures),
    ]


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    blocks, workers = counted(figures["blocks"], "block"), counted(figures["workers"], "worker")
    return (
        f"{figures['denoiser']}: {shape_text(figures['shape'])} {figures['dtype']} in {blocks}, "
        f"depth {_depth(figures['depth'])} ({figures['depth_from']}), {workers}"
    )


def _depth(depth: Any) -> str:
    """Describe halo widths: one number where all sides are equal.

    Examples
    --------
    >>> _depth([[8, 8], [8, 8]]), _depth([[8, 8], [4, 2]])
    ('8', '8 × 4+2')
    """
    pairs = [(pair, pair) if isinstance(pair, int) else tuple(pair) for pair in depth]
    words = [str(before) if before == after else f"{before}+{after}" for before, after in pairs]
    return words[0] if len(set(words)) == 1 else " × ".join(words)
