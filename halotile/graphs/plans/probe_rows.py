"""Results of a device trial as table rows: the tiles and batches that were tried, and the precisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.graphs.amounts import bytes_text
from halotile.graphs.jobs.base import Row
from halotile.graphs.units import rate_text, shape_text

Found = Mapping[str, Any]
"""The mapping of ``Tuned.to_json()``."""


def probe_rows(figures: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a trial: the tiles that were tried, then the precisions where they were compared."""
    tuned: Found | None = figures.get("tuned")
    if not tuned or not tuned["precisions"]:
        return []
    rows = [("", ""), ("tried on", str(tuned["device"]))]
    tiles = [_tile(each) for each in tuned["tried"]]
    width = max(map(len, tiles)) + 2
    for place, (tile, each) in enumerate(zip(tiles, tuned["tried"], strict=True)):
        rows.append(("tiles" if place == 0 else "", f"{tile:<{width}}{_cost(each, tuned)}"))
    for place, each in enumerate(tuned["precisions"]):
        rows.append(("precision" if place == 0 else "", f"{each['name']:<10}{_precision(each, tuned)}"))
    rows.append(("", "errors are the largest, of the brightest pixel, against float32 on a processor"))
    return rows


def _tile(each: Found) -> str:
    return f"{shape_text(each['tile'])}, {each['batch']} at once"


def _cost(each: Found, found: Found) -> str:
    """Return speed, and memory where it is that of a GPU."""
    speed = rate_text(found["block_pixels"] / 1e6 / each["seconds"])
    memory = f", {bytes_text(each['batch_bytes'])} for them" if each["batch_bytes"] else ""
    chosen = (each["tile"], each["batch"]) == (found["tile"], found["batch"])
    return f"{speed}{memory}{' (chosen)' if chosen and len(found['tried']) > 1 else ''}"


def _precision(each: Found, found: Found) -> str:
    """Return speed and error.

    Examples
    --------
    >>> _precision({"seconds": 0.5, "error": 0.0123, "why_not": ""}, {"block_pixels": 1_000_000})
    '2 Mpix/s, error 0.012'
    >>> _precision({"seconds": None, "error": None, "why_not": "of GPUs only"}, {"block_pixels": 1})
    'of GPUs only'
    """
    if each["seconds"] is None:
        return str(each["why_not"])
    error = each["why_not"] if each["error"] is None else f"error {each['error']:.2g}"
    return f"{rate_text(found['block_pixels'] / 1e6 / each['seconds'])}, {error}"
