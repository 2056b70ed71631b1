"""No denoising: the image as it is, stored anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from halotile.tasks.denoisers.base import Model, Pixelwise, PlaneFilter
from halotile.tasks.lazy import torch


@dataclass(frozen=True, kw_only=True)
class NoDenoising(Pixelwise):
    """The image as it is: to store it as an OME-Zarr with levels, or in other chunks.

    >>> NoDenoising().receptive_field()
    0
    """

    name: ClassVar[str] = "none"
    dims: ClassVar[tuple[int, ...]] = (2, 3)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False
    takes_valid: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True

    def receptive_field(self) -> int:
        """Zero pixels."""
        return 0

    def bytes_per_pixel(self) -> float:
        """The result."""
        return 8.0

    def build(self) -> Model:
        """The identity as a function on tensors."""
        return keep

    def plane_filter(self) -> PlaneFilter | None:
        return copy_plane


def keep(batch: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Return a batch as it is."""
    return batch


def copy_plane(plane: NDArray[Any], out: NDArray[Any]) -> bool:
    """Copy a plane of pixels."""
    out[...] = plane
    return True


DENOISER = NoDenoising
