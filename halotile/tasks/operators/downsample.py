"""Downsampling: a smaller image, low-pass filtered against aliasing."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.storage.rim import Readable
from halotile.tasks.operators.base import OperatorKind, Shape
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.common.kernel import Seen, Spread
from halotile.tasks.options import check_whole


@dataclass(frozen=True, kw_only=True)
class Downsample:
    """Every ``factor``-th pixel of the image after a low-pass filter: the cubic kernel, ``factor`` times as wide.

    Parameters
    ----------
    factor : int
        Pixels of the image for each pixel of the measurement, along y and x.
    boundary : str
        As for :class:`~halotile.tasks.operators.blur.Blur`.

    References
    ----------
    R. G. Keys, Cubic convolution interpolation for digital image processing, IEEE Trans. Acoust., Speech,
    Signal Process. 29 (1981) 1153-1160.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> small = Downsample(factor=2).forward(InMemory(np.full((16, 12), 3.0)))
    >>> small.shape, read_all(small).round(9).max()
    ((8, 6), np.float64(3.0))
    """

    name: ClassVar[str] = "downsample"
    kind: ClassVar[OperatorKind] = "local"

    factor: int = 2
    boundary: str = "reflect"

    def __post_init__(self) -> None:
        check_whole("factor", self.factor, 1)
        _ = self.blur  # refuses an unknown boundary

    @property
    def blur(self) -> Blur:
        """The downsampling as a blur."""
        taps = cubic_kernel(self.factor)
        return Blur(kernel=np.outer(taps, taps), boundary=self.boundary, factor=self.factor)

    @property
    def reach(self) -> int:
        """The reach of the blur."""
        return self.blur.reach

    def measured(self, image: Shape) -> Shape:
        return self.blur.measured(image)

    def forward(self, image: Readable) -> Seen:
        return self.blur.forward(image)

    def adjoint(self, measurement: Readable, image: Shape) -> Spread:
        return self.blur.adjoint(measurement, image)


def cubic_kernel(factor: int) -> NDArray[Any]:
    """The cubic kernel (a = -1/2) at pixels 1 / ``factor`` apart, normalised to the sum 1.

    >>> cubic_kernel(2).round(3).tolist()
    [-0.012, -0.035, 0.113, 0.434, 0.434, 0.113, -0.035, -0.012]
    """
    if factor == 1:
        return np.ones(1)
    distance = np.abs(np.arange(-2 * factor + 0.5, 2 * factor)) / factor
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    taps = np.where(distance <= 1, near, far)
    normalised: NDArray[Any] = taps / taps.sum()
    return normalised


OPERATOR = Downsample
