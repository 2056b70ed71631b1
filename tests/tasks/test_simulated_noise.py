"""Noise of simulated measurements: right in law, as strong as it says, its own for each operator and seed, the same for any tiling."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import poisson as counts

from halotile.errors import InputError
from halotile.storage.grid import Grid, Region
from halotile.tasks.noise.simulated import CELL, Simulated, draw_cells, gaussian, poisson
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from tests.graphs.solving import kernel


def test_any_tiling_gives_the_same_bits() -> None:
    rows_1: list[Any] = ["gaussian", "poisson", "none"]
    for block, noise in itertools.product((32, 67), rows_1):
        y, x = np.mgrid[:200, :150]
        stripes = (0.5 + 0.3 * np.sin(y / 5) * np.cos(x / 9)).astype("float32")
        blurred = Blur(kernel=kernel(7), boundary="reflect").forward(InMemory(stripes))
        whole = Simulated(blurred, noise, level=0.05, background=0.1, seed=4, operator=2)
        pieces = np.empty(whole.shape, whole.dtype)
        for piece in Grid(whole.shape, (block, block), ((0, 0), (0, 0))):
            pieces[piece.core.slices] = whole.read(piece.core)
        np.testing.assert_array_equal(pieces, read_all(whole))


def test_the_noise_is_as_strong_as_it_says() -> None:
    rows: list[tuple[Any, Any]] = [("gaussian", lambda _: 0.05**2), ("poisson", lambda clean: 0.05 * (clean + 0.1))]
    for noise, variance in rows:
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


def test_rounding_below_0_is_no_light() -> None:
    for light in (-1e-7, 0.0):
        pixels = np.array([[light, 1.0]], "float32")
        assert read_all(Simulated(InMemory(pixels), "poisson", level=1e-9))[0, 0] == 0


def test_no_count_is_drawn_of_light_that_is_none() -> None:
    for light in (-0.1, np.nan, np.inf):
        pixels = np.array([[light, 1.0]], "float32")
        with pytest.raises(InputError, match="1 of 2 pixels"):
            read_all(Simulated(InMemory(pixels), "poisson", level=0.1))


WHOLE = Region((0, 0, 0), (2, 200, 170))
MODELS: dict[str, Any] = {"gaussian": partial(gaussian, sigma=0.3), "poisson": partial(poisson, gain=0.5)}


def test_a_tile_draws_what_the_whole_draws() -> None:
    for name in MODELS:
        noisy, clean = MODELS[name], np.full(WHOLE.shape, 3.0, "float32")
        whole = noisy(clean, WHOLE, seed=4, operator=1)
        for start, stop in [((0, 5, 7), (2, 80, 90)), ((1, 64, 64), (2, 128, 128)), ((0, 199, 0), (1, 200, 1))]:
            part = Region(start, stop)
            assert np.array_equal(noisy(clean[part.slices], part, seed=4, operator=1), whole[part.slices])


def test_a_part_of_a_line_draws_what_the_line_draws() -> None:
    for name in MODELS:
        noisy, clean, line = MODELS[name], np.full(300, 3.0, "float32"), Region((0,), (300,))
        whole = noisy(clean, line, seed=4, operator=1)
        part = Region((50,), (200,))
        assert whole.shape == (300,)
        assert len(np.unique(whole)) > 5
        assert np.array_equal(noisy(clean[part.slices], part, seed=4, operator=1), whole[part.slices])


def test_another_seed_or_operator_draws_other_noise() -> None:
    rows: list[tuple[int, int]] = [(5, 1), (4, 2)]
    for seed, operator in rows:
        clean = np.zeros(WHOLE.shape)
        first = gaussian(clean, WHOLE, sigma=1, seed=4, operator=1)
        other = gaussian(clean, WHOLE, sigma=1, seed=seed, operator=operator)
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.02
        assert abs(np.corrcoef(first[0].ravel(), first[1].ravel())[0, 1]) < 0.02


def test_gaussian_noise_has_its_deviation() -> None:
    noise = gaussian(np.zeros(WHOLE.shape), WHOLE, sigma=0.3, seed=0, operator=0)
    assert abs(noise.mean()) < 0.004
    assert abs(noise.std() - 0.3) < 0.004


def test_shot_noise_is_the_quantile_of_one_uniform_number() -> None:
    for rate in (0.0, 0.01, 3.7, 200.0):
        drawn = poisson(np.full(WHOLE.shape, 2.0 * rate), WHOLE, gain=2.0, seed=0, operator=0)
        uniform = draw_cells(WHOLE, 0, 0, lambda stream: stream.random((CELL, CELL)))
        assert np.array_equal(drawn / 2, np.maximum(counts.ppf(uniform, rate), 0) if rate else 0 * uniform)


def test_darkness_draws_nothing() -> None:
    assert not poisson(np.full(WHOLE.shape, -1.0), WHOLE, gain=1.0, seed=0, operator=0).any()
