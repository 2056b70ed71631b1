"""Least squares, for Gaussian noise."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.fidelities.base import Fidelity


@dataclass(frozen=True, kw_only=True)
class L2(Fidelity):
    """``(A x - y)² / 2``: Gaussian noise."""

    name: ClassVar[str] = "l2"
    is_square: ClassVar[bool] = True

    def value(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """``(A x - y)² / 2``."""
        difference = self.slope(seen, measured).astype(np.float64)
        return np.square(difference, out=difference) / 2

    def slope(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """``A x - y``."""
        difference: NDArray[Any] = seen - measured.astype(seen.dtype, copy=False)
        return difference

    def curvature(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """1 everywhere."""
        return np.ones_like(seen)


FIDELITY = L2
