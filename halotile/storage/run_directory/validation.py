"""Validation of the small JSON files of a run directory, which may have been changed by other programs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from halotile.errors import DamagedData


def digest(document: Any) -> str:
    """A short checksum of a JSON value."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_checksum(content: bytes) -> bytes:
    """A line with a checksum of the content, which contains no line break.

    Examples
    --------
    >>> with_checksum(b"+0-31")
    b'b9645eac +0-31\\n'
    >>> without_checksum(with_checksum(b"+0-31")), without_checksum(with_checksum(b"+0-31")[:-3])
    (b'+0-31', None)
    """
    return b"%08x %s\n" % (google_crc32c.value(content), content)


def without_checksum(line: bytes) -> bytes | None:
    """The content of a line; None when its checksum does not match."""
    content = line[9:-1]
    return content if line == with_checksum(content) else None


ValueCheck = Callable[[Any], bool]

_BOUND = 2**63
"""Exclusive limit far above any real count, below which a float can represent every magnitude."""
_LATEST = 2**40
"""Unix time of the year 36812, which calendar functions can still convert."""


def is_text(value: Any) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


def is_text_or_none(value: Any) -> bool:
    """Return True for a string or None."""
    return value is None or is_text(value)


def is_amount(value: Any) -> bool:
    """Return True for a non-negative finite number.

    Examples
    --------
    >>> [is_amount(value) for value in (3, 0.5, -1, True, float("nan"), 10**400, "3", None)]
    [True, True, False, False, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _BOUND


def is_count(value: Any) -> bool:
    """Return True for a non-negative integer."""
    return isinstance(value, int) and is_amount(value)


def is_time(value: Any) -> bool:
    """Return True for a Unix time."""
    return is_amount(value) and bool(value < _LATEST)


def is_figures(value: Any) -> bool:
    """Return True for the named results of an iteration; the numbers may be infinite or NaN."""
    if not isinstance(value, dict):
        return False
    numbers = all(isinstance(n, float) or (isinstance(n, int) and abs(n) < _BOUND) for n in value.values())
    return numbers and (not value or {"iteration", "iterations"} <= value.keys())


def fits(values: Mapping[str, Any], kinds: Mapping[str, ValueCheck]) -> bool:
    """Return True when each value with a listed name is of its kind; other values are not checked."""
    return all(is_kind(values[name]) for name, is_kind in kinds.items() if name in values)


def read_object(
    path: Path, advice: str, kinds: Mapping[str, ValueCheck] | None = None
) -> dict[str, Any] | None:
    """Read a file with a JSON object whose values are of these kinds; None when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        value = None
    if not isinstance(value, dict) or not fits(value, kinds or {}):
        raise DamagedData(f"{path} is damaged. {advice}")
    return value


_COUNTS = (
    "done", "resumed", "total", "pixels_done", "pixels_total", "read_bytes", "written_bytes", "workers", "peak_memory_bytes",
    "device_peak_bytes", "retried", "failed", "pid",
)  # fmt: skip
STATUS: Mapping[str, ValueCheck] = {
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys(("seconds", "start_seconds", "compute_seconds"), is_amount),
    **dict.fromkeys(("state", "phase", "message", "host", "output"), is_text),
    **dict.fromkeys(("reason", "dashboard"), is_text_or_none),
    "updated": is_time,
    "figures": is_figures,
}
"""Values of status.json."""
HOLDER: Mapping[str, ValueCheck] = {"pid": is_count, "host": is_text, "started": is_time}
"""Values in a lock file."""
BATCH: Mapping[str, ValueCheck] = {
    "number": is_text, "submitted_from": is_text, "attempts": is_count, "submitted": is_time, "began": is_time
}  # fmt: skip
"""Values of batch.json."""
