"""Noise drawn by position: right in law, the same in any tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import poisson as counts

from halotile.storage.grid import Region
from halotile.tasks.noise.simulated import CELL, draw_cells, gaussian, poisson

WHOLE = Region((0, 0, 0), (2, 200, 170))
MODELS: dict[str, Any] = {"gaussian": partial(gaussian, sigma=0.3), "poisson": partial(poisson, gain=0.5)}


@pytest.mark.parametrize("name", MODELS)
def test_a_tile_draws_what_the_whole_draws(name: str) -> None:
    noisy, clean = MODELS[name], np.full(WHOLE.shape, 3.0, "float32")
    whole = noisy(clean, WHOLE, seed=4, operator=1)
    for start, stop in [((0, 5, 7), (2, 80, 90)), ((1, 64, 64), (2, 128, 128)), ((0, 199, 0), (1, 200, 1))]:
        part = Region(start, stop)
        assert np.array_equal(noisy(clean[part.slices], part, seed=4, operator=1), whole[part.slices])


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_line_draws_what_the_line_draws(name: str) -> None:
    noisy, clean, line = MODELS[name], np.full(300, 3.0, "float32"), Region((0,), (300,))
    whole = noisy(clean, line, seed=4, operator=1)
    part = Region((50,), (200,))
    assert whole.shape == (300,)
    assert len(np.unique(whole)) > 5
    assert np.array_equal(noisy(clean[part.slices], part, seed=4, operator=1), whole[part.slices])


@pytest.mark.parametrize(("seed", "operator"), [(5, 1), (4, 2)])
def test_another_seed_or_operator_draws_other_noise(seed: int, operator: int) -> None:
    clean = np.zeros(WHOLE.shape)
    first = gaussian(clean, WHOLE, sigma=1, seed=4, operator=1)
    other = gaussian(clean, WHOLE, sigma=1, seed=seed, operator=operator)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(first[0].ravel(), first[1].ravel())[0, 1]) < 0.02


def test_gaussian_noise_has_its_deviation() -> None:
    noise = gaussian(np.zeros(WHOLE.shape), WHOLE, sigma=0.3, seed=0, operator=0)
    assert abs(noise.mean()) < 0.004
    assert abs(noise.std() - 0.3) < 0.004


@pytest.mark.parametrize("rate", [0.0, 0.01, 3.7, 200.0])
def test_shot_noise_is_the_quantile_of_one_uniform_number(rate: float) -> None:
    drawn = poisson(np.full(WHOLE.shape, 2.0 * rate), WHOLE, gain=2.0, seed=0, operator=0)
    uniform = draw_cells(WHOLE, 0, 0, lambda stream: stream.random((CELL, CELL)))
    assert np.array_equal(drawn / 2, np.maximum(counts.ppf(uniform, rate), 0) if rate else 0 * uniform)


def test_darkness_draws_nothing() -> None:
    assert not poisson(np.full(WHOLE.shape, -1.0), WHOLE, gain=1.0, seed=0, operator=0).any()
