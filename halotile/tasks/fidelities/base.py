"""Base of all data fidelities."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Fidelity(ABC):
    """Distance between a measurement and the forward of an image, pixel by pixel. Its fields are options of a job."""

    name: ClassVar[str]
    is_square: ClassVar[bool] = False
    """True for half the square of the difference, whose gradient is linear."""
    needs_start: ClassVar[bool] = False
    """True where an image of zeros cannot be started from."""
    is_of_counts: ClassVar[bool] = False
    """True for the likelihood of counts, with the slope ``1 - y / (A x + background)``."""

    @abstractmethod
    def value(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """The contribution of each pixel to the misfit, in double precision."""

    @abstractmethod
    def slope(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """The derivative of the misfit by ``seen``, in the dtype of ``seen``."""

    @abstractmethod
    def curvature(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        """The derivative of the slope by ``seen``, in the dtype of ``seen``."""
