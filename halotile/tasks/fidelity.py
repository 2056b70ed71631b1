"""How well an image explains its measurements, and which way to change it: on any region of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.held import Held
from halotile.tasks.operators.base import Operator, Shape, working_dtype


@dataclass(frozen=True)
class Term:
    """A measurement, the operator that made it, and how much it counts: 1 / sigma² of its noise."""

    operator: Operator
    measurement: Readable
    weight: float = 1.0


@dataclass(frozen=True)
class Residual:
    """``A x - y``."""

    seen: Readable
    measurement: Readable

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self.measurement.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return self.seen.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        difference: Pixels = self.seen.read(region) - self.measurement.read(region).astype(
            self.dtype, copy=False
        )
        return difference


@dataclass(frozen=True)
class GradientStep:
    """``x - step sum_i weight_i A_i^T (A_i x - y_i)``: a step down the gradient of ``sum_i weight_i |A_i x - y_i|² / 2``.

    The terms are added in their order, so any region has the bits of the whole.

    Parameters
    ----------
    image : Readable
        ``x``.
    terms : tuple of Term
        The stack.
    step : float
        The step size.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> from halotile.tasks.operators.blur import Blur
    >>> halve = Blur(kernel=np.full((1, 1), 0.5))
    >>> x, y = InMemory(np.full((1, 2), 4.0)), InMemory(np.ones((1, 2)))
    >>> read_all(GradientStep(x, (Term(halve, y, weight=2.0),), step=1.0)).tolist()
    [[3.0, 3.0]]
    """

    image: Readable
    terms: tuple[Term, ...]
    step: float

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self.image.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return working_dtype(self.image.dtype)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        held = Held(self.image, 2 * max(term.operator.reach for term in self.terms))
        gradient = np.zeros(region.shape, self.dtype)
        for term in self.terms:
            residual = Residual(term.operator.forward(held), term.measurement)
            pixels = term.operator.adjoint(residual, self.shape).read(region)
            gradient += pixels * self.dtype.type(term.weight)
        gradient *= self.dtype.type(self.step)
        stepped: Pixels = held.read(region).astype(self.dtype, copy=False) - gradient
        return stepped
