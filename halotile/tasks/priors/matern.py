"""A smooth image: a Gaussian field with a deviation and a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.rim import Array, Readable
from halotile.tasks.options import Auto, check_above_zero
from halotile.tasks.priors.base import Prior


@dataclass(frozen=True, kw_only=True)
class Matern(Prior):
    """``D (x - mean)`` is white noise, with ``D = τ (κ² - Δ)`` and the Laplacian of five points.

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
    (0.125, 0.399)
    """

    name: ClassVar[str] = "matern"

    std: float | Auto = "auto"
    range: float | Auto = "auto"
    mean: float | Auto = "auto"

    def __post_init__(self) -> None:
        for key in ("std", "range"):
            if (value := getattr(self, key)) != "auto":
                check_above_zero(key, value)
        if self.mean != "auto" and not math.isfinite(self.mean):
            raise ConfigError(f"mean is {self.mean}: it must be a finite number. Write for example mean: 1.0, or auto.")

    @property
    def deviation(self) -> float:
        """The standard deviation, once it is decided."""
        return self._decided("std")

    @property
    def level(self) -> float:
        """The mean, once it is decided."""
        return self._decided("mean")

    @property
    def length(self) -> float:
        """The range, once it is decided."""
        return self._decided("range")

    @property
    def kappa2(self) -> float:
        return 8.0 / self.length**2

    @property
    def tau(self) -> float:
        return 1 / (math.sqrt(4 * math.pi * self.kappa2) * self.deviation)

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

    def _decided(self, key: str) -> float:
        value = getattr(self, key)
        if value == "auto":
            raise ConfigError(f"prior.{key} is auto, which only job: samples decides from the data. Write a number.")
        return float(value)

    def prox(self, image: Readable, step: float) -> Readable:
        raise ConfigError("prior matern has no prox: write job: samples, which solves it exactly.")

    def slope(self, image: Readable) -> Readable | None:
        raise ConfigError("prior matern is for job: samples.")


PRIOR = Matern
