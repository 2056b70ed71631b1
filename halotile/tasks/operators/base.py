"""What an imaging operator declares, so that a stack of them can run on pieces of an image.

An operator is a frozen dataclass of its options. ``forward`` and ``adjoint`` take a
:class:`~halotile.storage.rim.Readable` and give one: nothing is computed before a region is read, and then
only what that region needs. So operators compose, and the whole image is only ever one more region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable

Shape = tuple[int, ...]
Kind = Literal["local", "windowed", "whole"]
"""What of the image an operator has to see: a neighbourhood, one window, or all of it."""


class Operator(Protocol):
    """A linear map from images to measurements. Images may have axes in front of y and x: each plane by itself."""

    name: ClassVar[str]
    """The word that a job file uses."""

    @property
    def kind(self) -> Kind:
        """What of the image it has to see."""
        ...

    @property
    def reach(self) -> int:
        """How far, in pixels of the image, a pixel of the measurement may look from where it lies."""
        ...

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement of an image of this shape.

        Raises
        ------
        ConfigError
            When there can be none.
        """
        ...

    def forward(self, image: Readable) -> Readable:
        """``A x``."""
        ...

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        """``A^T y``, of the shape ``image``."""
        ...


class Windowed(Operator, Protocol):
    """An operator of the kind ``windowed``."""

    def window(self, image: Shape) -> Region:
        """The pixels that it sees of an image of this shape; its adjoint is zero elsewhere."""
        ...


def window_of(operator: Operator, image: Shape) -> Region:
    """The pixels that an operator sees of an image: its window, or all of them.

    Examples
    --------
    >>> from halotile.tasks.operators.crop import Crop
    >>> window_of(Crop(origin=(2, 3), size=(4, 5)), (10, 10))
    Region(start=(2, 3), stop=(6, 8))
    """
    return cast(Windowed, operator).window(image) if operator.kind == "windowed" else Region.whole(image)


Some = TypeVar("Some", bound=Operator)


def with_engine(operator: Some, dtype: np.dtype[Any], exact: bool) -> Some:
    """The operator with its convolutions' ``engine: auto`` decided; as it is, when it has none.

    Parameters
    ----------
    operator : Operator
        A blur, or a sum or composition that may hold some.
    dtype : dtype
        What pixels are computed in.
    exact : bool
        Whether every convolution has to be a direct sum.

    Examples
    --------
    >>> from halotile.tasks.operators.blur import Blur
    >>> with_engine(Blur(kernel=np.ones((31, 31))), np.dtype("float32"), exact=False).engine
    'fft'
    """
    decide = getattr(operator, "with_engine", None)
    return operator if decide is None else cast(Some, decide(dtype, exact))


def engines_of(operator: Operator) -> Iterator[str]:
    """How the convolutions of an operator are computed, and of those that it is made of.

    Examples
    --------
    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> list(engines_of(Composition((Blur(kernel=np.ones((3, 3))),))))
    ['auto']
    """
    if engine := getattr(operator, "engine", None):
        yield engine
    for part in getattr(operator, "operators", ()):
        yield from engines_of(part)


@dataclass(frozen=True)
class Derived:
    """An image that is computed from another one of its shape; what derives from it says how, in ``read``."""

    image: Readable

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self.image.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return working_dtype(self.image.dtype)


@dataclass(frozen=True)
class InMemory:
    """An array in memory as a Readable."""

    pixels: NDArray[Any]

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel."""
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, not copied."""
        return self.pixels[region.slices]


def read_all(source: Readable) -> Pixels:
    """Every pixel."""
    return source.read(Region.whole(source.shape))


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What pixels of this type are computed in: double where they are double, single otherwise."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
