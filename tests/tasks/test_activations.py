"""Elementwise functions give a number the same bits wherever it lies in its tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from halotile.tasks.convolution.activations import VECTORS, SteadyElementwise, SteadyNetwork

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "power": lambda x: x.abs().pow(2.2),
    "power of each": lambda x: torch.pow(x.abs(), x),
}
CPU_DIFFERS = ("mish", "softplus", "sigmoid", "gelu by tanh")


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


def test_the_cases_show_what_torch_does() -> None:
    """Without the mode, some of them differ."""
    x = numbers(VECTORS * 48)
    differing = [
        name
        for name in CPU_DIFFERS
        if not torch.equal(FUNCTIONS[name](x), torch.cat([FUNCTIONS[name](p.clone()) for p in x.split(7)]))
    ]
    assert differing


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_part_of_an_image_has_the_bits_of_the_image(layout: torch.memory_format) -> None:
    """torch ends every row of a tensor with gaps by itself."""
    whole = numbers(2 * 3 * 50 * 77).reshape(2, 3, 50, 77).contiguous(memory_format=layout)
    for name in ("sigmoid", "tanh", "exp", "silu", "gelu"):
        with SteadyElementwise():
            part = FUNCTIONS[name](whole[..., :41, 3:60])
            assert torch.equal(part, FUNCTIONS[name](whole)[..., :41, 3:60]), name


def test_rows_of_an_image_have_the_bits_of_the_image() -> None:
    """They have no gaps, but other strides along the axes of one."""
    whole = numbers(384 * 144).reshape(1, 1, 384, 144)
    with SteadyElementwise():
        expected = torch.sigmoid(whole)
        for rows in range(300, 384):
            assert torch.equal(torch.sigmoid(whole[:, :, :rows]), expected[:, :, :rows])


def test_a_part_of_an_image_is_changed_in_place() -> None:
    whole = numbers(50 * 77).reshape(1, 1, 50, 77)
    expected, given = torch.sigmoid(whole), whole.clone()
    with SteadyElementwise():
        part = whole[..., :41, 3:60]
        assert part.sigmoid_() is part
    assert torch.equal(part, expected[..., :41, 3:60])
    assert torch.equal(whole[..., 41:, :], given[..., 41:, :])


OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "atan2": torch.atan2,
    "atan2 of the other": lambda x, y: torch.atan2(y, x),
    "logaddexp": torch.logaddexp,
    "power": torch.pow,
    "power of the other": lambda x, y: torch.pow(y, x),
    "power in place": lambda x, y: x.clone().pow_(y),
    "sum": torch.add,
    "power in an array that is there": lambda x, y: torch.pow(x, y, out=torch.empty(0)),
    "weighted sum": lambda x, y: torch.add(x, y, alpha=0.3),
    "weighted difference": lambda x, y: torch.sub(x, y, alpha=0.3),
}


SHAPES = [(1, 4, 1, 1), (4, 1, 1), (1, 1, 1, 1), (), (1, 1, 50, 37), (1, 4, 50, 37)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def test_a_part_of_an_image_has_the_bits_of_the_image_with_another_operand() -> None:
    """torch ends every row by itself where operands are laid out differently."""
    for function, shape, layout in itertools.product(OF_TWO.values(), SHAPES, LAYOUTS):
        check_parts(function, shape, layout)


def check_parts(function: Callable[[Any, Any], Any], shape: tuple[int, ...], layout: torch.memory_format) -> None:
    """Assert that parts of an image have its bits beside an operand of a shape."""
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


def test_a_part_of_an_image_is_changed_in_place_with_another_operand() -> None:
    whole, other = (numbers(3 * 50 * 77).reshape(1, 3, 50, 77).abs(), torch.tensor([0.3, 1.7, 2.2])[:, None, None])
    expected, given = torch.pow(whole, other), whole.clone()
    with SteadyElementwise():
        part = whole[..., :41, 3:60]
        assert part.pow_(other) is part
    torch.testing.assert_close(part, expected[..., :41, 3:60])
    assert torch.equal(whole[..., 41:, :], given[..., 41:, :])


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


def test_a_network_keeps_what_it_is_given_beside_the_batch() -> None:
    class Shifted(torch.nn.Module):  # type: ignore[misc]
        def forward(self, batch: torch.Tensor, shift: float) -> torch.Tensor:
            return torch.sigmoid(batch) + shift

    x = numbers(100).reshape(1, 1, 10, 10)
    assert torch.allclose(SteadyNetwork(Shifted())(x, 2.0), torch.sigmoid(x) + 2)


def test_what_a_network_compiles_of_itself_runs_as_it_is_written() -> None:
    compiled = []

    def compile_it(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    network = torch.compile(torch.nn.Sigmoid(), backend=compile_it)
    x = numbers(99).reshape(1, 1, 9, 11)
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
@pytest.mark.parametrize("layout", LAYOUTS)
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
