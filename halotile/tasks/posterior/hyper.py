"""The prior of an image by the likelihood of windows of a measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Array
from halotile.storage.views import Constant
from halotile.tasks.operators.base import Operator, parts_of
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask, Masked
from halotile.tasks.priors.matern import Matern

SHORTEST = 2
"""Least range in pixels: below it, the standard deviation of a stencil of neighbours is not that of the prior."""


class Excerpt(NamedTuple):
    """A part of a measurement without holes."""

    pixels: Array
    variance: float
    """Mean variance of its noise."""


class Likely(NamedTuple):
    """A prior, with the relative error of its deviation and its range by the curvature of the likelihood."""

    prior: Matern
    std_error: float
    range_error: float


def transfer_of(operator: Operator, edge: int) -> Array | None:
    """Square of the transfer function of an operator that treats all pixels alike, where masks are 1; None for others."""
    square: Array | None = None
    if isinstance(operator, Composition):
        parts = [transfer_of(part, edge) for part in operator.operators]
        known = [part for part in parts if part is not None]
        square = math.prod(known, start=np.ones((edge, edge))) if len(known) == len(parts) else None
    elif isinstance(operator, Mask):
        square = np.ones((edge, edge))
    elif isinstance(operator, Blur) and operator.kernel.ndim == 2 and operator.factor == 1:
        square = np.square(np.abs(np.fft.fft2(operator.kernel, (edge, edge))))
    return square if 2 * operator.reach < edge and square is not None and square[0, 0] > 0 else None


def masks_nothing(operator: Operator, region: Region) -> bool:
    """Return whether the masks of an operator are 1 on all pixels that a region of its measurement depends on."""
    reach, masks = operator.reach, [part.mask for part in parts_of(operator) if isinstance(part, Mask)]
    for mask in masks:
        axes = len(mask.shape)
        near = Region(region.start[-axes:], region.stop[-axes:]).grow(((0, 0),) * (axes - 2) + ((reach, reach),) * 2)
        near = near.clip(Region.whole(mask.shape))
        if not (Masked(Constant(mask.shape, np.dtype(np.float64), 1.0), mask).read(near) == 1).all():
            return False
    return True


def likely(windows: Sequence[Excerpt], transfer: Array, given: Matern) -> Likely:
    """The most likely deviation, and range up to the edge of a window; those that are given stay.

    The likelihood is that of the frequencies of tapered windows, as if they were independent (Whittle 1954).
    """
    from scipy.optimize import minimize

    edge = len(transfer)
    taper = np.outer(*[np.hanning(edge + 2)[1:-1]] * 2)
    taper /= math.sqrt(np.mean(np.square(taper)))
    gain = transfer[0, 0]
    level = np.mean([window.pixels.mean() for window in windows]) / math.sqrt(gain)
    found = given if given.mean != "auto" else _with(given, mean=float(level))
    power = [
        np.square(np.abs(np.fft.fft2((w.pixels - math.sqrt(gain) * found.level) * taper))) / edge**2 for w in windows
    ]
    # The taper smears each frequency over its neighbours, the constant part most of all.
    counted = np.ones(transfer.shape, bool)
    counted[:2, :2] = counted[-1:, :2] = counted[:2, -1:] = counted[-1:, -1:] = False

    def unlikeliness(logs: Array) -> float:
        prior = _with(found, **dict(zip(free, np.exp(logs).tolist(), strict=True)))
        signal = transfer * prior.spectrum(transfer.shape)
        total = 0.0
        for window, seen in zip(windows, power, strict=True):
            expected = signal + window.variance
            total += float(np.sum((np.log(expected) + seen / expected)[counted]))
        return total

    free = [key for key in ("std", "range") if getattr(given, key) == "auto"]
    if not free:
        return Likely(found, 0.0, 0.0)
    deviation = math.sqrt(max(float(np.mean([np.var(w.pixels) - w.variance for w in windows])), 1e-12) / gain)
    first = {"std": deviation or 1.0, "range": edge / 8}
    starts = [
        np.log([max(first[key] * width, SHORTEST) if key == "range" else first[key] for key in free])
        for width in (0.2, 1, 5)
    ]
    start = min(starts, key=unlikeliness)
    # Windows know nothing of longer ranges than theirs.
    limits = [(math.log(SHORTEST), math.log(edge)) if key == "range" else (None, None) for key in free]
    options = {"xatol": 1e-3, "fatol": 1e-3}
    best = minimize(unlikeliness, start, method="Nelder-Mead", bounds=limits, options=options)
    errors = dict(zip(free, _errors(unlikeliness, best.x), strict=True))
    prior = _with(found, **dict(zip(free, np.exp(best.x).tolist(), strict=True)))
    return Likely(prior, errors.get("std", 0.0), errors.get("range", 0.0))


def _with(prior: Matern, **changes: float) -> Matern:
    return Matern(**{"std": prior.std, "range": prior.range, "mean": prior.mean, **changes})


STEP = 0.02
TAPERED = 2.1
"""Factor on errors: a taper leaves about so many correlated frequencies for each independent one."""


def _errors(unlikeliness: object, at: Array) -> Array:
    """Standard errors of the logarithms, by the inverse of the curvature."""
    assert callable(unlikeliness)
    count = len(at)
    curvature = np.empty((count, count))
    eye = STEP * np.eye(count)
    for i in range(count):
        for j in range(count):
            corners = [unlikeliness(at + a * eye[i] + b * eye[j]) for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
            curvature[i, j] = (corners[0] - corners[1] - corners[2] + corners[3]) / (4 * STEP**2)
    # Each real window has every frequency twice.
    with np.errstate(invalid="ignore"):
        errors: Array = np.sqrt(np.diag(np.linalg.pinv(curvature / 2))) * math.sqrt(TAPERED)
    return errors
