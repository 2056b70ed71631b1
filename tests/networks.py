"""Networks and functions of "the user's own", for tests of what a job may import."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def _seeded(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def convolutions(layers: int = 3, channels: int = 1, width: int = 16) -> nn.Module:
    """A stack of 3x3 convolutions: looks ``layers`` pixels far."""
    sizes = [channels, *[width] * (layers - 1), channels]
    parts: list[nn.Module] = []
    for into, out in itertools.pairwise(sizes):
        parts += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU()]
    return _seeded(nn.Sequential(*parts[:-1]))


def doubler() -> nn.Module:
    """Super-resolution: twice as many pixels on each axis."""
    return _seeded(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))
    )


def colouring() -> nn.Module:
    """One channel in, three out."""
    return _seeded(nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)))


def activated(name: str, kernel: int = 3) -> nn.Module:
    """Two convolutions, and a function of every pixel at the end."""
    first, last = (nn.Conv2d(into, out, kernel, padding=kernel // 2) for into, out in ((1, 8), (8, 1)))
    return _seeded(nn.Sequential(first, nn.ReLU(), last, getattr(nn, name)()))


class UNet(nn.Module):
    """Two strided levels: total stride 4, so tiles have to start at multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.down1 = nn.Conv2d(16, 16, 2, stride=2)
        self.down2 = nn.Conv2d(16, 16, 2, stride=2)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        x = nn.functional.pad(x, (0, -width % 4, 0, -height % 4), mode="replicate")
        a = self.first(x).relu()
        b = self.down1(a).relu()
        c = self.middle(self.down2(b)).relu()
        done: torch.Tensor = self.last(self.up1(self.up2(c) + b) + a)
        return done[..., :height, :width]


class Cropping(nn.Module):
    """Stride 4 without padding: loses the ragged edge."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 4, stride=4)
        self.up = nn.ConvTranspose2d(8, 1, 4, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.up(self.down(x))
        return done


def cropping() -> nn.Module:
    """A strided network that only takes multiples of 4."""
    return _seeded(Cropping())


def unet() -> nn.Module:
    """A small U-Net."""
    return _seeded(UNet())


class RoundingByLength(nn.Module):
    """Computes in another way where an axis is long, as libraries do."""

    def __init__(self, axis: int, length: int) -> None:
        super().__init__()
        self.axis, self.length = axis, length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-6) if x.shape[self.axis] > self.length else x


def rounding_by_length(axis: int, length: int) -> nn.Module:
    """A network whose last bits depend on the length of an axis of its window."""
    return RoundingByLength(axis, length)


def volumes() -> nn.Module:
    """Two convolutions of volumes."""
    return _seeded(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1)))


class Remembering(nn.Module):
    """Adds the mean of what it saw last: not pure."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.last if self.last is not None else 0.0
        self.last = x.mean()
        return x + before


def remembering() -> nn.Module:
    """A network with a memory."""
    return Remembering()


class Sigma(nn.Module):
    """Shrinks by the noise map."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return x / (1 + sigma)


def by_sigma() -> nn.Module:
    """A network that takes a noise map."""
    return Sigma()


class WholeNorm(nn.Module):
    """Subtracts the mean of the image: looks everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=(-2, -1), keepdim=True)


def whole_norm() -> nn.Module:
    """A network that cannot be tiled."""
    return WholeNorm()
