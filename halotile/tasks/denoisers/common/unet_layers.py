"""A U-Net whose result at a pixel does not favour the pixel itself, for training without clean images."""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool2d, interpolate, pad

SLOPE = 0.1
"""Slope of the activations below 0."""


class BlindUNet(torch.nn.Module):  # type: ignore[misc]  # torch has no types
    """A U-Net of 3x3 convolutions on normalised pixels, without a connection at full resolution.

    It averages before each reduction, and connects no first convolutions to the last ones: training with masked pixels would leave
    a checkerboard otherwise.

    Parameters
    ----------
    channels : int
        Channels of the image.
    width : int
        Channels of the first convolutions; each reduction doubles them.
    levels : int
        Number of reductions by 2.

    References
    ----------
    E. Höck, T.-O. Buchholz, A. Brachmann, F. Jug, A. Freytag, N2V2: fixing Noise2Void checkerboard artifacts with modified sampling
    strategies and a tweaked network architecture, ECCV Workshops (2022).
    """

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = torch.nn.ModuleList(
            _pair(into, out) for into, out in zip([channels, *widths], widths, strict=False)
        )
        self.up = torch.nn.ModuleList(
            _pair(widths[level + 1] + (widths[level] if level else 0), widths[level])
            for level in reversed(range(levels))
        )
        self.last = torch.nn.Conv2d(width, channels, 1)
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Denoise windows of any size, in the units of the image."""
        rows, columns = batch.shape[2:]
        stride = 2 ** len(self.up)
        signal = pad((batch - self.mean) / self.deviation, (0, -columns % stride, 0, -rows % stride))
        signal, connections = avg_pool2d(self.down[0](signal), 2), []
        for layers in self.down[1:-1]:
            connections.append(layers(signal))
            signal = avg_pool2d(connections[-1], 2)
        signal = self.down[-1](signal)
        for layers in self.up:
            signal = interpolate(signal, scale_factor=2.0)
            signal = layers(torch.cat([signal, connections.pop()], 1) if connections else signal)
        return self.last(signal)[:, :, :rows, :columns] * self.deviation + self.mean


def _pair(into: int, out: int) -> torch.nn.Sequential:
    """Two convolutions."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(into, out, 3, padding=1), torch.nn.LeakyReLU(SLOPE, inplace=True),
        torch.nn.Conv2d(out, out, 3, padding=1), torch.nn.LeakyReLU(SLOPE, inplace=True),
    )  # fmt: skip
