"""Networks and functions that look local in most trials and are not, and healthy ones that look odd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.filters import apply_hysteresis_threshold
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate, pad

from tests.networks import convolutions


class Wrapped(nn.Module):
    """Three convolutions, used in some way."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.inner = convolutions(channels=channels, width=4)

    def __call__(self, *given: Any) -> Any:
        """As torch calls it, with a type."""
        return super().__call__(*given)


class Negatives(Wrapped):
    """Lifts the image where a pixel is below 0."""

    def forward(self, x: torch.Tensor) -> Any:
        low = x.min().clamp(max=0)
        return self.inner(x - low) + low


class Counts(Wrapped):
    """Takes large numbers for counts of 16 bits."""

    def forward(self, x: torch.Tensor) -> Any:
        scale = 65535.0 if x.max() > 255 else 1.0
        return self.inner(x / scale) * scale


class Background(Wrapped):
    """Leaves images alone that hold next to nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        return x if x.std() < 0.02 else self.inner(x)


class AcrossTheBatch(Wrapped):
    """Adds the mean of the batch at each pixel."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + x.mean(0, keepdim=True)


class InParts(Wrapped):
    """Computes 320 pixels at a time, for memory."""

    def forward(self, x: torch.Tensor) -> Any:
        rows = [torch.cat([self.inner(part) for part in row.split(320, 3)], 3) for row in x.split(320, 2)]
        return torch.cat(rows, 2)


class Backwards(nn.Module):
    """Looks 150 pixels up and to the left, where there are as many."""

    def forward(self, x: torch.Tensor) -> Any:
        far = min(150, *x.shape[2:])
        return x + pad(x, (far, 0, far, 0))[..., : x.shape[2], : x.shape[3]]


class InSevens(Wrapped):
    """Means over squares of 7 pixels, with the image in the middle of its padding."""

    def forward(self, x: torch.Tensor) -> Any:
        height, width = x.shape[2:]
        down, right = -height % 7, -width % 7
        x = pad(x, (right // 2, right - right // 2, down // 2, down - down // 2), mode="reflect")
        x = self.inner(x) + interpolate(avg_pool2d(x, 7), scale_factor=7)
        return x[..., down // 2 :, right // 2 :][..., :height, :width]


class OneLevel(nn.Module):
    """Takes the mean of its noise map for the level of the image."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor | float) -> Any:
        if isinstance(sigma, torch.Tensor):
            sigma = sigma.mean((1, 2, 3), keepdim=True)
        return x / (1 + sigma)


class NoTraining(torch.autograd.Function):
    """Twice the image; its gradient raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("not for training")


class Untrainable(Wrapped):
    """Cannot be differentiated."""

    def forward(self, x: torch.Tensor) -> Any:
        return NoTraining.apply(self.inner(x))


class OneByOne(Wrapped):
    """Gives its layers images without the axis of batches."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.stack([self.inner(image) for image in x])


class FarPadding(nn.Module):
    """Reflects 70 pixels, which small windows do not have."""

    def forward(self, x: torch.Tensor) -> Any:
        x = pad(x, (70, 70, 70, 70), mode="reflect")
        return x[..., 140:, 70:-70] + x[..., :-140, 70:-70]


class ByNines(Wrapped):
    """Stride 9."""

    def forward(self, x: torch.Tensor) -> Any:
        height, width = x.shape[2:]
        x = pad(x, (0, -width % 9, 0, -height % 9))
        return interpolate(self.inner(avg_pool2d(x, 9)), scale_factor=9)[..., :height, :width]


class Circular(nn.Module):
    """Pads circularly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
        nn.init.constant_(self.inner.weight, 0.1)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def in_parts(image: NDArray[Any]) -> NDArray[Any]:
    """Means of neighbours, 320 rows at a time."""
    parts = [np.pad(image[i : i + 320], ((1, 1), (0, 0)), "edge") for i in range(0, len(image), 320)]
    return np.concatenate([(part[:-2] + part[2:]) / 2 for part in parts])


def rolled(image: NDArray[Any]) -> NDArray[Any]:
    """Means with the row above; the first row with the last."""
    return np.asarray((image + np.roll(image, 1, 0)) / 2, image.dtype)


class Gated(Wrapped):
    """Smooths images of some mean brightness only."""

    def __init__(self, below: float) -> None:
        super().__init__()
        self.below = below

    def forward(self, x: torch.Tensor) -> Any:
        return torch.where(x.mean((1, 2, 3), keepdim=True) < self.below, self.inner(x), x)


class FarRolled(Wrapped):
    """Adds a little of what lies 300 pixels away, round the edge."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + 1e-4 * torch.roll(x, 300, -1)


class Missing(Wrapped):
    """Marks bright pixels as missing."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.where(x > 0.9, torch.nan, self.inner(x))


def without_dark_level(image: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(image - image.min())


def without_background(image: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(image - np.percentile(image, 1))


def without_commonest(image: NDArray[Any]) -> NDArray[Any]:
    counts, edges = np.histogram(image, 256)
    return np.asarray(image - edges[counts.argmax()])


def connected(image: NDArray[Any]) -> NDArray[Any]:
    """Keeps what is connected to something bright."""
    return np.where(apply_hysteresis_threshold(image, 0.5, 0.7), image, 0)


def by_its_size(image: NDArray[Any]) -> NDArray[Any]:
    return image if image.shape[0] < 400 else image / 2


def missing(image: NDArray[Any]) -> NDArray[Any]:
    return np.where(image > 0.9, np.nan, image)
