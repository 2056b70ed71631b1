"""Correlations by patches have the bits of the plain convolution, for any window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.tasks.convolution.correlate import correlate

SHAPES = [(3, 3), (5, 5), (4, 7), (1, 1), (9, 9), (15, 15), (31, 31)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_a_plain_convolution(shape: tuple[int, int]) -> None:
    images, kernels = drawn(2, 1, 230, 210), drawn(1, *shape, seed=1)
    plain = torch.nn.functional.conv2d(images, kernels[None])[:, 0]
    assert torch.equal(correlate(images, kernels), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [2, 3])
def test_a_step_leaves_pixels_out(step: int, dtype: torch.dtype) -> None:
    images, kernels = drawn(1, 1, 61, 58, dtype=dtype), drawn(1, 5, 4, seed=1, dtype=dtype)
    assert torch.equal(correlate(images, kernels, step), correlate(images, kernels)[:, ::step, ::step])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_channels_are_summed(dtype: torch.dtype) -> None:
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
