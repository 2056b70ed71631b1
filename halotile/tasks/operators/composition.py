"""Composition: operators one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halotile.storage.rim import Readable
from halotile.tasks.operators.base import Kind, Operator, Shape


@dataclass(frozen=True)
class Composition:
    """``y = A_n ... A_2 A_1 x``; the first of ``operators`` acts first."""

    name: ClassVar[str] = "composition"
    kind: ClassVar[Kind] = "local"

    operators: tuple[Operator, ...]

    @property
    def reach(self) -> int:
        """All of theirs together; where one leaves out pixels, those behind it look farther."""
        total, spacing = 0, 1
        for operator in self.operators:
            total += spacing * operator.reach
            spacing *= getattr(operator, "factor", 1)
        return total

    def shapes(self, image: Shape) -> list[Shape]:
        """Shape of the image and of what each operator makes of it."""
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


OPERATOR = Composition
