"""Sum: operators on the same image, their measurements weighted and added; and the multiplicative step of expectation maximisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Derived, Operator, OperatorKind, Shape, window_of, with_engine, working_dtype


@dataclass(frozen=True)
class Total:
    """``sum_j weights[j] parts[j]``, added in order."""

    parts: tuple[Readable, ...]
    weights: tuple[float, ...]

    @property
    def shape(self) -> Shape:
        return self.parts[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return working_dtype(np.result_type(*(part.dtype for part in self.parts)))

    def read(self, region: Region) -> Pixels:
        weights = [self.dtype.type(weight) for weight in self.weights]
        total: NDArray[Any] = np.multiply(self.parts[0].read(region), weights[0], dtype=self.dtype)
        for part, weight in zip(self.parts[1:], weights[1:], strict=True):
            pixels = part.read(region).astype(self.dtype, copy=False)
            total += pixels if weight == 1 else pixels * weight
        return total


@dataclass(frozen=True)
class WeightedSum:
    """``y = sum_j weights[j] A_j x``.

    Parameters
    ----------
    operators : tuple of Operator
        Operators whose measurements have one shape.
    weights : tuple of float
        One for each.
    """

    name: ClassVar[str] = "sum"

    operators: tuple[Operator, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.operators):
            raise ConfigError(
                f"weights has length {len(self.weights)}, and there are {len(self.operators)} operators: write one for each."
            )
        if not all(map(math.isfinite, self.weights)):
            raise ConfigError(
                f"weights is {list(self.weights)}: NaN and infinity are not allowed. Write finite numbers."
            )

    @property
    def kind(self) -> OperatorKind:
        """``whole`` if any operator is, else the common kind of all, else ``local``."""
        kinds = {operator.kind for operator in self.operators}
        return "whole" if "whole" in kinds else kinds.pop() if len(kinds) == 1 else "local"

    def window(self, image: Shape) -> Region:
        """The smallest window that contains those of the operators, if the kind is ``windowed``."""
        windows = [window_of(operator, image) for operator in self.operators]
        return Region(
            tuple(map(min, zip(*(window.start for window in windows), strict=True))),
            tuple(map(max, zip(*(window.stop for window in windows), strict=True))),
        )

    def with_engine(self, dtype: np.dtype[Any], exact: bool) -> WeightedSum:
        """The sum with the engines of its operators decided."""
        return replace(self, operators=tuple(with_engine(o, dtype, exact) for o in self.operators))

    @property
    def reach(self) -> int:
        """The largest reach of the operators."""
        return max(operator.reach for operator in self.operators)

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement, which all operators share."""
        if not self.operators or len(self.operators) != len(self.weights):
            raise ConfigError(
                f"there are {len(self.operators)} operators and {len(self.weights)} weights: write one weight for each "
                "operator, and at least one operator."
            )
        shapes = {operator.measured(image) for operator in self.operators}
        if len(shapes) != 1:
            raise ConfigError(
                f"the operators of a sum give measurements of the shapes {sorted(shapes)}, which cannot be added. "
                "Write operators with one shape, or stack them."
            )
        return shapes.pop()

    def forward(self, image: Readable) -> Total:
        self.measured(image.shape)
        return Total(tuple(operator.forward(image) for operator in self.operators), self.weights)

    def adjoint(self, measurement: Readable, image: Shape) -> Total:
        return Total(tuple(operator.adjoint(measurement, image) for operator in self.operators), self.weights)


OPERATOR = WeightedSum


# Part of the sensitivity by which a correction may be below 0: the rounding of its sums, not a negative number.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Multiplied(Derived):
    """``x (s - g) / s`` with the sensitivity ``s = A^T w`` and the gradient ``g = s - A^T(w y / (A x + b))``.

    Pixels without sensitivity stay as they are.

    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> x, slope, sensitivity = (InMemory(np.array([[a, b]])) for a, b in ((2.0, 3.0), (-1.0, 0.0), (2.0, 0.0)))
    >>> read_all(Multiplied(x, slope, sensitivity)).tolist()
    [[3.0, 3.0]]
    """

    slope: Readable
    sensitivity: Readable

    def read(self, region: Region) -> Pixels:
        read = (part.read(region) for part in (self.image, self.slope, self.sensitivity))
        pixels: list[NDArray[Any]] = [np.asarray(each) for each in read]
        image, slope, seen = pixels
        least = -ROUNDING * float(seen.max(initial=0.0))
        if min(float(part.min(initial=0.0)) for part in (seen, seen - slope)) < least or np.any(image < 0):
            raise InputError(
                "solver osem multiplies an image by corrections, and one of them, or the image, is below 0. Write a start without negative "
                "numbers, and operators whose forward and adjoint give none for images without any; or solver.name: fista."
            )
        factor = np.divide(seen - slope, seen, out=np.ones_like(seen), where=seen > 0)
        result: Pixels = image * np.maximum(factor, 0)
        return result
