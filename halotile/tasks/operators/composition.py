"""Composition: operators applied one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.operators.base import Operator, OperatorKind, Shape, window_of, with_engine


@dataclass(frozen=True)
class Composition:
    """``y = A_n ... A_2 A_1 x``; the first of ``operators`` acts first.

    Parameters
    ----------
    operators : tuple of Operator
        In the order in which they are applied.
    """

    name: ClassVar[str] = "composition"

    operators: tuple[Operator, ...]

    @property
    def kind(self) -> OperatorKind:
        """The kind of the first operator that is not ``local``, else ``local``."""
        for operator in self.operators:
            if operator.kind != "local":
                return operator.kind
        return "local"

    def window(self, image: Shape) -> Region:
        """The region of the image that it needs, if the kind is ``windowed``.

        This is the window of the windowed operator, grown by the reach of those before it; an axis along which it would leave
        the image, or along which they change the size, is needed from end to end.
        """
        shapes = self.shapes(image)
        number = next(i for i, operator in enumerate(self.operators) if operator.kind == "windowed")
        window = window_of(self.operators[number], shapes[number])
        for operator, before, after in reversed(
            list(zip(self.operators[:number], shapes, shapes[1:], strict=False))
        ):
            window = _needed(window, operator.reach, before, after)
        return window

    def with_engine(self, dtype: np.dtype[Any], exact: bool) -> Composition:
        """The composition with the engines of its operators decided."""
        return replace(self, operators=tuple(with_engine(o, dtype, exact) for o in self.operators))

    @property
    def reach(self) -> int:
        """The sum of the reaches, times the factors of the operators before each."""
        total, spacing = 0, 1
        for operator in self.operators:
            total += spacing * operator.reach
            spacing *= getattr(operator, "factor", 1)
        return total

    def shapes(self, image: Shape) -> list[Shape]:
        """Shape of the image and of the result of each operator."""
        if not self.operators:
            raise ConfigError("a composition without operators changes nothing. Write at least one operator.")
        shapes = [image]
        for operator in self.operators:
            shapes.append(operator.measured(shapes[-1]))
        return shapes

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement."""
        return self.shapes(image)[-1]

    def forward(self, image: Readable) -> Readable:
        """``A x``."""
        for operator in self.operators:
            image = operator.forward(image)
        return image

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        """``A^T y``."""
        shapes = self.shapes(image)
        for operator, shape in reversed(list(zip(self.operators, shapes, strict=False))):
            measurement = operator.adjoint(measurement, shape)
        return measurement


def _needed(window: Region, reach: int, before: Shape, after: Shape) -> Region:
    """The window of the image ``before`` that a window of the image ``after`` needs."""
    front = len(before) - 2
    grown = window.grow(((0, 0),) * front + ((reach, reach),) * 2)
    ends = zip(grown.start, grown.stop, before, after, strict=True)
    spans = [(a, b) if a >= 0 and b <= n and n == m else (0, n) for a, b, n, m in ends]
    return Region(tuple(a for a, _ in spans), tuple(b for _, b in spans))


OPERATOR = Composition
