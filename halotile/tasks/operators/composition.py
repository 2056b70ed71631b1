"""Composition: operators applied one after the other, and the check of a user's adjoint against its forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import Constant
from halotile.tasks.inner_tiles import spanned
from halotile.tasks.operators.base import InMemory, Operator, OperatorKind, Shape, window_of, with_engine
from halotile.tasks.operators.crop import Pasted
from halotile.tasks.terms import Term


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
        for operator, before, after in reversed(list(zip(self.operators[:number], shapes, shapes[1:], strict=False))):
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
        return self.shapes(image)[-1]

    def forward(self, image: Readable) -> Readable:
        for operator in self.operators:
            image = operator.forward(image)
        return image

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        shapes = self.shapes(image)
        for operator, shape in reversed(list(zip(self.operators, shapes, strict=False))):
            measurement = operator.adjoint(measurement, shape)
        return measurement


def _needed(window: Region, reach: int, before: Shape, after: Shape) -> Region:
    """The window of the image ``before`` that a window of the image ``after`` needs."""
    grown = window.widen(reach)
    ends = zip(grown.start, grown.stop, before, after, strict=True)
    spans = [(a, b) if a >= 0 and b <= n and n == m else (0, n) for a, b, n, m in ends]
    return spanned(spans)


OPERATOR = Composition


EDGE = 64  # edge of the corners of an image that are tried, in pixels
# Allowed difference of the products, relative to the larger one: a hundred times the rounding in single precision.
TOLERANCE = 1e-4
SEED = 0


def check_adjoint(operator: Operator, image: Shape) -> None:
    """Refuse an operator whose products ``<A x, y>`` and ``<x, A^T y>`` differ, for random numbers in two corners of an image."""
    try:
        products = [_products(operator, corner, image) for corner in _corners(window_of(operator, image))]
    except (ConfigError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"forward and adjoint were tried on an image of shape {list(image)} and failed: {type(error).__name__}: {error}."
        ) from error
    for there, back in products:
        difference = abs(there - back) / max(abs(there), abs(back), 1e-300)
        if not difference <= TOLERANCE:
            raise ConfigError(
                f"adjoint is not the transpose of forward: for random x and y, <A x, y> is {there:.6g} and <x, A^T y> {back:.6g}, "
                f"a relative difference of {difference:.2g}, where {TOLERANCE:g} is allowed. Solvers would not find the "
                "minimum. Write the transpose of forward."
            )


def _corners(window: Region) -> list[Region]:
    """The first and the last corner, which together touch every side of the rim; along other axes one plane."""
    sizes = [min(n, 1 if axis < len(window.start) - 2 else EDGE) for axis, n in enumerate(window.shape)]
    first = Region(window.start, tuple(a + n for a, n in zip(window.start, sizes, strict=True)))
    last = Region(tuple(b - n for b, n in zip(window.stop, sizes, strict=True)), window.stop)
    return [first] if first == last else [first, last]


def _products(operator: Operator, corner: Region, image: Shape) -> tuple[float, float]:
    """Both products, for ``x`` in a corner and ``y`` in the corresponding part of the measurement."""
    random = np.random.default_rng(SEED)
    x = random.standard_normal(corner.shape)
    measured = operator.measured(image)
    there = Term(operator, Constant(measured, np.dtype(np.float64))).share(corner, image)
    seen = _read(operator.forward(Pasted(InMemory(x), corner, image)), measured, there)
    # With a component along A x the products are large compared to their rounding.
    y = seen + np.sqrt(np.mean(seen**2)) * random.standard_normal(seen.shape)
    back = _read(operator.adjoint(Pasted(InMemory(y), there, measured), image), image, corner)
    return float(np.sum(seen * y)), float(np.sum(x * back))


def _read(result: Readable, shape: Shape, region: Region) -> NDArray[np.float64]:
    pixels: Pixels = result.read(region)
    if tuple(result.shape) != tuple(shape) or pixels.shape != region.shape:
        raise ConfigError(
            f"the result has shape {list(result.shape)}, and pixels of shape {list(pixels.shape)} for a region of "
            f"{list(region.shape)}, where the shape must be {list(shape)}. Write forward and adjoint that agree with measured."
        )
    return np.asarray(pixels, np.float64)
