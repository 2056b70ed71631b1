"""Convolution layers and correlations give the same bits for crops, for any number of images, and for any number of threads."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halotile.tasks.convolution.correlate import correlate
from halotile.tasks.convolution.stable import make_steady
from halotile.tasks.devices.device import torch_threads
from tests.cases import thorough

LENGTHS = {1: (600,), 2: (60, 70), 3: (12, 14, 16)}
LAYOUTS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
CROPS = [slice(3, 11), slice(0, 5), slice(1, 12), slice(2, 9)]


def axes_of(kind: Any) -> int:
    return int(kind.__name__[-2])


def steady(kind: Any, into: int, out: int, kernel: Any = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(into, out, kernel, **options).eval().requires_grad_(False)
    make_steady(layer)
    return layer


def noise(channels: int, axes: int, layout: torch.memory_format, count: int = 20) -> torch.Tensor:
    images = torch.randn(count, channels, *LENGTHS[axes], generator=torch.Generator().manual_seed(1))
    return images.contiguous(memory_format=layout)


@pytest.mark.parametrize(("into", "out"), [(32, 32), (16, 1), (1, 16), thorough(3, 3), thorough(64, 32)])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_kernels_of_one_pixel_give_the_same_bits_for_any_batch_crop_and_threads(kind: Any, into: int, out: int) -> None:
    for layout in {torch.contiguous_format, LAYOUTS[axes_of(kind)]}:
        check_pointwise(steady(kind, into, out), noise(into, axes_of(kind), layout), layout)


def check_pointwise(layer: Any, images: torch.Tensor, layout: torch.memory_format) -> None:
    axes = images.ndim - 2
    with torch.inference_mode(), torch_threads():
        whole = layer(images)
        for count in (1, 4):
            parts = [layer(part) for part in images.split(count)]
            assert torch.equal(torch.cat(parts), whole), count
        for crop in CROPS:
            place = (..., *[crop] * axes)
            for count in (1, 3, 20):
                part = images[:count][place].contiguous().contiguous(memory_format=layout)
                assert torch.equal(layer(part), whole[:count][place]), (crop, count)
        torch.set_num_threads(2)
        assert torch.equal(layer(images[:4]), whole[:4])


def test_kernels_that_are_long_in_depth_alone_give_the_same_bits_for_any_batch() -> None:
    """torch looks at the last two lengths of a kernel."""
    layer, images = steady(nn.Conv3d, 16, 4, (3, 1, 1)), noise(16, 3, torch.contiguous_format)
    with torch.inference_mode():
        assert torch.equal(torch.cat([layer(part) for part in images.split(1)]), layer(images))


def test_a_small_single_image_is_computed_in_its_own_layout() -> None:
    """The weights, which decide on the layout too, are contiguous here."""
    rows_1: list[Any] = [nn.Conv2d, nn.Conv3d]
    for kernel, kind in itertools.product((1, 3), rows_1):
        axes = axes_of(kind)
        layer, images = steady(kind, 32, 32, kernel), noise(32, axes, LAYOUTS[axes], count=2)
        place = (..., *[slice(0, 8)] * axes)
        inner = (..., *[slice(0, 9 - kernel)] * axes)
        with torch.inference_mode():
            part = images[:1][place].contiguous(memory_format=LAYOUTS[axes])
            assert torch.equal(layer(part), layer(images)[:1][inner])


def test_layers_compute_what_torch_does() -> None:
    rows: list[tuple[Any, Any, dict[str, Any]]] = [
        (nn.Conv1d, 1, {"padding": 2}),
        (nn.Conv2d, 1, {"padding": "same"}),
        (nn.Conv2d, 1, {"padding": 1, "padding_mode": "reflect", "groups": 2}),
        (nn.Conv2d, 1, {"stride": 2}),
        (nn.Conv2d, (1, 3), {"dilation": 3}),
        (nn.Conv3d, (3, 1, 1), {"dilation": (2, 1, 1), "padding": (2, 0, 0)}),
        (nn.ConvTranspose2d, 1, {"padding": 1}),
        (nn.ConvTranspose2d, 1, {"stride": 2, "output_padding": 1}),
    ]
    for kind, kernel, options in rows:
        torch.manual_seed(0)
        plain = kind(4, 6, kernel, **options).eval().requires_grad_(False)
        layer, images = (steady(kind, 4, 6, kernel, **options), noise(4, axes_of(kind), torch.contiguous_format, 2))
        torch.testing.assert_close(layer(images), plain(images))
        torch.testing.assert_close(layer(images[0]), plain(images[0]))


def test_layers_are_copied_and_saved_as_before() -> None:
    plain, layer = nn.Conv2d(16, 1, 1), steady(nn.Conv2d, 16, 1)
    images = noise(16, 2, torch.channels_last)
    expected = layer(images)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(again(images[:1]), expected[:1])
        again.weight.zero_()  # its own
        assert torch.equal(layer(images), expected)
        assert again(images).unique().numel() == 1


def test_layers_are_undilated_on_other_devices_and_in_other_types() -> None:
    layer = steady(nn.Conv2d, 4, 4)
    layer(noise(4, 2, torch.contiguous_format, 1))
    assert layer.dilation == (2, 2)
    layer.double()(noise(4, 2, torch.contiguous_format, 1).double())
    assert layer.dilation == (1, 1)
    layer.float().to("meta")(torch.empty(1, 4, 8, 8, device="meta"))
    assert layer.dilation == (1, 1)


SHAPES = [(3, 3), (5, 5), (4, 7), (1, 1), (9, 9), (15, 15), (31, 31)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_bits_are_those_of_a_plain_convolution() -> None:
    for shape in SHAPES:
        images, kernels = drawn(2, 1, 230, 210), drawn(1, *shape, seed=1)
        plain = torch.nn.functional.conv2d(images, kernels[None])[:, 0]
        assert torch.equal(correlate(images, kernels), plain)


def test_a_step_leaves_pixels_out() -> None:
    for step, dtype in itertools.product((2, 3), (torch.float32, torch.float64)):
        images, kernels = drawn(1, 1, 61, 58, dtype=dtype), drawn(1, 5, 4, seed=1, dtype=dtype)
        assert torch.equal(correlate(images, kernels, step), correlate(images, kernels)[:, ::step, ::step])


def test_channels_are_summed() -> None:
    for dtype in (torch.float32, torch.float64):
        images, kernels = drawn(2, 3, 40, 40, dtype=dtype), drawn(3, 5, 5, seed=1, dtype=dtype)
        plain = torch.nn.functional.conv2d(images, kernels[None])[:, 0]
        assert torch.allclose(correlate(images, kernels), plain, rtol=1e-6 if dtype == torch.float32 else 1e-14)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_window_has_the_bits_of_the_whole(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rows, columns = data.draw(st.sampled_from(SHAPES[:6]))
    images, kernels = drawn(1, 1, 150, 140, dtype=dtype), drawn(1, rows, columns, seed=1, dtype=dtype)
    top, left = data.draw(st.integers(0, 150 - rows)), data.draw(st.integers(0, 140 - columns))
    bottom = data.draw(st.integers(top + rows, 150))
    right = data.draw(st.integers(left + columns, 140))
    part = correlate(images[:, :, top:bottom, left:right], kernels)
    whole = correlate(images, kernels)
    assert torch.equal(part, whole[:, top : bottom - rows + 1, left : right - columns + 1])
