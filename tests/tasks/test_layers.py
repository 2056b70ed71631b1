"""Layers, convolutions and elementwise functions have the same bits in windows of any size, for any number of images and threads."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from halotile.tasks.convolution.activations import VECTORS, SteadyElementwise, SteadyNetwork
from halotile.tasks.convolution.correlate import correlate
from halotile.tasks.convolution.stable import make_steady
from halotile.tasks.denoisers.common.layers import ConvolutionStack
from halotile.tasks.devices.device import torch_threads
from tests.cases import thorough

SHAPES = [(1, 1, 526, 526), (3, 1, 150, 170), (1, 1, 200, 151), (2, 1, 33, 40), (1, 1, 100, 100)]


MARGINS = [((0, 0), (0, 0)), ((4, 4), (4, 4)), ((0, 8), (4, 4)), ((6, 5), (9, 0)), ((3, 3), (20, 20))]


def stack(sizes: tuple[int, ...], *, bias: bool) -> ConvolutionStack:
    """A stack with a fixed start, laid out as in a worker."""
    torch.manual_seed(3)
    network = ConvolutionStack(sizes, bias=bias, sign=-1)
    placed: ConvolutionStack = network.to(memory_format=torch.channels_last).requires_grad_(False)
    return placed


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=torch.channels_last)


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
def test_a_core_has_the_bits_of_torch_with_a_hole_too(shape: Any, width: int, channels: int, bias: bool) -> None:
    network = stack((channels, width, width, width, channels), bias=bias)
    image = noise((shape[0], channels, *shape[2:]))
    holed = image.clone()
    holed[0, 0, 20, 20] = float("nan")
    with torch.inference_mode():
        wholes = [(batch, by_torch(network, batch)) for batch in (image, holed)]
        for (batch, whole), (rows, columns) in itertools.product(wholes, MARGINS):
            wanted = whole[:, :, rows[0] : shape[2] - rows[1], columns[0] : shape[3] - columns[1]]
            made = network.core(batch, (rows, columns))
            assert torch.equal(made.nan_to_num(7.0), wanted.nan_to_num(7.0))
            assert torch.equal(made.isnan(), wanted.isnan())


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True), "softplus": F.softplus, "elu": F.elu, "selu": F.selu,
    "celu": F.celu, "mish": F.mish, "power": lambda x: x.abs().pow(2.2),
    "power of each": lambda x: torch.pow(x.abs(), x),
}  # fmt: skip


FORMATS = [torch.contiguous_format, torch.channels_last]


def numbers(count: int) -> torch.Tensor:
    return 1.5 * torch.randn(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_pieces_have_the_bits_of_the_whole_and_all_but_the_end_those_of_torch(mode: Any) -> None:
    x, odd = numbers(VECTORS * 48), numbers(VECTORS * 20 + 13)
    for name, function in FUNCTIONS.items():
        with mode():
            plain = function(odd)
            with SteadyElementwise():
                whole, steady = function(x), function(odd)
                for size in (3, 7, 64, 1001):
                    pieces = torch.cat([function(part.clone()) for part in x.split(size)])
                    assert torch.equal(whole, pieces), (name, size)
        assert torch.equal(plain[: -(len(odd) % VECTORS)], steady[: -(len(odd) % VECTORS)]), name
        assert torch.allclose(plain, steady, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("layout", FORMATS)
def test_a_part_of_an_image_has_the_bits_of_the_image(layout: torch.memory_format) -> None:
    """torch ends every row of a tensor with gaps by itself; rows of an image have none, but other strides along the axes of one."""
    whole = numbers(2 * 3 * 50 * 77).reshape(2, 3, 50, 77).contiguous(memory_format=layout)
    for name in ("sigmoid", "tanh", "exp", "silu", "gelu"):
        with SteadyElementwise():
            assert torch.equal(FUNCTIONS[name](whole[..., :41, 3:60]), FUNCTIONS[name](whole)[..., :41, 3:60]), name
    rows = numbers(384 * 144).reshape(1, 1, 384, 144)
    with SteadyElementwise():
        expected = torch.sigmoid(rows)
        for count in range(300, 384):
            assert torch.equal(torch.sigmoid(rows[:, :, :count]), expected[:, :, :count])


def test_a_part_of_an_image_is_changed_in_place() -> None:
    factors = torch.tensor([0.3, 1.7, 2.2])[:, None, None]
    rows: list[Any] = [(torch.sigmoid, torch.Tensor.sigmoid_, ()), (torch.pow, torch.Tensor.pow_, (factors,))]
    for function, in_place, others in rows:
        whole = numbers(3 * 50 * 77).reshape(1, 3, 50, 77).abs()
        expected, given = function(whole, *others), whole.clone()
        with SteadyElementwise():
            part = whole[..., :41, 3:60]
            assert in_place(part, *others) is part
        torch.testing.assert_close(part, expected[..., :41, 3:60])
        assert torch.equal(whole[..., 41:, :], given[..., 41:, :])


OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "atan2": torch.atan2, "atan2 of the other": lambda x, y: torch.atan2(y, x), "logaddexp": torch.logaddexp,
    "power": torch.pow, "power of the other": lambda x, y: torch.pow(y, x),
    "power in place": lambda x, y: x.clone().pow_(y), "sum": torch.add,
    "power in an array that is there": lambda x, y: torch.pow(x, y, out=torch.empty(0)),
    "weighted sum": lambda x, y: torch.add(x, y, alpha=0.3),
    "weighted difference": lambda x, y: torch.sub(x, y, alpha=0.3),
}  # fmt: skip


OTHERS = [(1, 4, 1, 1), (4, 1, 1), (1, 1, 1, 1), (), (1, 1, 50, 37), (1, 4, 50, 37)]


def test_a_part_of_an_image_has_the_bits_of_the_image_with_another_operand() -> None:
    """torch ends every row by itself where operands are laid out differently."""
    for function, shape, layout in itertools.product(OF_TWO.values(), OTHERS, FORMATS):
        generator = torch.Generator().manual_seed(2)
        whole = (torch.rand(1, 4, 50, 37, generator=generator) + 0.1).contiguous(memory_format=layout)
        other = torch.rand(shape, generator=generator) + 0.2
        plain = function(whole, other)
        with SteadyElementwise():
            expected = function(whole, other)
            assert expected.stride() == plain.stride()
            torch.testing.assert_close(expected, plain)
            for rows, columns in ((50, 36), (41, 30), (7, 5), (3, 3)):
                part = whole[..., :rows, :columns]
                beside = other[..., :rows, :columns] if shape[-2:] == (50, 37) else other
                for x in (part, part.contiguous(memory_format=layout)):
                    assert torch.equal(function(x, beside), expected[..., :rows, :columns]), (rows, columns)


def test_operands_stay_as_they_are() -> None:
    whole, other = numbers(3 * 50 * 77).reshape(1, 3, 50, 77), numbers(50).reshape(50, 1)
    given = whole.clone(), other.clone()
    with SteadyElementwise():
        F.rrelu(whole[..., :41, 3:60])
        assert torch.atan2(whole[:, :, :1], other).shape == whole.shape
        assert torch.atan2(torch.zeros(0, 3), torch.zeros(1, 3)).shape == (0, 3)
    assert torch.equal(whole, given[0])
    assert torch.equal(other, given[1])


def test_layouts_and_types_stay() -> None:
    last = numbers(2 * 3 * 11 * 13).reshape(2, 3, 11, 13).contiguous(memory_format=torch.channels_last)
    with SteadyElementwise():
        assert torch.sigmoid(last).is_contiguous(memory_format=torch.channels_last)
        top = last[..., :5, :].contiguous(memory_format=torch.channels_last)
        assert torch.equal(torch.sigmoid(top[:, :2]), torch.sigmoid(last[:, :2])[..., :5, :])
        assert torch.equal(torch.where(last > 0, last, -last), last.abs())
        assert torch.equal(torch.abs(torch.arange(-5, 5)), torch.arange(-5, 5).abs())
        assert (last + last.mean()).shape == last.shape
        assert torch.sigmoid(torch.zeros(0)).shape == (0,)
        halves = torch.empty(11)
        torch.sigmoid(numbers(11), out=halves)
        assert halves[0] > 0


def test_what_a_network_compiles_of_itself_runs_as_it_is_written() -> None:
    compiled = []

    def compile_it(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    network, x = torch.compile(torch.nn.Sigmoid(), backend=compile_it), numbers(99).reshape(1, 1, 9, 11)
    with torch.inference_mode(), SteadyElementwise():
        expected = torch.sigmoid(x)
    with torch.inference_mode():
        assert torch.equal(SteadyNetwork(network)(x), expected)
    assert not compiled


ALONG_CHANNELS: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: torch.softmax(x, 1),
    "log of a softmax": lambda x: torch.log_softmax(x, -3),
    "mean": lambda x: x.mean(1, keepdim=True),
    "sum": lambda x: x.sum(1)[:, None],
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("layout", FORMATS)
def test_functions_along_channels_have_the_bits_of_the_image(layout: torch.memory_format, mode: Any) -> None:
    whole = numbers(37 * 50 * 77).reshape(1, 37, 50, 77).contiguous(memory_format=layout)
    for function in ALONG_CHANNELS.values():
        plain = function(whole)
        with mode(), SteadyElementwise():
            expected = function(whole)
            torch.testing.assert_close(expected, function(whole.double()).float())
            assert expected[:, 0].stride() == plain[:, 0].stride()
            assert expected.is_contiguous() == plain.is_contiguous()
            for rows, columns in ((50, 76), (41, 57), (7, 5)):
                part = whole[..., :rows, :columns]
                for x in (part, part.contiguous(memory_format=layout)):
                    assert torch.equal(function(x), expected[..., :rows, :columns]), (rows, columns)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_no_float_is_as_torch_has_it(mode: Any) -> None:
    """Conjugates, shifts and masks: their numbers are stored in other ways, or none of them is rounded."""
    a, b = torch.complex(numbers(100), numbers(100).flip(0)), torch.complex(numbers(100).abs(), numbers(100))
    rows, columns = torch.arange(6).reshape(2, 3), torch.arange(2)[:, None]
    expected = [a * b.conj(), b.conj().exp(), rows << columns, rows ^ columns, (rows > 2) ^ (columns > 0)]
    with mode(), SteadyElementwise():
        found = [a * b.conj(), b.conj().exp(), rows << columns, rows ^ columns, (rows > 2) ^ (columns > 0)]
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.sigmoid(numbers(8), out=torch.empty(8, dtype=torch.int64))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(rows, torch.arange(6).reshape(2, 3))


LENGTHS = {1: (600,), 2: (60, 70), 3: (12, 14, 16)}


LAYOUTS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}


def axes_of(kind: Any) -> int:
    return int(kind.__name__[-2])


def steady(kind: Any, into: int, out: int, kernel: Any = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(into, out, kernel, **options).eval().requires_grad_(False)
    make_steady(layer)
    return layer


def images_of(channels: int, axes: int, layout: torch.memory_format, count: int = 20) -> torch.Tensor:
    images = torch.randn(count, channels, *LENGTHS[axes], generator=torch.Generator().manual_seed(1))
    return images.contiguous(memory_format=layout)


@pytest.mark.parametrize(("into", "out"), [(32, 32), (16, 1), (1, 16), thorough(3, 3), thorough(64, 32)])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_kernels_of_one_pixel_give_the_same_bits_for_any_batch_crop_and_threads(kind: Any, into: int, out: int) -> None:
    axes, layer = axes_of(kind), steady(kind, into, out)
    for layout in {torch.contiguous_format, LAYOUTS[axes]}:
        images = images_of(into, axes, layout)
        with torch.inference_mode(), torch_threads():
            whole = layer(images)
            for count in (1, 4):
                assert torch.equal(torch.cat([layer(part) for part in images.split(count)]), whole), count
            for crop, count in itertools.product([slice(3, 11), slice(0, 5), slice(1, 12), slice(2, 9)], (1, 3, 20)):
                place = (..., *[crop] * axes)
                part = images[:count][place].contiguous().contiguous(memory_format=layout)
                assert torch.equal(layer(part), whole[:count][place]), (crop, count)
            torch.set_num_threads(2)
            assert torch.equal(layer(images[:4]), whole[:4])
    if kind is nn.Conv3d:  # torch looks at the last two lengths of a kernel
        layer, images = steady(kind, 16, 4, (3, 1, 1)), images_of(16, 3, torch.contiguous_format)
        with torch.inference_mode():
            assert torch.equal(torch.cat([layer(part) for part in images.split(1)]), layer(images))


def test_a_small_single_image_is_computed_in_its_own_layout() -> None:
    """The weights, which decide on the layout too, are contiguous here."""
    rows_1: list[Any] = [nn.Conv2d, nn.Conv3d]
    for kernel, kind in itertools.product((1, 3), rows_1):
        axes = axes_of(kind)
        layer, images = steady(kind, 32, 32, kernel), images_of(32, axes, LAYOUTS[axes], count=2)
        place = (..., *[slice(0, 8)] * axes)
        inner = (..., *[slice(0, 9 - kernel)] * axes)
        with torch.inference_mode():
            part = images[:1][place].contiguous(memory_format=LAYOUTS[axes])
            assert torch.equal(layer(part), layer(images)[:1][inner])


def test_layers_compute_what_torch_does() -> None:
    rows: list[tuple[Any, Any, dict[str, Any]]] = [
        (nn.Conv1d, 1, {"padding": 2}), (nn.Conv2d, 1, {"padding": "same"}),
        (nn.Conv2d, 1, {"padding": 1, "padding_mode": "reflect", "groups": 2}),
        (nn.Conv2d, 1, {"stride": 2}), (nn.Conv2d, (1, 3), {"dilation": 3}),
        (nn.Conv3d, (3, 1, 1), {"dilation": (2, 1, 1), "padding": (2, 0, 0)}),
        (nn.ConvTranspose2d, 1, {"padding": 1}), (nn.ConvTranspose2d, 1, {"stride": 2, "output_padding": 1}),
    ]  # fmt: skip
    for kind, kernel, options in rows:
        torch.manual_seed(0)
        plain = kind(4, 6, kernel, **options).eval().requires_grad_(False)
        layer, images = (steady(kind, 4, 6, kernel, **options), images_of(4, axes_of(kind), torch.contiguous_format, 2))
        torch.testing.assert_close(layer(images), plain(images))
        torch.testing.assert_close(layer(images[0]), plain(images[0]))


def test_layers_are_copied_and_saved_as_before_and_undilated_on_other_devices_and_in_other_types() -> None:
    plain, layer = nn.Conv2d(16, 1, 1), steady(nn.Conv2d, 16, 1)
    images = images_of(16, 2, torch.channels_last)
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
    assert layer.dilation == (2, 2)
    layer.double()(images.double())
    assert layer.dilation == (1, 1)
    layer.float().to("meta")(torch.empty(1, 16, 8, 8, device="meta"))
    assert layer.dilation == (1, 1)


KERNELS = [(3, 3), (5, 5), (4, 7), (1, 1), (9, 9), (15, 15), (31, 31)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_correlations_have_the_bits_of_a_plain_convolution_with_a_step_and_with_channels_too() -> None:
    for shape in KERNELS:
        images, kernels = drawn(2, 1, 230, 210), drawn(1, *shape, seed=1)
        plain = torch.nn.functional.conv2d(images, kernels[None])[:, 0]
        assert torch.equal(correlate(images, kernels), plain)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        images, kernels = drawn(2, 3, 61, 58, dtype=dtype), drawn(3, 5, 4, seed=1, dtype=dtype)
        plain = torch.nn.functional.conv2d(images, kernels[None])[:, 0]
        assert torch.allclose(correlate(images, kernels), plain, rtol=tolerance)
        images, kernels = images[:1, :1], kernels[:1]
        for step in (2, 3):
            assert torch.equal(correlate(images, kernels, step), correlate(images, kernels)[:, ::step, ::step])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_window_has_the_bits_of_the_whole(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rows, columns = data.draw(st.sampled_from(KERNELS[:6]))
    images, kernels = drawn(1, 1, 150, 140, dtype=dtype), drawn(1, rows, columns, seed=1, dtype=dtype)
    top, left = data.draw(st.integers(0, 150 - rows)), data.draw(st.integers(0, 140 - columns))
    bottom, right = data.draw(st.integers(top + rows, 150)), data.draw(st.integers(left + columns, 140))
    part = correlate(images[:, :, top:bottom, left:right], kernels)
    assert torch.equal(part, correlate(images, kernels)[:, top : bottom - rows + 1, left : right - columns + 1])
