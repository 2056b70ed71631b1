"""The figures that every plan has, as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.jobs.base import Row
from halotile.graphs.units import rate_text, shape_text

Figures = Mapping[str, Any]
"""What ``summary()`` of a plan says."""


def output_rows(figures: Figures) -> list[Row]:
    """What is cut how."""
    return [
        ("blocks", _blocks(figures)),
        ("shards", f"{shape_text(figures['shard'])}, in chunks of {shape_text(figures['chunk'])}"),
    ]


def device_text(figures: Figures) -> str:
    """What computes a denoiser, and how exactly."""
    device = "CPUs" if figures["device"] == "cpu" else "GPUs"
    return f"on {device} in {figures['precision']}"


def tiles_text(figures: Figures) -> str:
    """How many pixels are denoised at once, and why so many."""
    text = f"{shape_text(figures['tile'])}, {figures['batch']} at once"
    tuned = figures.get("tuned")
    if not tuned or figures["device"] == "cpu":
        return text
    if (list(figures["tile"]), figures["batch"]) != (list(tuned["tile"]), tuned["batch"]):
        return text  # other than was found
    count = len(tuned["tried"])
    found = f"the fastest of {count} tried" if count > 1 else "tried"
    if tuned["records"]:
        found += ", recorded"
    return f"{text}: {found} on {tuned['device']}, {rate_text(tuned['megapixels_per_second'])} there"


def cost_rows(figures: Figures) -> list[Row]:
    """What it takes, and what there is to be said."""
    return [
        ("memory", _memory(figures)),
        *_device_memory(figures),
        ("disk", _disk(figures)),
        ("workers", _workers(figures)),
        *[("note", str(note)) for note in figures.get("notes", ())],
    ]


def _blocks(figures: Figures) -> str:
    text = f"{figures['blocks']:,} of {shape_text(figures['block'])}"
    resumed = figures.get("resumed_blocks", 0)
    if resumed:
        return f"{text}; {resumed:,} {'is' if resumed == 1 else 'are'} done already"
    return f"{text}; goes on with the run that stands there" if figures.get("resumes") else text


def _memory(figures: Figures) -> str:
    peak, allowed = figures["peak_memory_per_worker_bytes"], figures["memory_per_worker_bytes"]
    return f"{bytes_text(peak)} at the peak in each worker, of {bytes_text(allowed)} allowed"


def _device_memory(figures: Figures) -> list[Row]:
    """What is taken of a GPU, where that was measured."""
    peak, tuned = figures.get("device_memory_bytes"), figures.get("tuned")
    if peak is None or not tuned:
        return []
    allowed = f", of {bytes_text(tuned['free_bytes'])} that are free for it" if tuned["free_bytes"] else ""
    return [("GPU memory", f"{bytes_text(peak)} at the peak in each worker{allowed}")]


def _disk(figures: Figures) -> str:
    text = f"up to {bytes_text(figures['output_bytes'])} of output"
    if "files" in figures:
        text += f" in {counted(figures['files'], 'file')} ({figures['inodes']:,} inodes)"
    scratch = figures["scratch_bytes"]
    text += f" and {bytes_text(scratch)} of scratch" if scratch else ", no scratch"
    return f"{text}; {bytes_text(figures['free_disk_bytes'])} free"


def _workers(figures: Figures) -> str:
    why, where = figures.get("workers_from"), figures.get("cluster")
    return ", ".join(filter(None, (str(figures["workers"]), why, where and f"on cluster {where}")))
