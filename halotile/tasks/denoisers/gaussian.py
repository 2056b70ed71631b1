"""The Gaussian filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.convolution.shifted_sums import repeat_edges, rows_around, strips, weigh_symmetric, widened
from halotile.tasks.denoisers.base import Model, PlaneFilter, Spaced, holed
from halotile.tasks.denoisers.compiled.library import by_plane, compiled, kernel_for
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_above_zero


@dataclass(frozen=True, kw_only=True)
class Gaussian(Spaced):
    """``y = g * x``, g a sampled Gaussian that sums to 1, cut at ``truncate`` standard deviations.

    The same filter as ``scipy.ndimage.gaussian_filter(mode="reflect")``. Where a window ends
    without a halo (boundary: cut), its outermost pixels are repeated.

    >>> Gaussian(sigma=2.0).receptive_field()
    8
    """

    name: ClassVar[str] = "gaussian"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False
    takes_valid: ClassVar[bool] = True

    sigma: float
    """Standard deviation of the Gaussian, in pixels; of a volume, in pixels along the axis where they are smallest."""
    truncate: float = 4.0
    """Distance at which the Gaussian is cut, in standard deviations."""

    spacing: tuple[float, ...] | None = None
    """Size of a pixel along each tiled axis, in one unit, where they differ. Omitted: in a volume that of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero("sigma", self.sigma)
        check_above_zero("truncate", self.truncate)

    def receptive_field(self) -> int:
        """Radius of the filter, in pixels."""
        return int(self.truncate * self.sigma + 0.5)

    def bytes_per_pixel(self) -> float:
        """The result, and the intermediates of a tile of one strip."""
        return 16.0

    def taps(self, spacing: float = 1.0) -> tuple[float, ...]:
        """Weights of the pixels at distance 0, 1, 2, ... along an axis."""
        sigma = self.sigma / spacing
        heights = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(int(self.truncate * sigma + 0.5) + 1)]
        total = heights[0] + 2 * math.fsum(heights[1:])
        return tuple(height / total for height in heights)

    def taps_along(self, axes: int) -> list[tuple[float, ...]]:
        """The weights along each of so many spatial axes."""
        return [self.taps(size) for size in self.spacing_along(axes)]

    def build(self) -> Model:
        return partial(smooth, taps_of=self.taps_along)

    def plane_filter(self) -> PlaneFilter | None:
        if (kernel := compiled("smooth")) is None:
            return None

        def filter_plane(plane: NDArray[Any], out: NDArray[Any]) -> bool:
            # Not before: plans ask for the filter, and refuse a width whose weights would fill the memory.
            down, across = (np.array(weights, np.float32) for weights in self.taps_along(2))
            kernel(plane, *plane.shape, down, len(down) - 1, across, len(across) - 1, out)
            return True

        return filter_plane


def smooth(
    batch: torch.Tensor, valid: torch.Tensor | None = None, *, taps_of: Callable[[int], Sequence[tuple[float, ...]]]
) -> torch.Tensor:
    """Filter every spatial axis of a batch with symmetric weights; ``taps_of`` gives those of each of so many axes.

    Where there are holes, the weights of the measured pixels are divided by their sum, relative to that of all weights: exactly 1
    away from holes.

    References
    ----------
    H. Knutsson, C.-F. Westin, Normalized and differential convolution, CVPR 1993.
    """
    taps = taps_of(batch.dim() - 2)
    if (measured := holed(valid)) is None:
        return _smoothed(batch, taps)
    smoothed = _smoothed(batch * measured, taps)
    total = _smoothed(batch.new_ones((1, 1, *[1] * len(taps))), taps)
    share = _smoothed(measured, taps).div_(total)
    return smoothed.div_(share.masked_fill_(measured == 0, 1.0))


def _smoothed(batch: torch.Tensor, taps: Sequence[tuple[float, ...]]) -> torch.Tensor:

    if (kernel := kernel_for("smooth", batch)) is not None:
        down, across = (torch.tensor(weights, dtype=torch.float32) for weights in taps)
        return by_plane(kernel, batch, down, len(down) - 1, across, len(across) - 1)
    axes = range(2, batch.dim())
    along = dict(zip(axes, taps, strict=True))
    depths = {axis: len(weights) - 1 for axis, weights in along.items()}
    out = torch.empty_like(batch, memory_format=torch.contiguous_format)
    for start, stop in strips(batch):
        source = rows_around(batch, start, stop, depths[2])
        strip = out.narrow(2, start, stop - start)
        for axis in axes[:-1]:
            room, middle = widened(strip, axis + 1, depths[axis + 1])
            weigh_symmetric(source, axis, along[axis], middle)
            repeat_edges(room, axis + 1, depths[axis + 1])
            source = room
        weigh_symmetric(source, axes[-1], along[axes[-1]], strip)
    return out


DENOISER = Gaussian
