"""Conversion of Dask's depth and boundary arguments to halos and rim rules, and back."""

from __future__ import annotations

import operator
from numbers import Number
from typing import Any

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Depth
from halotile.storage.rim import Rim

NAMED_RULES = ("reflect", "nearest", "periodic")


def for_each_array(value: Any, name: str, ndims: list[int]) -> list[list[Any]]:
    """Return the entries of ``depth`` or ``boundary`` per array and axis; None for an axis without one.

    A list has one entry for each array. A tuple starts at the first axis; a dict names axes, negative ones
    from the last.

    Examples
    --------
    >>> for_each_array({1: 3}, "depth", [2])
    [[None, 3]]
    >>> for_each_array({-1: 3}, "depth", [2])
    [[None, 3]]
    >>> for_each_array([1, (2, 3)], "depth", [1, 2])
    [[1], [2, 3]]
    """
    if not isinstance(value, list):
        value = [value] * len(ndims)
    if len(value) != len(ndims):
        raise ConfigError(
            f"{name} is a list of {len(value)} entries for {len(ndims)} arrays. Write an entry for each array, "
            f"or a tuple for different axes."
        )
    return [_for_each_axis(entry, name, ndim, max(ndims)) for entry, ndim in zip(value, ndims, strict=True)]


def _for_each_axis(value: Any, name: str, ndim: int, max_ndim: int) -> list[Any]:
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [value] * ndim
    if unknown := [axis for axis in value if axis not in range(-max_ndim, max_ndim)]:
        raise ConfigError(
            f"{name} names the axes {unknown}, but the arrays have the axes {list(range(max_ndim))}. Write those."
        )
    named = {axis % ndim: entry for axis, entry in value.items() if axis in range(-ndim, ndim)}
    return [named.get(axis) for axis in range(ndim)]


def as_halo(entries: list[Any]) -> Depth:
    """Return the halo width (before, after) of each axis.

    Examples
    --------
    >>> as_halo([2, (1, 0), None])
    ((2, 2), (1, 0), (0, 0))
    """
    return tuple(_as_pair(entry) for entry in entries)


def _as_pair(entry: Any) -> tuple[int, int]:
    try:
        before, after = entry if isinstance(entry, tuple) else (entry or 0,) * 2
        pair = operator.index(before), operator.index(after)
    except (TypeError, ValueError):
        pair = (-1, -1)
    if min(pair) < 0:
        raise ConfigError(
            f"depth is {entry!r} for an axis: it must be a number of pixels. Write an integer >= 0, "
            "or a pair (before, after) of integers."
        )
    return pair


def as_rim(entries: list[Any], dtype: np.dtype[Any]) -> Rim:
    """Return the rim rule of each axis; constants become pixels of ``dtype``.

    Examples
    --------
    >>> as_rim(["none", 7], np.dtype("uint8"))
    Rim(rules=('cut', 'constant'), values=(0, 7))
    """
    rules, values = [], []
    for entry in entries:
        constant = isinstance(entry, Number | np.generic)
        rules.append("constant" if constant else _rule(entry))
        values.append(_as_pixel(entry if constant else 0, dtype))
    return Rim(tuple(rules), tuple(values))


def _rule(entry: Any) -> str:
    if entry is None or (isinstance(entry, str) and entry in ("none", "cut")):
        return "cut"
    if isinstance(entry, str) and entry in NAMED_RULES:
        return entry
    raise ConfigError(
        f"boundary is {entry!r}, which is not a rim rule. Write one of {', '.join(NAMED_RULES)}, none, or a number."
    )


def _as_pixel(value: Any, dtype: np.dtype[Any]) -> Any:
    """Convert a constant to ``dtype`` and back to a Python number."""
    if dtype.kind in "iu" and value != value:
        raise ConfigError(f"boundary is {value!r}, which {dtype} pixels cannot hold. Write an integer.")
    try:
        return np.full((), value, dtype).item()
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"boundary is {value!r}, which {dtype} pixels cannot hold. Write a number that they can hold."
        ) from error


def dask_depth(depth: Depth) -> dict[int, int | tuple[int, int]]:
    """Return a halo as Dask's depth argument."""
    return {axis: pair[0] if pair[0] == pair[1] else pair for axis, pair in enumerate(depth)}


def dask_boundary(rim: Rim) -> dict[int, Any]:
    """Return rim rules as Dask's boundary argument.

    Examples
    --------
    >>> dask_boundary(Rim(("cut", "reflect"), (0, 0)))
    {0: 'none', 1: 'reflect'}
    """
    names = {"cut": "none"}
    return {
        axis: value if rule == "constant" else names.get(rule, rule)
        for axis, (rule, value) in enumerate(zip(rim.rules, rim.values, strict=True))
    }
