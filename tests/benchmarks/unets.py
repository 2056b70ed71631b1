"""U-Nets as a job imports them: a residual one of the size of DRUNet (``tests.benchmarks.unets:residual_unet``), and a plain one."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64
"""Channels at full resolution; each of the three levels below has twice those above it."""
BLOCKS = 4
"""Residual blocks of each level on the way down, at the bottom and on the way up: 32.6 million numbers in all."""
LEVELS = 3
STRIDE = 2**LEVELS


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions, added to what they are given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block on a batch."""
        return x + self.second(torch.relu_(self.first(x)))


class ResidualUNet(nn.Module):  # type: ignore[misc]
    """The layers of K. Zhang et al., Plug-and-play image restoration with deep denoiser prior (2021), without a noise map.

    Sides that are no multiple of the total stride are continued behind.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(LEVELS + 1)]

        def several(count: int) -> nn.Sequential:
            return nn.Sequential(*(Block(count) for _ in range(blocks)))

        self.head = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.before = nn.ModuleList(several(count) for count in channels[:-1])
        self.down = nn.ModuleList(nn.Conv2d(count, 2 * count, 2, stride=2, bias=False) for count in channels[:-1])
        self.body = several(channels[-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * count, count, 2, stride=2, bias=False) for count in channels[:-1]
        )
        self.after = nn.ModuleList(several(count) for count in channels[:-1])
        self.tail = nn.Conv2d(width, 1, 3, padding=1, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The network on a batch."""
        height, width = batch.shape[-2:]
        behind = (0, -width % STRIDE, 0, -height % STRIDE)
        signal = self.head(functional.pad(batch, behind, mode="replicate") if any(behind) else batch)
        kept = []
        for blocks, down in zip(self.before, self.down, strict=True):
            kept.append(signal)
            signal = down(blocks(signal))
        signal = signal + self.body(signal)
        for up, blocks, earlier in zip(reversed(self.up), reversed(self.after), reversed(kept), strict=True):
            signal = blocks(up(signal)) + earlier
        done: torch.Tensor = self.tail(signal)[..., :height, :width]
        return done


def residual_unet(width: int = WIDTH, blocks: int = BLOCKS) -> nn.Module:
    """The network with numbers drawn from a fixed seed, small enough that no level grows out of bounds."""
    network = ResidualUNet(width, blocks)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / (2 * parameter[0].numel() ** 0.5))
    return network.eval().requires_grad_(False)


def reach(blocks: int = BLOCKS) -> int:
    """How far, in pixels, an output pixel looks: followed back through the layers, from each place in a stride.

    Examples
    --------
    >>> reach(4)
    185
    """
    farthest = 0
    for place in range(STRIDE):
        low, high = place - 1, place + 1  # the tail
        for _ in range(LEVELS):
            low, high = ((low - 2 * blocks) // 2, (high + 2 * blocks) // 2)  # blocks, and a transposed convolution
        low, high = low - 2 * blocks, high + 2 * blocks
        for _ in range(LEVELS):
            low, high = 2 * low - 2 * blocks, 2 * high + 1 + 2 * blocks  # a strided convolution, and blocks
        farthest = max(farthest, place - (low - 1), high + 1 - place)  # the head
    return farthest


def parameters(width: int = WIDTH) -> int:
    """How many numbers it has, without drawing them.

    Examples
    --------
    >>> parameters(64)
    32638080
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ResidualUNet(width, BLOCKS).parameters())


class PlainUNet(nn.Module):  # type: ignore[misc]
    """Two convolutions at each of four levels, as in O. Ronneberger et al., U-Net (2015), but padded. What it finds is taken away."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()

        def two(into: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()
            )

        self.down = nn.ModuleList(itertools.starmap(two, itertools.pairwise((1, *widths))))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in itertools.pairwise(widths)
        )
        self.after = nn.ModuleList(two(2 * width, width) for width in widths[:-1])
        self.tail = nn.Conv2d(widths[0], 1, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The network on a batch."""
        height, width = batch.shape[-2:]
        stride = 2 ** len(self.up)
        signal = functional.pad(batch, (0, -width % stride, 0, -height % stride), mode="replicate")
        kept = []
        for convolve in self.down[:-1]:
            kept.append(convolve(signal))
            signal = functional.max_pool2d(kept[-1], 2)
        signal = self.down[-1](signal)
        for up, convolve, beside in zip(reversed(self.up), reversed(self.after), reversed(kept), strict=True):
            signal = convolve(torch.cat([up(signal), beside], 1))
        found: torch.Tensor = self.tail(signal)[..., :height, :width]
        return batch - found


def plain_unet() -> nn.Module:
    """The network with 1.9 million numbers drawn from a fixed seed."""
    torch.manual_seed(0)
    return PlainUNet((32, 64, 128, 256))
