"""Stacks, networks and images for tests of distributed objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute

physics: Any = pytest.importorskip("deepinv.physics")
optim: Any = pytest.importorskip("deepinv.optim")
models: Any = pytest.importorskip("deepinv.models")
Patch = pytest.MonkeyPatch

NEAR = 1e-5
"""Largest difference, relative to the largest value."""


def in_blocks(monkeypatch: Patch, edge: int, large: int = 100) -> None:
    """Cut images of so many pixels into blocks of this length."""
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", large)
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", edge)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def kernel(edge: int) -> torch.Tensor:
    return torch.rand(1, 1, edge, edge, generator=torch.Generator().manual_seed(edge)) / edge**2


def masks(count: int) -> list[Any]:
    number = torch.arange(20 * 24).reshape(1, 20, 24) % count
    return [physics.Inpainting(mask=(number == k).float(), img_size=(1, 20, 24)) for k in range(count)]


STACKS: dict[str, Callable[[], list[Any]]] = {
    "circular blurs": lambda: [physics.Blur(filter=kernel(n), padding="circular") for n in (3, 5, 7, 9)],
    "other rims": lambda: [
        physics.Blur(filter=kernel(5), padding="reflect"),
        physics.Blur(filter=kernel(3), padding="valid"),
    ],
    "complementary masks": lambda: masks(3),
    "other sizes": lambda: [
        physics.Downsampling(img_size=(1, 20, 24), filter="gaussian", factor=2, padding="circular"),
        physics.Denoising(),
        physics.BlurFFT(img_size=(1, 20, 24), filter=kernel(5)),
    ],
    "one": lambda: [physics.Blur(filter=kernel(3), padding="circular")],
    "seven": lambda: [physics.Blur(filter=kernel(3 + n % 2 * 2), padding="circular") for n in range(7)],
}


def difference(left: Any, right: Any) -> float:
    if isinstance(left, torch.Tensor):
        return float((left - right).abs().max() / right.abs().max())
    assert len(left) == len(right)
    return max(difference(a, b) for a, b in zip(left, right, strict=True))


def squares(result: Any) -> torch.Tensor:
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return sum(((part * part).sum() for part in parts), torch.zeros(()))


class Smooth(torch.nn.Module):  # type: ignore[misc]
    """A network with a reach of two pixels, and a noise level for each pixel or image."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.nn.Parameter(torch.randn(2, 1, 3, 3, generator=generator) / 3)
        self.second = torch.nn.Parameter(torch.randn(1, 2, 3, 3, generator=generator) / 3)
        self.scale = scale

    def forward(self, x: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
        if isinstance(sigma, torch.Tensor) and sigma.dim() == 1:
            sigma = sigma[:, None, None, None]
        functional = torch.nn.functional
        hidden = torch.relu(functional.conv2d(x * sigma, self.first, padding=1))
        return functional.interpolate(functional.conv2d(hidden, self.second, padding=1), scale_factor=self.scale)


def tiled(ctx: DistributedContext, net: Any, **options: Any) -> Any:
    return distribute(net, ctx, type_object="denoiser", **{"patch_size": 16, "overlap": 2, **options})
