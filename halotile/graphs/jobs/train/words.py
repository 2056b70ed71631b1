"""A training job, its plan and its result as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.graphs.amounts import counted
from halotile.graphs.jobs.train.job import Training
from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.plans.rows import cost_rows
from halotile.graphs.units import seconds_text, shape_text

OTHER = "{name: tv, strength: 1.0, sigma: auto}"
"""A denoiser that needs no training, to compare with."""
FAST = "mode fast: added in the order of the backend; the bits of the weights depend on the number of workers"


def title(job: Training) -> str:
    """Describe a job in a few words."""
    return f"{job.network.name} trained by {job.method} on {job.input.path}"


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    steps, workers = counted(figures["steps"], "step"), counted(figures["workers"], "worker")
    return f"{figures['network']} trained by {figures['method']} on {_images(figures)}: {steps}, {workers}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    second = figures["second"]
    rows = [("input", str(figures["input"])), ("", _images(figures))]
    if second:
        rows.append(("second", str(second)))
    took = figures["seconds_per_step"]
    length = f"{counted(figures['steps'], 'step')} of {figures['batch']} patches of {figures['patch']} × {figures['patch']}"
    return [
        *rows,
        ("output", str(figures["output"])),
        ("network", f"{figures['network']}, {figures['channels_text']}, on {figures['device_text']}"),
        ("method", str(figures["method"])),
        *([("gradients", FAST)] if figures["mode"] == "fast" else []),
        ("", ""),
        ("length", f"{length}: {figures['epochs']:.3g} epochs"),
        *([("", f"about {seconds_text(took * figures['steps'])}, by a trial")] if took else []),
        ("", ""),
        *cost_rows(figures),
    ]


def result_rows(last: Mapping[str, float], denoiser: Mapping[str, Any], examples: Path) -> list[Row]:
    """Return the end of a training as a table.

    Examples
    --------
    >>> rows = result_rows({"loss": 0.25, "validation": 0.3}, {"name": "unet", "weights": "unet.safetensors"}, Path("examples.png"))
    >>> for row in rows:
    ...     print(*row)
    loss 0.25, on held-out patches 0.3
    examples examples.png
    denoise with denoiser: {name: unet, weights: unet.safetensors}
    compare a short training may be worse than tv. With a job file denoise.yaml of that denoiser: recon-cli try denoise.yaml --set "denoiser={name: unet, weights: unet.safetensors},{name: tv, strength: 1.0, sigma: auto}"
    """
    held_out = f", on held-out patches {last['validation']:.4g}" if "validation" in last else ""
    keys = ", ".join(f"{key}: {value}" for key, value in denoiser.items())
    rows = [("loss", f"{last['loss']:.4g}{held_out}")] if "loss" in last else []
    compare = f'recon-cli try denoise.yaml --set "denoiser={{{keys}}},{OTHER}"'
    return [
        *rows,
        ("examples", str(examples)),
        ("denoise with", f"denoiser: {{{keys}}}"),
        (
            "compare",
            f"a short training may be worse than tv. With a job file denoise.yaml of that denoiser: {compare}",
        ),
    ]


def _images(figures: Figures) -> str:
    shapes = figures["shapes"]
    return (
        shape_text(shapes[0])
        if len(shapes) == 1
        else f"{len(shapes)} images, the first {shape_text(shapes[0])}"
    )
