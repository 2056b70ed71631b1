"""Results of a device trial as table rows: the tiles and batches that were tried, and the precisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.graphs.amounts import bytes_text
from halotile.graphs.kinds.base import Row
from halotile.graphs.units import rate_text, shape_text

Found = Mapping[str, Any]
"""The mapping of ``Tuned.to_json()``."""


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
    rows.append(("", "errors are the largest, of the brightest pixel, against float32 on a processor"))
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

    Examples
    --------
    >>> _precision({"seconds": 0.5, "error": 0.0123, "why_not": ""}, {"block_pixels": 1_000_000})
    '2 Mpix/s, error 0.012'
    >>> _precision({"seconds": None, "error": None, "why_not": "of GPUs only"}, {"block_pixels": 1})
    'of GPUs only'
    """
    if trial["seconds"] is None:
        return str(trial["why_not"])
    error = trial["why_not"] if trial["error"] is None else f"error {trial['error']:.2g}"
    return f"{rate_text(tuned['block_pixels'] / 1e6 / trial['seconds'])}, {error}"
