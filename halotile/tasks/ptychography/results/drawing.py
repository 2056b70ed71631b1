"""Drawing of a reconstruction: modulus and phase of the object, where it was illuminated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.images.png import contrast, encode_png, side_by_side
from halotile.storage.images.sheet import grey

EDGE = 512
"""Longest edge of a drawn object, in pixels."""
BRIGHT = 0.03
"""Least illumination of a pixel that is drawn, relative to the brightest one."""

SHOWN = 500
"""Positions, at most, whose light decides what is drawn."""


def draw_object(image: NDArray[Any], light: NDArray[Any]) -> list[bytes]:
    """Draw modulus and phase of an object side by side, as a PNG; what had little light is black.

    ``image``: complex object; ``light``: sum of the intensities that each of its pixels had.

    Examples
    --------
    >>> b"".join(draw_object(np.ones((8, 8), complex), np.ones((8, 8))))[1:4]
    b'PNG'
    """
    bright = light >= BRIGHT * light.max()
    rows, columns = (slice(n.min(), n.max() + 1) for n in np.nonzero(bright))
    step = -(-max(n.stop - n.start for n in (rows, columns)) // EDGE)
    image, light, bright = (part[rows, columns][::step, ::step] for part in (image, light, bright))
    # The phase of an object is known but for a constant: its mean is drawn in the middle.
    phase = np.angle(image * np.conj((image * light).sum()))
    drawn = []
    for part in (np.abs(image), phase):
        low, high = contrast([part[bright][None, :, None].astype(np.float32)])
        shown = np.where(bright, part, low).astype(np.float32)
        drawn.append(grey(shown[None], low, high))
    return encode_png(side_by_side(drawn))


def illumination(
    probe: NDArray[Any], places: NDArray[np.float64], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """The sum of the intensities of a probe, (modes, rows, columns), at places of an object."""
    intensity = (np.abs(probe) ** 2).sum(0)
    rows, columns = intensity.shape
    light = np.zeros(shape)
    for row, column in places.astype(np.int64):
        light[row : row + rows, column : column + columns] += intensity
    return light
