"""Shift: the image displaced by any distance, and cropped to a field of view."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.rim import Readable
from halotile.tasks.operators.base import OperatorKind, Shape
from halotile.tasks.operators.blur import RULES
from halotile.tasks.operators.common.kernel import Frame, Frames, Seen, Spread


@dataclass(frozen=True, kw_only=True)
class Shift:
    """``y[i] = x[i + shift]``, with linear interpolation between pixels.

    Parameters
    ----------
    shift : (float, float)
        Along y and x, in pixels: the position of the first pixel of the measurement in the image.
    size : (int, int), optional
        Rows and columns of the measurement; by default those of the image.
    boundary : str
        Continuation of the image beyond its edges: ``circular``, ``reflect``, ``replicate`` or ``zero``.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> shift = Shift(shift=(0, 0.5), size=(1, 2))
    >>> read_all(shift.forward(InMemory(np.array([[0.0, 2.0, 6.0]])))).tolist()
    [[1.0, 4.0]]
    """

    name: ClassVar[str] = "shift"
    kind: ClassVar[OperatorKind] = "local"

    shift: tuple[float, float]
    size: tuple[int, int] | None = None
    boundary: str = "zero"

    def __post_init__(self) -> None:
        if self.boundary not in RULES or self.boundary == "valid":
            words = ", ".join(word for word in RULES if word != "valid")
            raise ConfigError(f"boundary is {self.boundary!r}: write one of {words}.")
        if not all(map(math.isfinite, self.shift)):
            raise ConfigError(f"shift is {self.shift}: write two numbers of pixels.")

    @property
    def reach(self) -> int:
        """The distance, rounded up, and the pixel of the interpolation."""
        return math.ceil(max(map(abs, self.shift))) + 1

    def frames(self, image: Shape) -> Frames:
        """Positions of the measurement pixels in the image, along y and x."""
        sizes = self.size or image[-2:]
        y, x = (
            self._frame(length, count, shift)
            for length, count, shift in zip(image[-2:], sizes, self.shift, strict=True)
        )
        return y, x

    def _frame(self, length: int, count: int, shift: float) -> Frame:
        rule = RULES[self.boundary]
        if rule == "constant" and (shift >= length or shift + count <= 0):
            raise ConfigError(
                f"shift is {self.shift} and the image is {length} pixels long: only the zeros outside the image would be "
                "measured. Write a smaller shift."
            )
        if rule == "periodic" and count != length:
            raise ConfigError(
                f"size is {self.size} and the image is {length} pixels long: with boundary circular they must be "
                "equal. Omit size, or write another boundary."
            )
        return Frame(length, count, 2, 1, -math.floor(shift), rule)

    def measured(self, image: Shape) -> Shape:
        return (*image[:-2], *(frame.count for frame in self.frames(image)))

    def forward(self, image: Readable) -> Seen:
        return Seen(image, self._kernels, self.frames(image.shape))

    def adjoint(self, measurement: Readable, image: Shape) -> Spread:
        return Spread(measurement, self._kernels, self.frames(image))

    @property
    def _kernels(self) -> NDArray[Any]:
        y, x = (s - math.floor(s) for s in self.shift)
        return np.outer([1 - y, y], [1 - x, x])[None]


OPERATOR = Shift
