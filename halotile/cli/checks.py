"""Values that have the right type and still cannot be, each with the words that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from halotile.cli.problems import nearest, shown
from halotile.graphs.job import parse_bytes

Check = Callable[[Any], str | None]
"""What is wrong with a value, or None. It sees only values of the right type."""

LEAST_MEMORY_BYTES = 64 * 2**20
_DTYPES = ("auto", "uint8", "uint16", "int8", "int16", "uint32", "int32", "float16", "float32", "float64")


def at_least(least: int) -> Check:
    """A check that a number, or each number of a list, is large enough; "auto" passes.

    Examples
    --------
    >>> at_least(1)([256, 0])
    '[256, 0] is too small; write at least 1'
    >>> at_least(1)("auto")
    """

    def check(value: Any) -> str | None:
        numbers = value if isinstance(value, list) else [value]
        small = any(isinstance(n, int | float) and n < least for n in numbers)
        empty = isinstance(value, list) and not value
        return f"{value} is too small; write at least {least}" if small or empty else None

    return check


def _positive(value: float) -> str | None:
    return None if value > 0 else f"{value} is too small; write more than 0"


def _memory(value: str) -> str | None:
    try:
        count = parse_bytes(value)
    except ValueError:
        return f"{shown(value)} is not a size; write a number and a unit, such as 4GiB or 512MB"
    if count < LEAST_MEMORY_BYTES:
        return f"{value} is {count:,} bytes, less than a worker needs to start; give it a unit such as 4GiB"
    return None


def _range(value: Any) -> str | None:
    if isinstance(value, list) and not value[0] < value[1]:
        return f"{value} runs backwards; write [low, high] with low < high"
    return None


def _axes(value: str | None) -> str | None:
    if value in (None, "auto"):
        return None
    letters = str(value)
    if not letters or not letters.isalpha() or len({*letters.lower()}) != len(letters):
        return (
            f"{shown(letters)} does not name axes; write one different letter for each, such as yx or tczyx"
        )
    return None


def _dtype(value: str) -> str | None:
    if value in _DTYPES:
        return None
    if value.startswith("complex"):
        return f"{shown(value)} cannot hold a denoised picture; write auto, or a float or integer type"
    near = nearest(value, _DTYPES)
    return f"{shown(value)} is not one of {', '.join(_DTYPES)}" + (f"; did you mean {near}?" if near else "")


def _filled(value: str) -> str | None:
    return None if value.strip() else "is empty; write a path"


CHECKS: Mapping[tuple[str, ...], Check] = {
    ("input", "path"): _filled,
    ("input", "level"): at_least(0),
    ("input", "axes"): _axes,
    ("input", "range"): _range,
    ("output", "path"): _filled,
    ("output", "shard"): at_least(1),
    ("output", "chunk"): at_least(1),
    ("output", "dtype"): _dtype,
    ("tile", "size"): at_least(1),
    ("tile", "depth"): at_least(0),
    ("tile", "batch"): at_least(1),
    ("tile", "block"): at_least(1),
    ("tile", "axes"): _axes,
    ("run", "workers"): at_least(1),
    ("run", "retries"): at_least(0),
    ("run", "memory_per_worker"): _memory,
    ("run", "stall_seconds"): _positive,
}
"""By key. The planner checks what takes the picture to know."""
