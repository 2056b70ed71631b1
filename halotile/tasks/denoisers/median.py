"""The median filter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from halotile.tasks.convolution.median_networks import MedianNetwork, median_network
from halotile.tasks.convolution.shifted_sums import rows_around, strips
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.options import STRICT, check_odd

if TYPE_CHECKING:
    import torch

NETWORK_PIXELS = 49
"""Windows of up to this many pixels are sorted by exchanges, larger ones by selection."""
SELECTION_BYTES = 1 << 22
"""Memory for the windows that are copied out at once for selection."""


@dataclass(frozen=True, kw_only=True)
class Median(Pixelwise):
    """The median of the ``size`` x ``size`` (or ``size``³) pixels around each pixel.

    The same filter as ``scipy.ndimage.median_filter(mode="reflect")``. A NaN makes every pixel NaN
    whose window contains it. Where a window ends without a halo (boundary: cut), its outermost
    pixels are repeated.

    Examples
    --------
    >>> Median(size=5).receptive_field()
    2
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "median"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False

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
        """The filter as a function on tensors."""
        return partial(filter_median, size=self.size)


def filter_median(batch: torch.Tensor, *, size: int) -> torch.Tensor:
    """The median of the window around every pixel of a batch."""
    import torch

    axes = batch.dim() - 2
    count = size**axes
    network = median_network(size, axes) if count <= NETWORK_PIXELS else None
    # A network keeps about as many arrays as the window has pixels; half a strip keeps them in cache.
    pixels = 1 << 15 if network else max(1, SELECTION_BYTES // (count * batch.element_size()))
    out = torch.empty_like(batch, memory_format=torch.contiguous_format)
    for start, stop in strips(batch, pixels):
        source = _padded(rows_around(batch, start, stop, size // 2), size // 2)
        out.narrow(2, start, stop - start).copy_(_middle(source, size, network))
    return out


def _padded(rows: torch.Tensor, depth: int) -> torch.Tensor:
    """Rows with their ends repeated on the other spatial axes, and no negative zeros.

    The minimum of 0.0 and -0.0 depends on the position of the pair in a vector register.
    """
    import torch.nn.functional

    around = (depth, depth) * (rows.dim() - 3) + (0, 0)
    return torch.nn.functional.pad(rows, around, mode="replicate") + 0.0


def _middle(source: torch.Tensor, size: int, network: MedianNetwork | None) -> torch.Tensor:
    """The median of every window that lies inside."""
    if network is not None:
        return network(source)
    windows = source
    for axis in range(2, source.dim()):
        windows = windows.unfold(axis, size, 1)
    return windows.flatten(source.dim()).median(dim=-1).values


DENOISER = Median
