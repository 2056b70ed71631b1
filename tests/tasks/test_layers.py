"""A stack of convolutions gives the bits of torch on the whole image, in windows of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halotile.tasks.denoisers.common.layers import ConvolutionStack
from halotile.tasks.denoisers.dncnn import DENOISER
from tests.benchmarks.data import CNN, network, weights
from tests.cases import all_of, thorough

SHAPES = [(1, 1, 526, 526), (3, 1, 150, 170), (1, 1, 200, 151), (2, 1, 33, 40), (1, 1, 100, 100)]
MARGINS = [((0, 0), (0, 0)), ((4, 4), (4, 4)), ((0, 8), (4, 4)), ((6, 5), (9, 0)), ((3, 3), (20, 20))]


def stack(sizes: tuple[int, ...], *, bias: bool) -> ConvolutionStack:
    """A stack with a fixed start, laid out as in a worker."""
    torch.manual_seed(3)
    network = ConvolutionStack(sizes, bias=bias, sign=-1)
    placed: ConvolutionStack = network.to(memory_format=torch.channels_last).requires_grad_(False)
    return placed


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    image = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    return image.contiguous(memory_format=torch.channels_last)


def by_torch(network: ConvolutionStack, image: torch.Tensor) -> torch.Tensor:
    """Torch's own result; a small single image goes to another routine there: see steady.py."""
    few = image.numel() <= 20480 and len(image) == 1
    signal = image.repeat(2, 1, 1, 1) if few else image
    for layer in network.layers[:-1]:
        signal = layer(signal).relu()
    return image - network.layers[-1](signal)[: len(image)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("width", "channels", "bias"),
    [(16, 1, True), thorough(32, 1, False), (8, 3, True), thorough(12, 1, True), thorough(1, 1, True)],
)
def test_the_core_of_a_window_has_the_bits_of_torch(
    shape: tuple[int, ...], width: int, channels: int, bias: bool
) -> None:
    network = stack((channels, width, width, width, channels), bias=bias)
    image = noise((shape[0], channels, *shape[2:]))
    with torch.inference_mode():
        whole = by_torch(network, image)
        for (top, bottom), (left, right) in MARGINS:
            wanted = whole[:, :, top : shape[2] - bottom, left : shape[3] - right]
            assert torch.equal(network.core(image, ((top, bottom), (left, right))), wanted)


def edges(length: int, tile: int, depth: int) -> list[tuple[int, int, int, int]]:
    """Start and stop of each tile of an axis, with its halo and without."""
    starts = range(0, length, tile)
    return [(max(a - depth, 0), a, min(a + tile, length), min(a + tile + depth, length)) for a in starts]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "bias", "shape"),
    [
        ((1, 64, 64, 1), True, (1100, 1300)),
        ((1, 32, 32, 32, 1), False, (1500, 1700)),
        ((1, *[64] * 16, 1), True, (150, 1030)),
    ],
    ids=["3x64", "4x32 without bias", "17x64"],
)
def test_tiles_have_the_bits_of_torch_on_an_image_of_real_size(
    sizes: tuple[int, ...], bias: bool, shape: tuple[int, int]
) -> None:
    network, image, depth = stack(sizes, bias=bias), noise((1, 1, *shape)), len(sizes) - 1
    with torch.inference_mode():
        whole = by_torch(network, image)
        for tile in (128, 160, 200, 256, 512, 700):
            rows, columns = (edges(length, tile, depth) for length in shape)
            for (top, y, y1, bottom), (left, x, x1, right) in itertools.product(rows, columns):
                margin = ((y - top, bottom - y1), (x - left, right - x1))
                window = image[:, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
                core = network.core(window, margin)
                assert torch.equal(core, whole[:, :, y:y1, x:x1]), (tile, y, x)


@pytest.mark.parametrize("shape", all_of(SHAPES, thorough=SHAPES[:1]), ids=str)
def test_dncnn_gives_the_bits_of_plain_torch_with_a_hole_too(tmp_path: Path, shape: tuple[int, ...]) -> None:
    plain: Callable[[torch.Tensor], torch.Tensor] = network(tmp_path)
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
