"""Declarations of an imaging operator that let a stack of operators run on parts of an image.

An operator is a frozen dataclass of its options. ``forward`` and ``adjoint`` take and return a
:class:`~halotile.storage.rim.Readable`: nothing is computed before a region is read, and then
only what that region needs. So operators compose, and the whole image is just another region.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable

Shape = tuple[int, ...]
# The part of the image that an operator needs: a neighbourhood of each pixel, one window, or all of it.
OperatorKind = Literal["local", "windowed", "whole"]


class Operator(Protocol):
    """A linear map from images to measurements. With axes before y and x, it acts on each plane by itself."""

    name: ClassVar[str]
    """The name in a job file."""

    @property
    def kind(self) -> OperatorKind:
        """The part of the image that it needs."""

    @property
    def reach(self) -> int:
        """Largest distance, in pixels of the image, from a measurement pixel to an image pixel that it depends on."""

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement of an image of this shape."""

    def forward(self, image: Readable) -> Readable:
        """``A x``."""

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        """``A^T y``, of the shape ``image``."""


class Windowed(Operator, Protocol):
    """An operator of the kind ``windowed``."""

    def window(self, image: Shape) -> Region:
        """The region of an image of this shape that it needs; its adjoint is zero elsewhere."""


def window_of(operator: Operator, image: Shape) -> Region:
    """The region of an image that an operator needs: its window, or the whole image.

    >>> from halotile.tasks.operators.crop import Crop
    >>> window_of(Crop(origin=(2, 3), size=(4, 5)), (10, 10))
    Region(start=(2, 3), stop=(6, 8))
    """
    return cast(Windowed, operator).window(image) if operator.kind == "windowed" else Region.whole(image)


Some = TypeVar("Some", bound=Operator)


def with_engine(operator: Some, dtype: np.dtype[Any], exact: bool) -> Some:
    """Return the operator with ``engine: auto`` of its convolutions decided, or unchanged without convolutions.

    ``operator``: blur, or a sum or composition that may contain blurs; ``dtype``: dtype of the computation; ``exact``: whether every convolution must
    be a direct sum.

    >>> from halotile.tasks.operators.blur import Blur
    >>> with_engine(Blur(kernel=np.ones((31, 31))), np.dtype("float32"), exact=False).engine
    'fft'
    """
    decide = getattr(operator, "with_engine", None)
    return operator if decide is None else cast(Some, decide(dtype, exact))


def engines_of(operator: Operator) -> Iterator[str]:
    """Yield the engines of an operator's convolutions, including those of its parts.

    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> list(engines_of(Composition((Blur(kernel=np.ones((3, 3))),))))
    ['auto']
    """
    return (engine for part in parts_of(operator) if (engine := getattr(part, "engine", None)))


def parts_of(operator: Operator) -> Iterator[Operator]:
    """Yield an operator and, of a sum or a composition, its parts and theirs.

    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> [part.name for part in parts_of(Composition((Blur(kernel=np.ones((3, 3))),)))]
    ['composition', 'blur']
    """
    yield operator
    for part in getattr(operator, "operators", ()):
        yield from parts_of(part)


@dataclass(frozen=True)
class Computed:
    """An image that is computed from another one; subclasses define ``shape`` and ``read``."""

    image: Readable

    @property
    def dtype(self) -> np.dtype[Any]:
        return working_dtype(self.image.dtype)


@dataclass(frozen=True)
class Derived(Computed):
    """An image that is computed from another one of the same shape; subclasses define ``read``."""

    @property
    def shape(self) -> Shape:
        return self.image.shape


@dataclass(frozen=True)
class InMemory:
    """An array in memory as a Readable."""

    pixels: NDArray[Any]

    @property
    def shape(self) -> Shape:
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, as a view."""
        return self.pixels[region.slices]


class PickledByFields:
    """A dataclass that pickles without its cached properties, which are computed anew where it is loaded."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}


def read_all(source: Readable) -> Pixels:
    return source.read(Region.whole(source.shape))


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of computations with pixels of this dtype: double for double, else single precision."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
