"""The short way through a stack of convolutions gives the bits of the long one, or is not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halotile.tasks.fused import Guard, convolve_relu
from tests.benchmarks.data import network

SHAPES = [(1, 1, 526, 526), (3, 1, 150, 170), (1, 1, 200, 151), (2, 1, 33, 40), (1, 1, 100, 100)]


def stack(gain: float = 1.0) -> Any:
    """A small stack with a fixed start."""
    torch.manual_seed(3)
    layers = torch.nn.ModuleList(
        torch.nn.Conv2d(a, b, 3, padding=1) for a, b in [(1, 16), (16, 16), (16, 16), (16, 16)]
    )
    for layer in layers:
        layer.weight.data *= gain
    return layers.to(memory_format=torch.channels_last).requires_grad_(False)


def long_way(layers: Any, image: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        image = torch.relu_(layer(image))
    return image


def short_way(layers: Any, image: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        image = convolve_relu(layer, image)
    return image


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != SHAPES[-1]])
def test_the_short_way_gives_the_same_bits(shape: tuple[int, ...]) -> None:
    layers, image = stack(), torch.rand(shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert Guard(layers).allows(image)
        assert torch.equal(short_way(layers, image), long_way(layers, image))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_pixel_that_could_become_nan_takes_the_long_way(value: float) -> None:
    layers, image = stack(), torch.rand(1, 1, 200, 200)
    image[0, 0, 50, 60] = value
    with torch.inference_mode():
        assert not Guard(layers).allows(image)


def test_a_sum_that_overflows_inside_takes_the_long_way() -> None:
    layers, image = stack(gain=1e18), torch.rand(2, 1, 64, 64) + 1
    with torch.inference_mode():
        assert long_way(layers, image).isnan().any(), "the case shows nothing"
        assert not short_way(layers, image).isnan().any(), "the case shows nothing"
        assert not Guard(layers).allows(image)


def test_what_onednn_would_not_compute_takes_the_long_way() -> None:
    layers, guard = stack(), Guard(stack())
    with torch.inference_mode():
        assert not guard.allows(torch.rand(1, 1, 100, 100))
        assert not guard.allows(torch.rand(2, 1, 100, 100).double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not guard.allows(torch.rand(2, 1, 100, 100))
    image = torch.rand(2, 1, 100, 100, requires_grad=True)
    assert not guard.allows(image)
    assert long_way(layers, image).requires_grad


@pytest.mark.parametrize("shape", SHAPES)
def test_dncnn_gives_the_bits_of_plain_torch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from halotile.tasks.denoisers.dncnn import DENOISER
    from tests.benchmarks.data import CNN, weights

    plain = network(tmp_path)
    ours: Any = DENOISER(weights=str(weights(tmp_path)), depth=CNN["depth"], width=CNN["width"]).build()
    ours = ours.to(memory_format=torch.channels_last)
    image = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    holed = image.clone()
    holed[0, 0, 20, 20] = float("nan")
    with torch.inference_mode():
        for batch in (image, holed):
            # A small single image goes to another routine of torch: see steady.py.
            wanted = plain(batch.repeat(2, 1, 1, 1))[:1] if shape == SHAPES[-1] else plain(batch)
            assert torch.equal(ours(batch).nan_to_num(7.0), wanted.nan_to_num(7.0))
            assert torch.equal(ours(batch).isnan(), wanted.isnan())
