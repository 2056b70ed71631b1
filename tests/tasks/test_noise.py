"""The noise level of a whole image, estimated from samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.tasks.noise.estimate import estimate_noise_level, sample_regions


@dataclass
class Stored:
    """An array that counts what is read of it."""

    pixels: NDArray[Any]
    reads: list[Region] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.pixels.dtype)

    def read(self, region: Region) -> NDArray[Any]:
        self.reads.append(region)
        return np.ascontiguousarray(self.pixels[region.slices])


def noisy(shape: tuple[int, ...], sigma: float) -> NDArray[np.float64]:
    rows, columns = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    smooth = np.sin(rows / 40) + np.cos(columns / 60)
    return smooth + sigma * np.random.default_rng(5).standard_normal(shape)


@pytest.mark.parametrize("shape", [(900, 700), (3, 400, 500), (2, 9, 130, 170), (31, 33)])
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_white_noise_is_measured(shape: tuple[int, ...], sigma: float) -> None:
    assert estimate_noise_level(Stored(noisy(shape, sigma))) == pytest.approx(sigma, rel=0.15)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_every_type_of_pixel_is_measured_in_its_own_units(dtype: str) -> None:
    pixels = (100 + 20 * noisy((400, 400), 0.3)).astype(dtype)
    assert estimate_noise_level(Stored(pixels)) == pytest.approx(6.0, rel=0.1)


def test_an_empty_background_does_not_hide_the_noise() -> None:
    pixels = np.zeros((2048, 2048), np.float32)
    pixels[:700, :700] = noisy((700, 700), 0.1)
    assert estimate_noise_level(Stored(pixels)) == pytest.approx(0.1, rel=0.15)


def test_missing_pixels_are_left_out() -> None:
    pixels = noisy((300, 300), 0.1)
    pixels[::7] = np.nan
    pixels[5] = np.inf
    assert estimate_noise_level(Stored(pixels)) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("value", "why"), [(3.0, "its pixels are equal"), (np.nan, "no 2 x 2 pixels are finite")]
)
def test_a_image_whose_noise_cannot_be_estimated_is_refused(value: float, why: str) -> None:
    with pytest.raises(InputError, match=f"no noise could be estimated .* {why} .* Write sigma as a number"):
        estimate_noise_level(Stored(np.full((300, 300), value)))


def test_the_same_places_are_read_every_time_and_little_of_a_large_image() -> None:
    row = np.random.default_rng(5).standard_normal(110_000)
    image = Stored(np.lib.stride_tricks.as_strided(row, (50_000, 60_000), row.strides * 2))
    estimate_noise_level(image)
    first, image.reads = image.reads, []
    estimate_noise_level(image)
    assert image.reads == first
    assert sum(region.size for region in first) == 64 * 256**2


@pytest.mark.parametrize("shape", [(5,), (1, 300), (3, 1, 40)])
def test_a_image_too_small_to_have_details_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="Write sigma as a number"):
        estimate_noise_level(Stored(np.zeros(shape)))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 3000), min_size=2, max_size=4).map(tuple),
    samples=st.integers(1, 64),
)
def test_samples_lie_inside_the_image_and_none_twice(shape: tuple[int, ...], samples: int) -> None:
    regions = sample_regions(shape, samples, 256)
    assert 1 <= len(regions) <= samples
    assert len(set(regions)) == len(regions)
    assert all(region.inside(Region.whole(shape)) for region in regions)


def test_samples_are_spread_over_every_axis() -> None:
    regions = sample_regions((8, 10_000, 10_000), 64, 256)
    starts = np.array([region.start for region in regions])
    counts, _, _ = np.histogram2d(starts[:, 1], starts[:, 2], bins=4, range=[[0, 10_000]] * 2)
    assert counts.min() >= 1
    assert set(starts[:, 0]) == set(range(8))
