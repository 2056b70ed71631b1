"""The short way through a stack of convolutions gives the bits of the long one, or is not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halotile.tasks.fused import PATCH, ShortWay
from halotile.tasks.layers import ConvolutionStack
from tests.benchmarks.data import network

SHAPES = [(1, 1, 526, 526), (3, 1, 150, 170), (1, 1, 200, 151), (2, 1, 33, 40), (1, 1, 100, 100)]
MARGINS = [((0, 0), (0, 0)), ((4, 4), (4, 4)), ((0, 8), (4, 4)), ((6, 5), (9, 0)), ((3, 3), (20, 20))]


def stack(gain: float = 1.0, width: int = 16, channels: int = 1, bias: bool = True) -> ConvolutionStack:
    """A small stack with a fixed start."""
    torch.manual_seed(3)
    network = ConvolutionStack([channels, width, width, width, channels], bias=bias, sign=-1)
    for layer in network.layers:
        layer.weight.data *= gain
    placed: ConvolutionStack = network.to(memory_format=torch.channels_last).requires_grad_(False)
    return placed


def long_way(network: ConvolutionStack, image: torch.Tensor) -> torch.Tensor:
    """What torch makes of it; a small single image goes to another routine: see steady.py."""
    few = image.numel() <= 20480 and len(image) == 1
    signal = image.repeat(2, 1, 1, 1) if few else image
    for layer in network.layers[:-1]:
        signal = torch.relu_(layer(signal))
    signal = network.layers[-1](signal)
    return image - (signal[:1] if few else signal)


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("margin", MARGINS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("width", "channels", "bias"), [(16, 1, True), (32, 1, False), (8, 3, True), (12, 1, True), (1, 1, True)]
)
def test_the_short_way_gives_the_bits_of_torch(
    shape: tuple[int, ...], margin: Any, width: int, channels: int, bias: bool
) -> None:
    network, image = stack(width=width, channels=channels, bias=bias), noise((shape[0], channels, *shape[2:]))
    (top, bottom), (left, right) = margin
    with torch.inference_mode():
        wanted = long_way(network, image)[:, :, top : shape[2] - bottom, left : shape[3] - right]
        assert torch.equal(network.core(image, margin), wanted)


def test_the_short_way_is_taken() -> None:
    network, image = stack(), noise((1, 1, 200, 200))
    with torch.inference_mode():
        network(image)
        way = network.short_way
        assert way is not None
        assert way.allows(image)
        assert way.patch is not None
        signal = noise((1, 16, 20, 2 + 3 * PATCH + 5))
        assert way.last(signal, (0, 0), 3 * PATCH).shape == (1, 1, 18, 3 * PATCH), "whole patches"
        assert way.last(signal, (0, 0), 3 * PATCH + 1).shape == (1, 1, 18, 3 * PATCH + 5), (
            "a plain convolution"
        )


def test_what_gives_other_bits_on_this_machine_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortWay, "_patches", lambda self, image, padding: torch.zeros(1))
    assert ShortWay(stack().layers).patch is None
    monkeypatch.setattr(ShortWay, "convolve_relu", lambda self, layer, image, padding: torch.zeros(1))
    assert not ShortWay(stack().layers).usable


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_pixel_that_could_become_nan_takes_the_long_way(value: float) -> None:
    image = torch.rand(1, 1, 200, 200)
    image[0, 0, 50, 60] = value
    with torch.inference_mode():
        assert not ShortWay(stack().layers).allows(image)


def test_a_sum_that_overflows_inside_takes_the_long_way() -> None:
    network, image = stack(gain=1e18), torch.rand(2, 1, 64, 64) + 1
    with torch.inference_mode():
        assert long_way(network, image).isnan().any(), "the case shows nothing"
        assert not ShortWay(network.layers).allows(image)
        assert torch.equal(network(image).isnan(), long_way(network, image).isnan())


def test_what_onednn_would_not_compute_takes_the_long_way() -> None:
    network, way = stack(), ShortWay(stack().layers)
    with torch.inference_mode():
        assert not way.allows(torch.rand(1, 1, 100, 100))
        assert not way.allows(torch.rand(2, 1, 100, 100).double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not way.allows(torch.rand(2, 1, 100, 100))
    image = torch.rand(2, 1, 100, 100, requires_grad=True)
    assert not way.allows(image)
    assert network(image).requires_grad


@pytest.mark.parametrize("shape", SHAPES)
def test_dncnn_gives_the_bits_of_plain_torch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from halotile.tasks.denoisers.dncnn import DENOISER
    from tests.benchmarks.data import CNN, weights

    plain = network(tmp_path)
    ours: Any = DENOISER(weights=str(weights(tmp_path)), depth=CNN["depth"], width=CNN["width"]).build()
    ours = ours.to(memory_format=torch.channels_last)
    image = noise(shape)
    holed = image.clone()
    holed[0, 0, 20, 20] = float("nan")
    reach = CNN["depth"]
    inner = slice(reach, -reach)
    with torch.inference_mode():
        for batch in (image, holed):
            # A small single image goes to another routine of torch: see steady.py.
            wanted = plain(batch.repeat(2, 1, 1, 1))[:1] if shape == SHAPES[-1] else plain(batch)
            for made, expected in (
                (ours(batch), wanted),
                (ours.core(batch, ((reach, reach),) * 2), wanted[:, :, inner, inner]),
            ):
                assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))
                assert torch.equal(made.isnan(), expected.isnan())
