"""Bytes that this process has received from other ranks in the steps of trainings."""

from __future__ import annotations

_received = [0]


def received_bytes() -> int:
    """Return their number so far."""
    return _received[0]


def count_received(size_bytes: int) -> None:
    """Count some more."""
    _received[0] += size_bytes
