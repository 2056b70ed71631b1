"""Inputs for tests of denoisers: images, whole or in tiles, and a user's own networks and functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.ndimage
import torch
from numpy.typing import NDArray
from torch import nn

from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Pixels, Rim, read_window
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.operators.base import InMemory

Image = NDArray[Any]

NETWORK_DEPTH, NETWORK_WIDTH = 5, 16
TILES = {2: ((49, 63), (137, 55), (31, 48)), 3: ((11, 17, 19),)}


def network(scale: int = 1) -> nn.Module:
    """A user's own network, for the tables of denoisers."""

    class Lab(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv2d(1, 8, 3, padding=1)
            self.down = nn.Conv2d(8, 8, 2, stride=2)
            self.up = nn.ConvTranspose2d(8, 8 * scale**2, 2, stride=2)
            self.leave = nn.Sequential(nn.Conv2d(8 * scale**2, scale**2, 3, padding=1), nn.PixelShuffle(scale))

        def forward(self, batch: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
            result: torch.Tensor = self.leave(self.up(torch.relu(self.down(self.enter(batch * sigma)))))
            return result

    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Lab()


def sharpen(image: Image, amount: float = 0.5) -> Image:
    """A user's own function, for the tables of denoisers: receptive field 2, computed in float64."""
    blurred = scipy.ndimage.gaussian_filter(image.astype(float), 1.0, radius=2, mode="constant")
    sharp: Image = image + amount * (image - blurred)
    return sharp


def dncnn_tensors(keys: list[str], width: int = NETWORK_WIDTH) -> dict[str, torch.Tensor]:
    """Random weights of a DnCNN whose layers go by these names."""
    sizes, generator = [1] + [width] * (len(keys) - 1) + [1], torch.Generator().manual_seed(2)
    tensors = {}
    for key, into, out in zip(keys, sizes, sizes[1:], strict=False):
        tensors[f"{key}.weight"] = torch.randn((out, into, 3, 3), generator=generator) / (3 * into**0.5)
        tensors[f"{key}.bias"] = 0.1 * torch.randn(out, generator=generator)
    return tensors


@dataclasses.dataclass(frozen=True)
class Counted(InMemory):
    """An image that notes what is read of it."""

    reads: list[Region] = dataclasses.field(default_factory=list)

    def read(self, region: Region) -> Pixels:
        self.reads.append(region)
        return super().read(region)


def image(dims: int, dtype: str = "float32", seed: int = 0) -> Image:
    """The same one each time."""
    return np.random.default_rng(seed).random({2: (138, 172), 3: (21, 33, 38)}[dims]).astype(dtype)


def apply(denoiser: Denoiser, pixels: Image, **sides: Image) -> Image:
    """The model on one window."""
    tensors = {name: torch.from_numpy(side)[None, None] for name, side in sides.items()}
    with torch.inference_mode():
        result: Image = denoiser.build()(torch.from_numpy(pixels)[None, None], **tensors)[0, 0].numpy()
    return result


def tiles(denoiser: Denoiser, pixels: Image, tile: tuple[int, ...], **sides: Image) -> Iterator[tuple[Any, Image]]:
    """Denoise tile by tile: where each result goes, and the result."""
    reach = denoiser.receptive_field()
    assert reach is not None
    rim = Rim.everywhere(denoiser.boundary, pixels.ndim)
    depth, align = ((reach, reach),) * pixels.ndim, (denoiser.alignment,) * pixels.ndim
    for block in Grid(pixels.shape, tile, depth, align):
        cut = {name: read_window(InMemory(side), block.window, rim) for name, side in {"": pixels, **sides}.items()}
        result, factor = apply(denoiser, cut.pop(""), **cut), (denoiser.scale,) * pixels.ndim
        start = rim.reach(block.window, pixels.shape)
        yield block.core.scale(factor).slices, result[block.core.relative_to(start).scale(factor).slices]


def whole(denoiser: Denoiser, pixels: Image, **sides: Image) -> Image:
    """The result on the whole image under the denoiser's own rim."""
    ((_, result),) = tiles(denoiser, pixels, pixels.shape, **sides)
    return result


class Calls(nn.Module):  # type: ignore[misc]
    """A network that is a function."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.call(batch)
