"""Whether small JSON files of a run directory hold values as a run writes them: whoever may write there may have written anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Kind = Callable[[Any], bool]

_BOUND = 2**63
"""No count comes near it, and every float can hold what is below."""
_LATEST = 2**40
"""Unix time of the year 36812: a calendar can still tell it."""


def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_text_or_none(value: Any) -> bool:
    """Whether it is text, or nothing."""
    return value is None or is_text(value)


def is_amount(value: Any) -> bool:
    """Whether it is a number that measures something.

    Examples
    --------
    >>> [is_amount(value) for value in (3, 0.5, -1, True, float("nan"), 10**400, "3", None)]
    [True, True, False, False, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _BOUND


def is_count(value: Any) -> bool:
    """Whether it is a whole number of things."""
    return isinstance(value, int) and is_amount(value)


def is_time(value: Any) -> bool:
    """Whether it is a Unix time."""
    return is_amount(value) and bool(value < _LATEST)


def is_figures(value: Any) -> bool:
    """Whether it tells what an iteration came to, by names; the numbers may be infinite or NaN."""
    if not isinstance(value, dict):
        return False
    numbers = all(isinstance(n, float) or (isinstance(n, int) and abs(n) < _BOUND) for n in value.values())
    return numbers and (not value or {"iteration", "iterations"} <= value.keys())


def fits(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bool:
    """Whether each value that is there is of its kind; others may be anything."""
    return all(is_kind(values[name]) for name, is_kind in kinds.items() if name in values)


_COUNTS = (
    "done", "resumed", "total", "pixels_done", "pixels_total", "read_bytes", "written_bytes", "workers", "peak_memory_bytes",
    "device_peak_bytes", "retried", "failed", "pid",
)  # fmt: skip
STATUS: Mapping[str, Kind] = {
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys(("seconds", "start_seconds", "compute_seconds"), is_amount),
    **dict.fromkeys(("state", "phase", "message", "host", "output"), is_text),
    **dict.fromkeys(("reason", "dashboard"), is_text_or_none),
    "updated": is_time,
    "figures": is_figures,
}
"""What status.json holds."""
HOLDER: Mapping[str, Kind] = {"pid": is_count, "host": is_text, "started": is_time}
"""What is written into a lock."""
BATCH: Mapping[str, Kind] = {
    "number": is_text, "submitted_from": is_text, "attempts": is_count, "submitted": is_time, "began": is_time
}  # fmt: skip
"""What batch.json tells of a batch job."""
