"""Crop: one window of the image, such as a field of a mosaic."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Computed, OperatorKind, Shape


@dataclass(frozen=True)
class Cut(Computed):
    """``y[i] = x[i + origin]``."""

    window: Region

    @property
    def shape(self) -> Shape:
        return self.window.shape

    def read(self, region: Region) -> Pixels:
        return self.image.read(region.shift(self.window.start)).astype(self.dtype, copy=False)


@dataclass(frozen=True)
class Pasted(Computed):
    """``x[p] = y[p - origin]`` in the window, zero outside of it; its ``image`` is ``y``."""

    window: Region
    shape: Shape

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; only its part of the measurement is read."""
        pixels = np.zeros(region.shape, self.dtype)
        shared = region.clip(self.window)
        if shared.size:
            pixels[shared.relative_to(region).slices] = self.image.read(shared.relative_to(self.window))
        return pixels


@dataclass(frozen=True, kw_only=True)
class Crop:
    """``y[i] = x[i + origin]`` for the ``size`` pixels of a window.

    Parameters
    ----------
    origin : (int, int)
        First pixel of the window, along y and x. The window must be inside the image.
    size : (int, int)
        Rows and columns of the window.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> crop = Crop(origin=(0, 1), size=(1, 2))
    >>> read_all(crop.forward(InMemory(np.array([[1.0, 2.0, 3.0, 4.0]])))).tolist()
    [[2.0, 3.0]]
    >>> read_all(crop.adjoint(InMemory(np.array([[2.0, 3.0]])), (1, 4))).tolist()
    [[0.0, 2.0, 3.0, 0.0]]
    """

    name: ClassVar[str] = "crop"
    kind: ClassVar[OperatorKind] = "windowed"

    origin: tuple[int, int]
    size: tuple[int, int]

    def __post_init__(self) -> None:
        for key, pair, least in (("origin", self.origin, 0), ("size", self.size, 1)):
            if len(pair) != 2 or not all(isinstance(n, (int, np.integer)) and n >= least for n in pair):
                raise ConfigError(f"{key} is {pair}: write two whole numbers of pixels, {least} or more.")

    @property
    def reach(self) -> int:
        return 0

    def window(self, image: Shape) -> Region:
        """The window in an image of this shape."""
        front = len(image) - 2
        stop = tuple(a + n for a, n in zip(self.origin, self.size, strict=True))
        window = Region((0,) * front + tuple(self.origin), image[:front] + stop)
        if not window.inside(Region.whole(image)):
            raise ConfigError(
                f"origin is {self.origin} and size {self.size}: the window ends at {stop}, outside the image of "
                f"{image[-2:]}. Move it, or make it smaller."
            )
        return window

    def measured(self, image: Shape) -> Shape:
        return self.window(image).shape

    def forward(self, image: Readable) -> Cut:
        return Cut(image, self.window(image.shape))

    def adjoint(self, measurement: Readable, image: Shape) -> Pasted:
        return Pasted(measurement, self.window(image), image)


OPERATOR = Crop
