"""Photon noise: its estimate from samples, and the inverse of its transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.data import retina

from halotile.tasks.denoisers.common.anscombe import SHARES, exact_inverse
from halotile.tasks.denoisers.common.photon_denoiser import ROUNDS
from halotile.tasks.noise.photon_noise import estimate_photon_noise, fit_photon_noise
from halotile.tasks.noise.survey import survey_planes
from tests.cases import thorough
from tests.tasks.denoising import Stored

Image = NDArray[np.float64]


def clean() -> Image:
    green: Image = retina()[400:900, :500, 1] / 236.0
    return green


def counted(peak: float, gain: float = 1.0, offset: float = 0.0, read_sigma: float = 0.0) -> Image:
    rng = np.random.default_rng(0)
    counts = rng.poisson(clean() * peak)
    return gain * counts + offset + read_sigma * rng.standard_normal(counts.shape)


@pytest.mark.parametrize("peak", [5, 20, 100])
@pytest.mark.parametrize(("gain", "offset"), [(1.0, 0.0), (3.7, 100.0), (0.001, 0.0)])
def test_the_gain_is_found(peak: float, gain: float, offset: float) -> None:
    found = estimate_photon_noise(Stored(counted(peak, gain, offset)), (0, 1))
    assert found is not None
    assert found.gain == pytest.approx(gain, rel=0.1)
    assert found.offset == pytest.approx(offset, abs=0.05 * peak * gain)
    assert found.read_sigma < 0.5 * gain * np.sqrt(peak)


def test_read_noise_is_found() -> None:
    """With as much noise of the readout as of photons, a gain from an image of this size varies by a fifth."""
    found = estimate_photon_noise(Stored(counted(20, read_sigma=4.0)), (0, 1))
    assert found is not None
    assert found.gain == pytest.approx(1, rel=0.3)
    assert found.read_sigma == pytest.approx(4, rel=0.1)


def test_holes_and_saturated_pixels_do_not_count() -> None:
    pixels = counted(100)
    pixels = np.minimum(pixels, np.quantile(pixels, 0.9))
    pixels[100:180, 100:300] = np.nan
    pixels[::50, ::50] = np.inf
    found = estimate_photon_noise(Stored(pixels), (0, 1))
    assert found is not None
    assert found.gain == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("peak", [thorough(5), 20, thorough(100)])
@pytest.mark.parametrize("kind", ["1 %", "10 %", "columns", "hot", "dead"])
def test_scattered_holes_do_not_change_the_estimate(kind: str, peak: float) -> None:
    rng = np.random.default_rng(1)
    whole = retina()[..., 1] / 236.0 * peak
    pixels = rng.poisson(whole) + 500.0
    before = estimate_photon_noise(Stored(pixels.copy()), (0, 1))
    if kind == "columns":
        pixels[:, 3::16] = np.nan
    else:
        share, value = {
            "1 %": (0.01, np.nan),
            "10 %": (0.1, np.nan),
            "hot": (0.01, 65535.0),
            "dead": (0.03, 0.0),
        }[kind]
        pixels[rng.random(pixels.shape) < share] = value
    after = estimate_photon_noise(Stored(pixels), (0, 1), clearly=True)
    assert before is not None
    assert after is not None
    assert after.gain == pytest.approx(before.gain, rel=0.05)
    assert after.offset == pytest.approx(before.offset, abs=0.05 * peak)


def test_planes_are_estimated_by_themselves_and_an_even_one_like_the_others_where_that_suits_it() -> None:
    rng = np.random.default_rng(1)
    lit, empty = 2 * rng.poisson(20.0, (500, 500)), 30 + 1.5 * rng.standard_normal((500, 500))
    planes = np.stack([counted(50), 3 * counted(50), lit, empty, np.full((500, 500), 7.0)])
    found = estimate_photon_noise(Stored(planes), (1, 2), (0,))
    assert found is not None
    alone = [estimate_photon_noise(Stored(plane), (0, 1)) for plane in planes[:2]]
    assert [part.gain for part in alone if part] == list(found.gain[:2])
    assert found.gain[2] == np.median(found.gain[:2])
    assert list(found.gain[3:]) == [0, 0]
    assert list(found.read_sigma[3:]) == pytest.approx([1.5, 0], abs=0.03)
    assert estimate_photon_noise(Stored(planes), (1, 2), (0,), clearly=True) is None
    assert [plane.grows for plane in survey_planes(Stored(planes), (1, 2), (0,))] == [True, True] + 3 * [
        False
    ]


def test_no_channel_gets_the_noise_of_another() -> None:
    lit = 2 * np.random.default_rng(1).poisson(20.0, (500, 500)).astype(float)
    stack = np.stack([[2 * counted(50), lit], [lit, lit], [counted(50), lit]])
    found = estimate_photon_noise(Stored(stack), (2, 3), (0, 1), apart=(1,))
    assert found is not None
    assert found.gain[1, 0] == np.median(found.gain[[0, 2], 0])
    assert list(found.gain[:, 1]) == [0, 0, 0]
    assert found.read_sigma[:, 1] == pytest.approx(2 * np.sqrt(20), rel=0.02)


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.1, 0.2])
def test_noise_of_one_level_is_not_taken_for_that_of_photons(sigma: float) -> None:
    pixels = clean() + sigma * np.random.default_rng(0).standard_normal(clean().shape)
    for stored in (pixels, np.rint(255 * pixels)):
        assert not survey_planes(Stored(stored), (0, 1))[0].grows


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((300, 300)),
        np.full((300, 300), np.nan),
        np.ones((10, 9)),
        np.tile(np.arange(300.0), (300, 1)),
        np.tile(np.arange(300.0) > 150, (300, 1)).astype(float),
    ],
)
def test_an_image_without_noise_shows_none(pixels: Image) -> None:
    assert fit_photon_noise([pixels]) is None


@pytest.mark.parametrize("read_sigma", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("mean", [0.5, 1.0, 2.0, 5.0, 20.0, 200.0])
def test_the_inverse_is_unbiased(mean: float, read_sigma: float) -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(mean, 10**6) + read_sigma * rng.standard_normal(10**6)
    transformed = 2 * np.sqrt(np.maximum(counts + 0.375 + read_sigma**2, 0))
    found = float(exact_inverse(torch.tensor(transformed.mean()))) - read_sigma**2
    assert found == pytest.approx(mean, rel=2e-3, abs=0.05)


def test_the_rounds_are_as_many_as_the_halo_is_for() -> None:
    assert len(SHARES) == ROUNDS
