"""Sums over pixels in double precision, a strip at a time, so that temporaries fit in the cache."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from halotile.storage.rim import Array

STRIP_PIXELS = 1 << 17  # pixels worked on at once


def add_exactly(parts: Iterable[float]) -> float:
    """The exactly rounded sum, hence the same in any order; not finite where a part, or the sum, is not.

    >>> add_exactly([1e16, 1.0, -1e16]), add_exactly([math.inf, -math.inf]), add_exactly([1e308, 1e308])
    (1.0, nan, inf)
    """
    numbers = list(parts)
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or more than a double holds
        return sum(numbers)


def total_of(make: Callable[..., Array], *arrays: Array) -> float:
    """The sum of ``make(*arrays)`` for arrays of one shape, computed strip by strip.

    The strips depend on the shape alone, and their sums are added with exact rounding.

    ``make``: takes strips of the arrays, the first a copy in double precision; returns an array in double precision; ``arrays``: with two axes or
    more.

    >>> total_of(lambda a, b: np.multiply(a, b, out=a), np.ones((3, 4), "float32"), np.full((3, 4), 2.0))
    24.0
    """
    parts = (
        make(arrays[0][at].astype(np.float64), *(array[at] for array in arrays[1:])) for at in _strips(arrays[0].shape)
    )
    return add_exactly(float(np.sum(part)) for part in parts)


def dot(left: Array, right: Array) -> float:
    """``sum left * right``.

    >>> dot(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]))
    11.0
    """
    if left is right:
        return total_of(lambda a: np.square(a, out=a), left)
    return total_of(lambda a, b: np.multiply(a, b, out=a), left, right)


def distance(left: Array, right: Array) -> float:
    """``sum (left - right)²``.

    >>> distance(np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]]))
    13.0
    """
    return total_of(_squared_difference, left, right)


def _squared_difference(left: Array, right: Array) -> Array:
    left -= right
    return np.square(left, out=left)


def _strips(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Index each strip: a run of rows in one plane."""
    rows = max(1, STRIP_PIXELS // max(1, shape[-1]))
    for plane in np.ndindex(shape[:-2]):
        for start in range(0, shape[-2], rows):
            yield (*plane, slice(start, start + rows))
