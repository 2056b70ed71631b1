"""The Gaussian filter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from halotile.tasks.convolution.shifted_sums import (
    repeat_edges,
    rows_around,
    strips,
    weigh_symmetric,
    widened,
)
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.options import STRICT, check_above_zero

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Gaussian(Pixelwise):
    """``y = g * x``, g a sampled Gaussian that sums to 1, cut at ``truncate`` standard deviations.

    The same filter as ``scipy.ndimage.gaussian_filter(mode="reflect")``. Where a window ends
    without a halo (boundary: cut), its outermost pixels are repeated.

    Examples
    --------
    >>> Gaussian(sigma=2.0).receptive_field()
    8
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "gaussian"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False

    sigma: float
    """Standard deviation of the Gaussian, in pixels."""
    truncate: float = 4.0
    """Distance at which the Gaussian is cut, in standard deviations."""

    def __post_init__(self) -> None:
        check_above_zero("sigma", self.sigma)
        check_above_zero("truncate", self.truncate)

    def receptive_field(self) -> int:
        """Radius of the filter, in pixels."""
        return int(self.truncate * self.sigma + 0.5)

    def bytes_per_pixel(self) -> float:
        """The result, and the intermediates of a tile of one strip."""
        return 16.0

    def taps(self) -> tuple[float, ...]:
        """Weights of the pixels at distance 0, 1, 2, ..."""
        heights = [math.exp(-0.5 * (k / self.sigma) ** 2) for k in range(self.receptive_field() + 1)]
        total = heights[0] + 2 * math.fsum(heights[1:])
        return tuple(height / total for height in heights)

    def build(self) -> Model:
        """The filter as a function on tensors."""
        return partial(smooth, taps=self.taps())


def smooth(batch: torch.Tensor, *, taps: tuple[float, ...]) -> torch.Tensor:
    """Filter every spatial axis of a batch with the same symmetric weights."""
    import torch

    depth = len(taps) - 1
    out = torch.empty_like(batch, memory_format=torch.contiguous_format)
    for start, stop in strips(batch):
        source = rows_around(batch, start, stop, depth)
        strip = out.narrow(2, start, stop - start)
        for axis in range(2, batch.dim() - 1):
            room, middle = widened(strip, axis + 1, depth)
            weigh_symmetric(source, axis, taps, middle)
            repeat_edges(room, axis + 1, depth)
            source = room
        weigh_symmetric(source, batch.dim() - 1, taps, strip)
    return out


DENOISER = Gaussian
