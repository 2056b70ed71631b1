"""Check of the adjoint of a user's operator against its forward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import Constant
from halotile.tasks.operators.base import InMemory, Operator, Shape, window_of
from halotile.tasks.operators.crop import Pasted
from halotile.tasks.terms import Term

EDGE = 64
"""Edge of the corners of an image that are tried, in pixels."""
TOLERANCE = 1e-4
"""Allowed difference of the products, relative to the larger one: a hundred times the rounding in single precision."""
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
