"""The median filter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.convolution.median_networks import SORTED_SIZES, MedianNetwork, median_network
from halotile.tasks.convolution.shifted_sums import box_sum, rows_around, strips
from halotile.tasks.denoisers.base import Model, Pixelwise, PlaneFilter, holed
from halotile.tasks.denoisers.compiled.library import by_plane, compiled, kernel_for
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_odd

NETWORK_PIXELS = 49  # windows of up to this many pixels are sorted by exchanges, larger ones by selection
SELECTION_BYTES = 1 << 22  # memory for the windows that are copied out at once for selection

MOST_RANKS = 2**32 - 1  # pixels that the compiled filter tells apart, those around the image included


@dataclass(frozen=True, kw_only=True)
class Median(Pixelwise):
    """The median of the ``size`` x ``size`` (or ``size``³) pixels around each pixel.

    The same filter as ``scipy.ndimage.median_filter(mode="reflect")``, beside holes that of the measured
    pixels (of an even number of them the lesser middle one). Where a window ends without a halo
    (boundary: cut), its outermost pixels are repeated.

    >>> Median(size=5).receptive_field()
    2
    """

    name: ClassVar[str] = "median"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False
    takes_valid: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True

    size: int
    """Edge of the window, in pixels: an odd number."""

    def __post_init__(self) -> None:
        check_odd("size", self.size)

    def receptive_field(self) -> int:
        """Half of the window, in pixels."""
        return self.size // 2

    def bytes_per_pixel(self) -> float:
        """The result, and the windows of a strip: measured 16 to 90, most for small tiles."""
        return 100.0

    def build(self) -> Model:
        return partial(filter_median, size=self.size)

    def plane_filter(self) -> PlaneFilter | None:
        if self.size not in SORTED_SIZES or (kernel := compiled(f"median_{self.size}")) is None:
            return None

        def filter_plane(plane: NDArray[Any], out: NDArray[Any]) -> bool:
            has_nan = np.zeros(1, np.int32)
            kernel(plane, *plane.shape, has_nan, out)
            return not has_nan[0]

        return filter_plane


def filter_median(batch: torch.Tensor, valid: torch.Tensor | None = None, *, size: int) -> torch.Tensor:
    """The median of the window around every pixel of a batch; of the measured pixels, where there are holes."""
    axes = batch.dim() - 2
    measured = holed(valid)
    if measured is None and (medians := _compiled(batch, size)) is not None:
        return medians
    count = size**axes
    network = median_network(size, axes) if count <= NETWORK_PIXELS else None
    # A network keeps about as many arrays as the window has pixels; half a strip keeps them in cache.
    pixels = 1 << 15 if network else max(1, SELECTION_BYTES // (count * batch.element_size()))
    out = torch.empty_like(batch, memory_format=torch.contiguous_format)
    for start, stop in strips(batch, pixels):
        source = _padded(rows_around(batch, start, stop, size // 2), size // 2)
        strip = out.narrow(2, start, stop - start)
        strip.copy_(_middle(source, size, network))
        if measured is not None:
            known = _padded(rows_around(measured, start, stop, size // 2), size // 2)
            _replace_near_holes(strip, source, known, size)
    return out


def _compiled(batch: torch.Tensor, size: int) -> torch.Tensor | None:
    """The same bits by compiled code; None where it does not take the batch, or there are NaN: the lesser of NaN and a number is another in C."""
    is_sorted = size in SORTED_SIZES  # of larger windows ranks are counted
    if not is_sorted and math.prod(n + size - 1 for n in batch.shape[2:]) > MOST_RANKS:
        return None
    if (kernel := kernel_for(f"median_{size}" if is_sorted else "median_of", batch)) is None:
        return None
    has_nan = torch.zeros(1, dtype=torch.int32)
    medians = by_plane(kernel, batch, *(() if is_sorted else (size,)), has_nan)
    return None if bool(has_nan) else medians


def _replace_near_holes(strip: torch.Tensor, source: torch.Tensor, known: torch.Tensor, size: int) -> None:
    """Replace the medians of windows that hold both holes and measured pixels by those of the measured ones."""
    windows, measured = source.masked_fill(known == 0, torch.inf), known
    for axis in range(2, source.dim()):
        measured = box_sum(measured, axis, size)
        windows = windows.unfold(axis, size, 1)
    places = ((measured > 0) & (measured < size ** (source.dim() - 2))).nonzero(as_tuple=True)
    at_once = max(1, SELECTION_BYTES // (size ** (source.dim() - 2) * source.element_size()))
    for part in zip(*(place.split(at_once) for place in places), strict=True):
        ordered = windows[part].flatten(1).sort(dim=1).values
        middle = (measured[part].long() - 1) // 2  # a mean of two would be no value of the image
        strip[part] = ordered.gather(1, middle[:, None])[:, 0]


def _padded(rows: torch.Tensor, depth: int) -> torch.Tensor:
    """Rows with their ends repeated on the other spatial axes, and no negative zeros.

    The minimum of 0.0 and -0.0 depends on the position of the pair in a vector register.
    """
    around = (depth, depth) * (rows.dim() - 3) + (0, 0)
    return torch.nn.functional.pad(rows, around, mode="replicate") + 0.0


def _middle(source: torch.Tensor, size: int, network: MedianNetwork | None) -> torch.Tensor:
    """The median of every window inside the image."""
    if network is not None:
        return network(source)
    windows = source
    for axis in range(2, source.dim()):
        windows = windows.unfold(axis, size, 1)
    return windows.flatten(source.dim()).median(dim=-1).values


DENOISER = Median
