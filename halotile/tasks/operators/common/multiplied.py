"""The multiplicative step of expectation maximisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Derived

ROUNDING = 1e-3
"""Part of the sensitivity by which a correction may be below 0: the rounding of its sums, not a negative number."""


@dataclass(frozen=True)
class Multiplied(Derived):
    """``x (s - g) / s`` with the sensitivity ``s = A^T w`` and the gradient ``g = s - A^T(w y / (A x + b))``.

    Pixels without sensitivity stay as they are.

    Examples
    --------
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
