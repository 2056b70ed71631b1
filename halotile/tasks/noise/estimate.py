"""The noise level of an image, estimated from a fixed set of samples spread over it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable

NORMAL_MAD = 0.6744897501960817
"""Median of |z| for a standard normal z."""


def estimate_noise_level(source: Readable, *, samples: int = 64, edge: int = 256) -> float:
    """Estimate the standard deviation of white noise: ``median |d| / 0.6745``, d the Haar diagonal details.

    The level of each sample square is estimated by itself; the median of these is the result,
    so that a few busy or empty places do not bias it. Squares without any variation (a mosaic's
    background) do not count. The samples lie at the same places every time.

    Parameters
    ----------
    source : Readable
        The image; squares lie on the last two axes, and samples are spread over the others.
    samples : int
        Largest number of squares.
    edge : int
        Edge of a square, in pixels.

    Returns
    -------
    float
        In the units of the stored pixels.

    Raises
    ------
    InputError
        When the image is too small for details, or has none.

    References
    ----------
    D. L. Donoho, I. M. Johnstone, Ideal spatial adaptation by wavelet shrinkage, Biometrika 81
    (1994) 425-455.
    """
    if len(source.shape) < 2 or min(source.shape[-2:]) < 2:
        raise InputError(
            f"sigma is auto, but an image of shape {source.shape} has no 2 x 2 pixels to estimate noise from. "
            "Write sigma as a number."
        )
    regions = sample_regions(source.shape, samples, edge)
    levels = [square_level(source.read(region)) for region in regions]
    usable = [level for level in levels if level > 0 and math.isfinite(level)]
    if not usable:
        why = "its pixels are equal wherever it was sampled"
        if all(map(math.isnan, levels)):
            why = "no 2 x 2 pixels are finite wherever it was sampled"
        raise InputError(
            f"sigma is auto, but no noise could be estimated in the image: {why}. Write sigma as a number."
        )
    return float(np.median(usable))


def sample_regions(shape: tuple[int, ...], samples: int, edge: int) -> list[Region]:
    """Squares spread evenly over an image by a low-discrepancy sequence.

    Examples
    --------
    >>> sample_regions((40, 50), 64, 256)
    [Region(start=(0, 0), stop=(40, 50))]
    """
    size = (1,) * (len(shape) - 2) + tuple(min(edge, n) for n in shape[-2:])
    room = math.prod(-(-n // s) for n, s in zip(shape, size, strict=True))
    regions = {}
    for number in range(min(samples, room)):
        at = _spread(number, len(shape))
        start = tuple(round(f * (n - s)) for f, n, s in zip(at, shape, size, strict=True))
        regions[start] = Region(start, tuple(a + s for a, s in zip(start, size, strict=True)))
    return list(regions.values())


def square_level(pixels: NDArray[np.generic]) -> float:
    """Noise level of one square; NaN if nothing in it is finite."""
    rows, columns = (n // 2 * 2 for n in pixels.shape[-2:])
    square = pixels.reshape(pixels.shape[-2:])[:rows, :columns].astype(np.float64)
    with np.errstate(invalid="ignore"):
        details = (square[::2, ::2] - square[1::2, ::2] - square[::2, 1::2] + square[1::2, 1::2]) / 2
    details = np.abs(details[np.isfinite(details)])
    return float(np.median(details)) / NORMAL_MAD if details.size else math.nan


def _spread(number: int, axes: int) -> tuple[float, ...]:
    """Point ``number`` of a sequence that fills the unit cube evenly (Roberts' R sequence)."""
    ratio = 2.0
    for _ in range(40):
        ratio = (1 + ratio) ** (1 / (axes + 1))
    return tuple((0.5 + number * ratio ** -(axis + 1)) % 1 for axis in range(axes))
