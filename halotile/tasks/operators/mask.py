"""Mask: each pixel multiplied by its own weight, such as 0 or 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Derived, OperatorKind, Shape


@dataclass(frozen=True)
class Masked(Derived):
    """``m * x``, the mask repeated along the axes before its own."""

    mask: Readable

    def read(self, region: Region) -> Pixels:
        axes = len(self.mask.shape)
        weights = self.mask.read(Region(region.start[-axes:], region.stop[-axes:]))
        if weights.dtype.kind in "iu":
            weights = weights != 0
        product: Pixels = self.image.read(region).astype(self.dtype, copy=False) * weights.astype(
            self.dtype, copy=False
        )
        return product


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """``y = m * x``; self-adjoint.

    Parameters
    ----------
    mask : Readable
        Of the shape of the image, or of its last axes. Integers are 0 or not 0, such as 0 and 255.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> mask = Mask(mask=InMemory(np.array([[255, 0]])))
    >>> read_all(mask.forward(InMemory(np.array([[3.0, 4.0]])))).tolist()
    [[3.0, 0.0]]
    """

    name: ClassVar[str] = "mask"
    kind: ClassVar[OperatorKind] = "local"

    mask: Readable

    @property
    def reach(self) -> int:
        return 0

    def measured(self, image: Shape) -> Shape:
        if self.mask.shape != image[-len(self.mask.shape) :]:
            raise ConfigError(
                f"the mask has shape {self.mask.shape} and the image {image}. Write a mask of the image's shape, "
                "or of the shape of its last axes."
            )
        return image

    def forward(self, image: Readable) -> Masked:
        self.measured(image.shape)
        return Masked(image, self.mask)

    def adjoint(self, measurement: Readable, image: Shape) -> Masked:
        return self.forward(measurement)

    def squared(self, image: Shape) -> tuple[Mask, Region]:
        """The operator with the squares of the entries, and the part of an image where its adjoint has them: all of it."""
        is_flags = self.mask.dtype.kind in "iu"
        return self if is_flags else Mask(mask=Masked(self.mask, self.mask)), Region.whole(image)


OPERATOR = Mask
