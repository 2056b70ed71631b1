"""A smooth image: a Gaussian field with a deviation and a range, and those that windows of a measurement suggest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Array
from halotile.storage.views import Constant
from halotile.tasks.operators.base import Operator, parts_of
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask, Masked
from halotile.tasks.options import Auto, check_above_zero


@dataclass(frozen=True, kw_only=True)
class Matern:
    """``D (x - mean)`` is white noise, with ``D = τ (κ² - Δ)`` and the Laplacian of five points. What is ``auto`` is decided before it is computed with.

    Parameters
    ----------
    std : float or "auto"
        Standard deviation of a pixel, in the units of the image; auto: by the likelihood of the data.
    range : float or "auto"
        Distance in pixels at which the correlation has fallen to 0.14; auto: by the likelihood of the data.
    mean : float or "auto"
        Value around which the image varies; auto: that of the data.

    References
    ----------
    F. Lindgren, H. Rue, J. Lindström, An explicit link between Gaussian fields and Gaussian Markov random fields: the stochastic partial
    differential equation approach, J. R. Stat. Soc. B 73 (2011) 423-498.

    Examples
    --------
    >>> field = Matern(std=2.0, range=8.0, mean=0.0)
    >>> round(field.kappa2, 3), round(field.tau, 3)
    (0.125, 0.409)
    """

    name: ClassVar[str] = "matern"

    std: float | Auto = "auto"
    range: float | Auto = "auto"
    mean: float | Auto = "auto"

    def __post_init__(self) -> None:
        for key in ("std", "range"):
            if (value := getattr(self, key)) != "auto":
                check_above_zero(key, value, 8.0 if key == "range" else 0.1)
        if self.mean != "auto" and not math.isfinite(self.mean):
            raise ConfigError(f"mean is {self.mean}: it must be a finite number. Write for example mean: 1.0, or auto.")

    @property
    def kappa2(self) -> float:
        return 8.0 / float(self.range) ** 2

    @property
    def tau(self) -> float:
        """Factor by which a pixel has the deviation ``std``: by the spectrum of the stencil, for long ranges 1 / (√(4π) κ std)."""
        from scipy.special import ellipe  # late: plans of other jobs need none of it

        middle = self.kappa2 + 4
        variance = 2 * float(ellipe((4 / middle) ** 2)) / (math.pi * (middle**2 - 16))
        return math.sqrt(variance) / float(self.std)

    @property
    def diagonal(self) -> float:
        """Diagonal of ``DᵀD``."""
        return self.tau**2 * ((self.kappa2 + 4) ** 2 + 4)

    @property
    def least(self) -> float:
        """Least eigenvalue of ``DᵀD``."""
        return (self.tau * self.kappa2) ** 2

    def spectrum(self, shape: tuple[int, int]) -> Array:
        """Variance of each frequency of a periodic image of this shape, for a transform that keeps the mean square."""
        y, x = (2 - 2 * np.cos(2 * np.pi * np.fft.fftfreq(n)) for n in shape)
        spectrum: Array = 1 / np.square(self.tau * (self.kappa2 + y[:, None] + x))
        return spectrum

    def apply(self, field: Array) -> Array:
        """``D x`` without the outermost pixels."""
        inner = field[..., 1:-1, 1:-1]
        around = field[..., :-2, 1:-1] + field[..., 2:, 1:-1]
        around += field[..., 1:-1, :-2]
        around += field[..., 1:-1, 2:]
        applied: Array = inner * inner.dtype.type(self.kappa2 + 4)
        applied -= around
        applied *= applied.dtype.type(self.tau)
        return applied


PRIOR = Matern


# Least range in pixels: below it, neighbouring pixels are hardly correlated.
SHORTEST = 2


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
    parts = [part for part in parts_of(operator) if not isinstance(part, Composition | Mask)]
    blurs = [part for part in parts if isinstance(part, Blur) and part.kernel.ndim == 2 and part.factor == 1]
    if len(blurs) < len(parts) or 2 * operator.reach >= edge:
        return None
    squares = (np.square(np.abs(np.fft.fft2(blur.kernel, (edge, edge)))) for blur in blurs)
    square: Array = math.prod(squares, start=np.ones((edge, edge)))
    return square if square[0, 0] > 0 else None


def gain_of(operator: Operator) -> float:
    """Return what such an operator makes of a constant image of 1."""
    return math.prod(float(part.kernel.sum()) for part in parts_of(operator) if isinstance(part, Blur))


def masks_nothing(operator: Operator, region: Region) -> bool:
    """Return whether the masks of an operator are 1 on all pixels that a region of its measurement depends on."""
    for mask in (part.mask for part in parts_of(operator) if isinstance(part, Mask)):
        axes = len(mask.shape)
        near = Region(region.start[-axes:], region.stop[-axes:]).widen(operator.reach).clip(Region.whole(mask.shape))
        if not (Masked(Constant(mask.shape, np.dtype(np.float64), 1.0), mask).read(near) == 1).all():
            return False
    return True


def likely(windows: Sequence[Excerpt], transfer: Array, given: Matern, gain: float) -> Likely:
    """The most likely deviation, and range up to the edge of a window; those that are given stay.

    The likelihood is that of the frequencies of tapered windows, as if they were independent (Whittle 1954).
    """
    from scipy.optimize import minimize

    edge = len(transfer)
    taper = np.outer(*[np.hanning(edge + 2)[1:-1]] * 2)
    taper /= math.sqrt(np.mean(np.square(taper)))
    level = np.mean([window.pixels.mean() for window in windows]) / gain
    found = given if given.mean != "auto" else replace(given, mean=float(level))
    power = [np.square(np.abs(np.fft.fft2((w.pixels - gain * float(found.mean)) * taper))) / edge**2 for w in windows]
    # The taper smears each frequency over its neighbours, the constant part most of all.
    counted = np.ones(transfer.shape, bool)
    counted[:2, :2] = counted[-1:, :2] = counted[:2, -1:] = counted[-1:, -1:] = False

    def unlikeliness(logs: Array) -> float:
        prior = replace(found, **dict(zip(free, np.exp(logs).tolist(), strict=True)))
        signal = transfer * prior.spectrum(transfer.shape)
        total = 0.0
        for window, seen in zip(windows, power, strict=True):
            expected = signal + window.variance
            total += float(np.sum((np.log(expected) + seen / expected)[counted]))
        return total

    free = [key for key in ("std", "range") if getattr(given, key) == "auto"]
    if not free:
        return Likely(found, 0.0, 0.0)
    total = float(np.mean([np.var(w.pixels) for w in windows]))
    noise = float(np.mean([w.variance for w in windows]))
    deviation = math.sqrt(max(total - noise, 1e-6 * total)) / abs(gain)
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
    prior = replace(found, **dict(zip(free, np.exp(best.x).tolist(), strict=True)))
    return Likely(prior, errors.get("std", 0.0), errors.get("range", 0.0))


STEP = 0.02
TAPERED = 2.1  # factor on errors: a taper leaves about so many correlated frequencies for each independent one


def _errors(unlikeliness: Callable[[Array], float], at: Array) -> Array:
    """Standard errors of the logarithms, by the inverse of the curvature."""
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
