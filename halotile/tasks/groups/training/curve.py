"""The curve that a program of ranks records: rows of figures, by step; and the bytes received from other ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from halotile.storage.disk.durable import DISK

CurveRow = dict[str, float]


def write_curve(path: Path, step: int, rows: Sequence[CurveRow], *, is_awaited: bool = False) -> None:
    """Write the curve, for the driver to show; what is lost of it is recorded again, unless a loop waits for it."""
    with nullcontext() if is_awaited else suppress(OSError):
        DISK.write_file(path, [json.dumps({"step": step, "rows": rows}).encode()], sync=False)


def read_curve(path: Path) -> tuple[int, list[CurveRow]]:
    """The number of steps that are done and the rows of the curve; 0 and none where nothing was recorded."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # it is replaced as a whole
        return 0, []
    return int(content["step"]), list(content["rows"])


_received = [0]


def received_bytes() -> int:
    """Return the bytes that this process has received from other ranks in the steps of trainings."""
    return _received[0]


def count_received(size_bytes: int) -> None:
    """Count more received bytes."""
    _received[0] += size_bytes
