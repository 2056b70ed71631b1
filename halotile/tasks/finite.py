"""Checks for NaN, infinity and negative noise in what was read, with errors that name the first bad pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable, Rim, source_positions
from halotile.tasks.devices.device import all_finite

_LINES = {"y": "row", "x": "column"}


def check_image(pixels: Pixels, source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> None:
    """Refuse NaN and infinity in a window of the image.

    Raises
    ------
    InputError
        With the place of the first.
    """
    if not all_finite(pixels):
        where = describe(~np.isfinite(pixels), source, window, rim, axes)
        raise InputError(
            f"the input holds NaN or infinity in {where}. Repair the image, or write run.on_nan: propagate."
        )


def check_side(
    name: str,
    pixels: NDArray[Any],
    source: Readable,
    window: Region,
    rim: Rim,
    axes: Sequence[str],
    values: tuple[float, float] | None = None,
) -> None:
    """Refuse NaN and infinity in a window of a side input, and negative noise.

    Where the image is mapped from ``values`` to 0..1, noise above 1 is refused as well: it is in the units of the
    stored pixels then.

    Raises
    ------
    InputError
        With the place of the first.
    """
    if name == "sigma" and values is not None and pixels.size and pixels.max() > 1:
        raise InputError(
            f"the side input sigma holds {float(pixels.max()):g}. {describe_range(values)} "
            f"Divide the map by {values[1] - values[0]:g}."
        )
    noise = name == "sigma" and pixels.dtype.kind in "if"
    if all_finite(pixels) and not (noise and pixels.min() < 0):
        return
    bad = ~np.isfinite(pixels) | (pixels < 0 if noise else False)
    what = "NaN, infinity or negative values" if noise else "NaN or infinity"
    where = describe(bad, source, window, rim, axes)
    raise InputError(f"the side input {name} holds {what} in {where}. Repair input.sides.{name}.")


def describe_range(values: tuple[float, float], what: str = "noise") -> str:
    """The unit of a noise level or a strength where the image is mapped from a range of values."""
    return f"The image's {values[0]:g} to {values[1]:g} are denoised as 0 to 1, and {what} is in units of that range."


def describe(bad: NDArray[Any], source: Readable, window: Region, rim: Rim, axes: Sequence[str]) -> str:
    """Name the part of an image that a window covers, and its first bad pixel."""
    inside = window.clip(Region.whole(source.shape))
    part = ", ".join(
        f"{_LINES.get(axis, axis)}{'s' if axis in _LINES else ''} {a}–{b - 1}"
        for axis, a, b in zip(axes, inside.start, inside.stop, strict=True)
    )
    first = np.unravel_index(int(bad.argmax()), bad.shape)
    # Beyond the edge of the image lie pixels that the rim rule took from inside.
    at = [
        int(source_positions(a, b, n, rule)[i])
        for a, b, n, rule, i in zip(window.start, window.stop, source.shape, rim.rules, first, strict=True)
    ]
    place = ", ".join(f"{_LINES.get(axis, axis)} {i}" for axis, i in zip(axes, at, strict=True))
    return f"{part}; the first is at {place}"
