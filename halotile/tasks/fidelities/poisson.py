"""The Poisson likelihood, for counts."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.options import check_above_zero


@dataclass(frozen=True, kw_only=True)
class Poisson(Fidelity):
    """``A x + background - y log(A x + background)``: counts, minus the constant for which a perfect fit gives 0.

    Parameters
    ----------
    background : float
        Counts without the image: 0 or more.
    floor : float
        Value of ``A x + background`` below which the logarithm continues along its tangent.
    """

    name: ClassVar[str] = "poisson"
    needs_start: ClassVar[bool] = True
    is_of_counts: ClassVar[bool] = True

    background: float = 0.0
    floor: float = 1e-6

    def __post_init__(self) -> None:
        check_above_zero("floor", self.floor)
        if not 0 <= self.background < math.inf:
            raise ConfigError(f"background is {self.background}: write 0 or more counts.")

    def value(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """The Kullback-Leibler divergence; linear without counts, and below the floor."""
        given = seen.astype(np.float64) + self.background
        rate, counts = np.maximum(given, self.floor), measured.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(counts > 0, counts * np.log(counts / rate), 0.0)
        return logs - counts + given + counts * (rate - given) / self.floor

    def slope(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """``1 - y / (A x + background)``."""
        kind = seen.dtype.type
        rate = np.maximum(seen + kind(self.background), kind(self.floor))
        slope: NDArray[Any] = kind(1) - measured.astype(seen.dtype, copy=False) / rate
        return slope

    def curvature(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """``y / (A x + background)²``."""
        kind = seen.dtype.type
        rate = np.maximum(seen + kind(self.background), kind(self.floor))
        curvature: NDArray[Any] = measured.astype(seen.dtype, copy=False) / np.square(rate)
        return curvature


FIDELITY = Poisson
