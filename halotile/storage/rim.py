"""Boundary rules for windows that extend past the edge of the array.

======== ==========================================================  ==================
rule     pixels outside                                               ``| a b c d |``
======== ==========================================================  ==================
reflect  mirrored, the edge pixel repeated (Dask's ``reflect``)       ``b a | a b c d``
mirror   mirrored about the edge pixel (NumPy's ``reflect``)          ``c b | a b c d``
nearest  the edge pixel                                               ``a a | a b c d``
periodic the other end of the array                                   ``c d | a b c d``
constant one value                                                    ``v v | a b c d``
cut      none: the window ends at the edge, so that the function      ``| a b c d``
         applied to it pads by its own rule, as on the whole array
======== ==========================================================  ==================

Windows may extend further than the length of the array: the rule is then applied repeatedly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region

RULES = ("reflect", "mirror", "nearest", "periodic", "constant", "cut")

Pixels = NDArray[np.generic]
Array = NDArray[Any]  # pixels to compute with
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Pixels]


class Readable(Protocol):
    """An object with a shape and dtype whose regions can be read as NumPy arrays."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel."""

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, which is inside the array."""


@dataclass(frozen=True, slots=True)
class Rim:
    """The rim rule of each axis, with the fill value of ``constant``.

    >>> Rim.everywhere("reflect", 2).rules
    ('reflect', 'reflect')
    """

    rules: tuple[str, ...]
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise ConfigError(f"boundary is {rule!r}: no such rim rule. Write one of {', '.join(RULES)}.")
        if not self.values:
            object.__setattr__(self, "values", (0.0,) * len(self.rules))

    @classmethod
    def everywhere(cls, rule: str, axes: int, value: float = 0.0) -> Rim:
        """The same rule on every axis."""
        return cls((rule,) * axes, (value,) * axes)

    def reach(self, window: Region, shape: tuple[int, ...]) -> Region:
        """The region that a read of ``window`` returns: clipped to the array along the axes with rule ``cut``."""
        inside = window.clip(Region.whole(shape))
        return Region(
            tuple(i if r == "cut" else w for i, w, r in zip(inside.start, window.start, self.rules, strict=True)),
            tuple(i if r == "cut" else w for i, w, r in zip(inside.stop, window.stop, self.rules, strict=True)),
        )


def source_positions(start: int, stop: int, length: int, rule: str) -> NDArray[np.intp]:
    """The source position for each position ``start..stop`` of an axis; ``-1`` for the constant.

    >>> source_positions(-2, 5, 4, "reflect").tolist()
    [1, 0, 0, 1, 2, 3, 3]
    >>> source_positions(-2, 5, 4, "periodic").tolist()
    [2, 3, 0, 1, 2, 3, 0]
    """
    at = np.arange(start, stop, dtype=np.intp)
    if rule == "reflect":
        at %= 2 * length
        return np.minimum(at, 2 * length - 1 - at)
    if rule == "mirror":
        at %= max(1, 2 * length - 2)
        return np.minimum(at, 2 * length - 2 - at) if length > 1 else at
    if rule == "nearest":
        return np.clip(at, 0, length - 1)
    if rule == "periodic":
        return at % length
    if rule == "constant":
        return np.where((at >= 0) & (at < length), at, -1)
    return at[(at >= 0) & (at < length)]


def read_into(source: Readable, region: Region, out: Pixels) -> None:
    """Read the pixels of ``region`` into an array: at once if the source can (a method of this name), or else by a copy."""
    if (into := getattr(source, "read_into", None)) is None:
        out[...] = source.read(region)
    else:
        into(region, out)


def read_window(source: Readable, window: Region, rim: Rim, allocate: Allocate | None = None) -> Pixels:
    """Read the pixels of ``window``, filling those outside the array by the rim rule.

    Each needed pixel is read once: a periodic window reads two slabs, not the array between them.

    ``allocate``: ``allocate(shape, dtype)``: memory for the window, which is not used where the rim takes pixels from elsewhere.

    Returns
    -------
    ndarray
        Of shape ``rim.reach(window, source.shape).shape``.
    """
    whole = Region.whole(source.shape)
    if window.inside(whole):
        if allocate is None:
            return source.read(window)
        pixels = allocate(window.shape, source.dtype)
        read_into(source, window, pixels)
        return pixels
    positions = [
        source_positions(a, b, n, rule)
        for a, b, n, rule in zip(window.start, window.stop, source.shape, rim.rules, strict=True)
    ]
    inside = window.clip(whole)
    if all(map(_holds, inside.start, inside.stop, positions)):
        reach = rim.reach(window, source.shape)
        pixels = (allocate or np.empty)(reach.shape, source.dtype)
        place = inside.relative_to(reach)
        read_into(source, inside, pixels[place.slices])
        _surround(pixels, place, inside, positions, rim.values)
        return pixels
    needed = [_distinct(position) for position in positions]
    pixels = _read_slabs(source, needed)
    for axis, (position, need) in enumerate(zip(positions, needed, strict=True)):
        pixels = _spread(pixels, axis, position, need, rim.values[axis])
    return pixels


def _holds(start: int, stop: int, position: NDArray[np.intp]) -> bool:
    """Return True where the positions of an axis need no pixels outside the array."""
    return start < stop and bool(((position < 0) | ((position >= start) & (position < stop))).all())


def _surround(
    window: Array, place: Region, inside: Region, positions: list[NDArray[np.intp]], values: tuple[float, ...]
) -> None:
    """Fill the pixels of a window around those of ``inside`` at their place from them, one axis after the other."""
    filled: list[Any] = list(place.slices)
    for axis, (position, value) in enumerate(zip(positions, values, strict=True)):
        outside = np.delete(np.arange(len(position)), filled[axis])
        around = (*filled[:axis], outside, *filled[axis + 1 :])
        if len(outside) and position[outside[0]] < 0:
            window[around] = value
        elif len(outside):
            source = position[outside] - inside.start[axis] + place.start[axis]
            window[around] = window[(*filled[:axis], source, *filled[axis + 1 :])]
        filled[axis] = slice(None)


def _distinct(position: NDArray[np.intp]) -> NDArray[np.intp]:
    """The distinct positions to read along an axis: sorted, or in the order of a window that only wraps around."""
    needed = np.unique(position[position >= 0])
    wraps = len(needed) == len(position) and np.count_nonzero(np.diff(position) != 1) < 2
    return position if wraps else needed


def _read_slabs(source: Readable, needed: list[NDArray[np.intp]]) -> Pixels:
    """The pixels at the cross product of the needed positions, with one read for each combination of runs."""
    runs = [_runs(need) for need in needed]
    if all(len(r) == 1 for r in runs):
        return source.read(Region(tuple(r[0][0] for r in runs), tuple(r[0][1] for r in runs)))
    pixels = np.empty([len(need) for need in needed], source.dtype)
    for corner in itertools.product(*runs):
        region = Region(tuple(a for a, _, _ in corner), tuple(b for _, b, _ in corner))
        pixels[tuple(target for _, _, target in corner)] = source.read(region)
    return pixels


def _runs(positions: NDArray[np.intp]) -> list[tuple[int, int, slice]]:
    """Positions as half-open runs without gaps, each with its slice of ``positions``."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    ends = itertools.pairwise([0, *breaks.tolist(), len(positions)])
    return [(int(positions[a]), int(positions[b - 1]) + 1, slice(a, b)) for a, b in ends if a < b]


def _spread(pixels: Pixels, axis: int, position: NDArray[np.intp], need: NDArray[np.intp], value: float) -> Pixels:
    """Repeat the pixels that were read at every position of one axis."""
    if len(position) == len(need) and np.array_equal(position, need):
        return pixels
    if not len(need):
        shape = (*pixels.shape[:axis], len(position), *pixels.shape[axis + 1 :])
        return np.full(shape, value, pixels.dtype)
    spread: Pixels = np.take(pixels, np.searchsorted(need, np.maximum(position, need[0])), axis=axis)
    outside = position < 0
    if outside.any():
        spread[(slice(None),) * axis + (outside,)] = value
    return spread
