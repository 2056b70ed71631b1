"""The figures of every plan as table rows for people."""

from collections.abc import Mapping
from typing import Any

from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.words import bytes_text, counted, rate_text, shape_text

Found = Mapping[str, Any]  # the mapping of `Tuned.to_json()`


def probe_rows(figures: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a trial: the tiles that were tried, then the precisions where they were compared."""
    tuned: Found | None = figures.get("tuned")
    if not tuned or not tuned["precisions"]:
        return []
    rows = [("", ""), ("tried on", str(tuned["device"]))]
    tiles = [_tile(trial) for trial in tuned["tried"]]
    width = max(map(len, tiles)) + 2
    for number, (tile, trial) in enumerate(zip(tiles, tuned["tried"], strict=True)):
        rows.append(("tiles" if number == 0 else "", f"{tile:<{width}}{_cost(trial, tuned)}"))
    for number, trial in enumerate(tuned["precisions"]):
        rows.append(("precision" if number == 0 else "", f"{trial['name']:<10}{_precision(trial, tuned)}"))
    rows.append(("", "errors are the largest differences from float32 on a CPU, relative to the brightest pixel"))
    return rows


def _tile(trial: Found) -> str:
    return f"{shape_text(trial['tile'])}, {trial['batch']} at once"


def _cost(trial: Found, tuned: Found) -> str:
    """Return speed, and memory where it is that of a GPU."""
    speed = rate_text(tuned["block_pixels"] / 1e6 / trial["seconds"])
    memory = f", {bytes_text(trial['batch_bytes'])} for them" if trial["batch_bytes"] else ""
    chosen = (trial["tile"], trial["batch"]) == (tuned["tile"], tuned["batch"])
    return f"{speed}{memory}{' (chosen)' if chosen and len(tuned['tried']) > 1 else ''}"


def _precision(trial: Found, tuned: Found) -> str:
    """Return speed and error.

    >>> _precision({"seconds": 0.5, "error": 0.0123, "why_not": ""}, {"block_pixels": 1_000_000})
    '2 Mpix/s, error 0.012'
    >>> _precision({"seconds": None, "error": None, "why_not": "of GPUs only"}, {"block_pixels": 1})
    'of GPUs only'
    """
    if trial["seconds"] is None:
        return str(trial["why_not"])
    error = trial["why_not"] if trial["error"] is None else f"error {trial['error']:.2g}"
    return f"{rate_text(tuned['block_pixels'] / 1e6 / trial['seconds'])}, {error}"


def output_rows(figures: Figures) -> list[Row]:
    """Return the rows on the output and its sizes."""
    return [
        ("blocks", _blocks(figures)),
        ("shards", f"{shape_text(figures['shard'])}, in chunks of {shape_text(figures['chunk'])}"),
        ("format", _format(figures)),
    ]


def device_text(figures: Figures) -> str:
    """Return the device and the precision of a denoiser as text."""
    device = "CPUs" if figures["device"] == "cpu" else "GPUs"
    return f"on {device} in {figures['precision']}"


def tiles_text(figures: Figures) -> str:
    """Return the number of pixels denoised at once as text, with its reason."""
    text = f"{shape_text(figures['tile'])}, {figures['batch']} at once"
    tuned = figures.get("tuned")
    if not tuned or figures["device"] == "cpu":
        return text
    if (list(figures["tile"]), figures["batch"]) != (list(tuned["tile"]), tuned["batch"]):
        return text  # other than the trial chose
    count = len(tuned["tried"])
    reason = f"the fastest of {count} tried" if count > 1 else "tried"
    if tuned["records"]:
        reason += ", recorded"
    return f"{text}: {reason} on {tuned['device']}, {rate_text(tuned['megapixels_per_second'])} there"


def cost_rows(figures: Figures) -> list[Row]:
    """Return the rows on the cost of the run, and its notes."""
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
    return f"{text}; resumes the existing run" if figures.get("resumes") else text


def _format(figures: Figures) -> str:
    if figures["format"] == "zarr":
        return "a Zarr array, without levels"
    levels = figures["levels"]
    return "OME-Zarr" + (f" in {len(levels)} levels, the last {shape_text(levels[-1])}" if levels[1:] else "")


def _memory(figures: Figures) -> str:
    peak, allowed = figures["peak_memory_per_worker_bytes"], figures["memory_per_worker_bytes"]
    return f"{bytes_text(peak)} at the peak in each worker, of {bytes_text(allowed)} allowed"


def _device_memory(figures: Figures) -> list[Row]:
    """Return the rows on the memory of a GPU, where it was measured."""
    peak, tuned = figures.get("device_memory_bytes"), figures.get("tuned")
    if peak is None or not tuned:
        return []
    allowed = f", of {bytes_text(tuned['free_bytes'])} that are free for it" if tuned["free_bytes"] else ""
    return [("GPU memory", f"{bytes_text(peak)} at the peak in each worker{allowed}")]


def _disk(figures: Figures) -> str:
    text = f"up to {bytes_text(figures['output_bytes'])} of output"
    if "files" in figures:
        text += f" in {counted(figures['files'], 'file')}"
        text += f" ({counted(figures['inodes'], 'inode')})" if figures["inodes"] else ""
    scratch = figures["scratch_bytes"]
    text += f" and {bytes_text(scratch)} of scratch" if scratch else ", no scratch"
    return f"{text}; {bytes_text(figures['free_disk_bytes'])} free"


def _workers(figures: Figures) -> str:
    why, where = figures.get("workers_from"), figures.get("cluster")
    return ", ".join(filter(None, (str(figures["workers"]), why, where and f"on cluster {where}")))
