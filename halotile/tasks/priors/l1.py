"""A sparse image."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Derived
from halotile.tasks.options import check_above_zero
from halotile.tasks.priors.base import Density, Prior


@dataclass(frozen=True, kw_only=True)
class Sparse(Prior):
    """``g(x) = weight |x|_1``: few pixels differ from 0.

    Parameters
    ----------
    weight : float
        Weight of the prior, against 1 / noise_sigma² for a measurement.
    """

    name: ClassVar[str] = "l1"

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_above_zero("weight", self.weight)

    def prox(self, image: Readable, step: float) -> Readable:
        """Soft thresholding by ``weight step``."""
        return Shrunk(image, self.weight * step)

    def slope(self, image: Readable) -> Readable:
        """``weight sign(x)``."""
        return Signs(image, self.weight)

    def density(self, image: Readable) -> Readable:
        """``weight |x|``."""
        return Magnitudes(image, self.weight)


@dataclass(frozen=True)
class Shrunk(Derived):
    """``sign(x) max(|x| - by, 0)``."""

    by: float

    def read(self, region: Region) -> Pixels:
        pixels = self.image.read(region).astype(self.dtype, copy=False)
        by = self.dtype.type(self.by)
        shrunk: Pixels = pixels - np.clip(pixels, -by, by)
        return shrunk


@dataclass(frozen=True)
class Signs(Derived):
    """``scale sign(x)``."""

    scale: float

    def read(self, region: Region) -> Pixels:
        signs: Pixels = np.sign(self.image.read(region)).astype(self.dtype) * self.dtype.type(self.scale)
        return signs


@dataclass(frozen=True)
class Magnitudes(Density):
    """``scale |x|``."""

    def read(self, region: Region) -> Pixels:
        magnitudes: Pixels = np.abs(self.image.read(region).astype(np.float64)) * self.scale
        return magnitudes


PRIOR = Sparse
