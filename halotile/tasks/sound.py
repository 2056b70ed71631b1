"""Pixels that a denoiser may be given, or a refusal that says where the first of the others is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable, Rim, source_positions
from halotile.tasks.device import all_finite

_LINES = {"y": "row", "x": "column"}


def check_picture(pixels: Pixels, source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> None:
    """Refuse NaN and infinity in what was read of the picture.

    Raises
    ------
    InputError
        Saying where.
    """
    if not all_finite(pixels):
        where = in_words(~np.isfinite(pixels), source, window, rim, axes)
        raise InputError(
            f"the input holds NaN or infinity in {where}. Mend the picture, or write run.on_nan: propagate."
        )


def check_side(
    name: str, pixels: NDArray[Any], source: Readable, window: Region, rim: Rim, axes: Sequence[str]
) -> None:
    """Refuse NaN and infinity in what was read of a side input, and noise that is negative.

    Raises
    ------
    InputError
        Saying where.
    """
    noise = name == "sigma" and pixels.dtype.kind in "if"
    if all_finite(pixels) and not (noise and pixels.min() < 0):
        return
    bad = ~np.isfinite(pixels) | (pixels < 0 if noise else False)
    values = "NaN, infinity or negative values" if noise else "NaN or infinity"
    where = in_words(bad, source, window, rim, axes)
    raise InputError(f"the side input {name} holds {values} in {where}. Mend input.sides.{name}.")


def in_words(bad: NDArray[Any], source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> str:
    """The part of a picture that a window covers, and its first pixel that is bad."""
    inside = window.clip(Region.whole(source.shape))
    part = ", ".join(
        f"{_LINES.get(axis, axis)}{'s' if axis in _LINES else ''} {a}–{b - 1}"
        for axis, a, b in zip(axes, inside.start, inside.stop, strict=True)
    )
    first = np.unravel_index(int(bad.argmax()), bad.shape)
    # Past the edge of the picture stands what the rim rule took from inside.
    at = [
        int(source_positions(a, b, n, rule)[i])
        for a, b, n, rule, i in zip(window.start, window.stop, source.shape, rim.rules, first, strict=True)
    ]
    place = ", ".join(f"{_LINES.get(axis, axis)} {i}" for axis, i in zip(axes, at, strict=True))
    return f"{part}; the first is at {place}"
