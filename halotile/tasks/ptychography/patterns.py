"""Patterns of a scan in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.tasks.ptychography.recipe import ScanRecipe


def turned(image: torch.Tensor, recipe: ScanRecipe) -> torch.Tensor:
    """An image of the detector in the order in which it is compared: a far field begins with the direction of the beam."""
    return torch.fft.ifftshift(image, (-2, -1)) if recipe.optics.field == "far" else image


@dataclass(frozen=True)
class Patterns:
    """The patterns of a scan, as counted.

    Parameters
    ----------
    recipe : ScanRecipe
        The reconstruction.
    """

    recipe: ScanRecipe

    @cached_property
    def counted(self) -> NDArray[Any]:
        """All patterns."""
        pixels: NDArray[Any] = self.recipe.patterns[:]
        if (pixels.dtype.kind == "f" and not np.isfinite(pixels).all()) or pixels.min() < 0:
            raise InputError(
                f"{self.recipe.patterns.path} has negative values or NaN, which are no counts. Convert the scan again."
            )
        return pixels

    def read(self, numbers: NDArray[np.int64], device: Any) -> torch.Tensor:
        """Some patterns, (positions, rows, columns)."""
        return turned(torch.from_numpy(self.counted[numbers].astype(np.float32)).to(device), self.recipe)

    def mask(self, device: Any) -> torch.Tensor | None:
        """1 where a pixel counts, else 0; None where all do."""
        mask = self.recipe.scan.mask
        return None if mask is None else turned(torch.from_numpy(mask).float(), self.recipe).to(device)

    def mean(self) -> torch.Tensor:
        """The mean pattern, 0 in pixels that do not count."""
        mean = turned(torch.from_numpy(self.counted.mean(0, dtype=np.float64)).float(), self.recipe)
        mask = self.mask("cpu")
        return mean if mask is None else mean * mask
