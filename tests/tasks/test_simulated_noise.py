"""Noise of simulated measurements: as strong as it says, its own for each operator and seed, the same for any tiling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halotile.errors import InputError
from halotile.storage.grid import Grid
from halotile.tasks.noise.simulated import Simulated
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from tests.graphs.solving import kernel


@pytest.mark.parametrize("noise", ["gaussian", "poisson", "none"])
@pytest.mark.parametrize("block", [32, 67])
def test_any_tiling_gives_the_same_bits(noise: Any, block: int) -> None:
    y, x = np.mgrid[:200, :150]
    stripes = (0.5 + 0.3 * np.sin(y / 5) * np.cos(x / 9)).astype("float32")
    blurred = Blur(kernel=kernel(7), boundary="reflect").forward(InMemory(stripes))
    whole = Simulated(blurred, noise, level=0.05, background=0.1, seed=4, operator=2)
    pieces = np.empty(whole.shape, whole.dtype)
    for piece in Grid(whole.shape, (block, block), ((0, 0), (0, 0))):
        pieces[piece.core.slices] = whole.read(piece.core)
    np.testing.assert_array_equal(pieces, read_all(whole))


@pytest.mark.parametrize(
    ("noise", "variance"), [("gaussian", lambda _: 0.05**2), ("poisson", lambda clean: 0.05 * (clean + 0.1))]
)
def test_the_noise_is_as_strong_as_it_says(noise: Any, variance: Any) -> None:
    flat = InMemory(np.full((400, 400), 0.5, "float32"))
    background = 0.1 if noise == "poisson" else 0.0
    noisy = read_all(Simulated(flat, noise, level=0.05, background=background, seed=1)).astype(float)
    assert noisy.mean() == pytest.approx(0.5 + background, abs=0.003)
    assert noisy.var() == pytest.approx(variance(0.5), rel=0.03)


def test_operators_and_seeds_have_noise_of_their_own() -> None:
    flat = InMemory(np.zeros((64, 64), "float32"))
    drawn = [
        read_all(Simulated(flat, "gaussian", level=1.0, seed=seed, operator=operator))
        for seed in (0, 1)
        for operator in (0, 1)
    ]
    together = np.corrcoef([part.ravel() for part in drawn])
    assert abs(together - np.eye(4)).max() < 0.06


@pytest.mark.parametrize("light", [-1e-7, 0.0])
def test_rounding_below_0_is_no_light(light: float) -> None:
    pixels = np.array([[light, 1.0]], "float32")
    assert read_all(Simulated(InMemory(pixels), "poisson", level=1e-9))[0, 0] == 0


@pytest.mark.parametrize("light", [-0.1, np.nan, np.inf])
def test_no_count_is_drawn_of_light_that_is_none(light: float) -> None:
    pixels = np.array([[light, 1.0]], "float32")
    with pytest.raises(InputError, match="1 of 2 pixels"):
        read_all(Simulated(InMemory(pixels), "poisson", level=0.1))
