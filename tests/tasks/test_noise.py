"""Noise: its level and photons estimated from samples, and drawn for simulated measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from skimage.data import binary_blobs, camera, retina

from halotile.errors import InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.grid import Grid, Region
from halotile.tasks.denoisers.common.anscombe import exact_inverse
from halotile.tasks.noise import estimate
from halotile.tasks.noise.estimate import estimate_noise_levels, measure_plane, plane_level, sample_regions
from halotile.tasks.noise.photon_noise import estimate_photon_noise, survey_planes
from halotile.tasks.noise.quiet_windows import fit_noise, windows_of
from halotile.tasks.noise.simulated import CELL, Simulated, draw_cells, gaussian, poisson
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from tests.cases import in_folders, thorough
from tests.graphs.solving import kernel
from tests.tasks.denoising import Counted


def noisy(shape: tuple[int, ...], sigma: float) -> NDArray[np.float64]:
    rows, columns = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    return (np.sin(rows / 40) + np.cos(columns / 60)) + sigma * np.random.default_rng(5).standard_normal(shape)


def level_of(image: Counted | Source) -> float:
    return float(estimate_noise_levels(image, tuple(range(len(image.shape)))))


def level_rows() -> Iterator[tuple[str, Any, float, float]]:
    """Yield images, and the level of their noise with its tolerance."""
    for sigma, shape in itertools.product((0.02, 0.3), ((900, 700), (3, 400, 500), (2, 9, 130, 170), (31, 33))):
        yield f"white noise {sigma} {shape}", noisy(shape, sigma), sigma, 0.15
    for dtype in ("uint8", "uint16", "float16", "float32"):
        yield dtype, (100 + 20 * noisy((400, 400), 0.3)).astype(dtype), 6.0, 0.1
    for unit, counts in itertools.product((1, 0.25), (0.5, 1, 1.5, 2, 3, 5)):
        pixels = np.random.default_rng(1).poisson(counts, (500, 500)) * unit
        yield f"few counts {unit} {counts}", pixels, unit * counts**0.5, 0.03
    rounded = np.rint(np.random.default_rng(2).normal(100, 1.2, (500, 500))).astype(np.uint8)
    yield "rounding counts as noise", rounded, float(rounded.std()), 0.02
    background = np.zeros((2048, 2048), np.float32)
    background[:700, :700] = noisy((700, 700), 0.1)
    yield "an empty background", background, 0.1, 0.15
    missing = noisy((300, 300), 0.1)
    missing[::7], missing[5] = np.nan, np.inf
    yield "missing pixels", missing, 0.1, 0.1
    spread = 0.5 + 0.5 * noisy((600, 600), 0.2)
    for ends in ((0.0, 1.0), (-9.0, 0.6), (0.3, 9.0)):
        yield f"saturated pixels {ends}", np.clip(spread, *ends), 0.1, 0.15
    holed = np.clip(spread, 0.3, 9.0)
    holed[np.random.default_rng(0).random((600, 300)).repeat(2, 1) < 0.55] = np.nan
    yield "saturated pixels beside holes", holed, 0.1, 0.15
    board = np.add.outer(np.arange(512) // 25, np.arange(512) // 25) % 2
    board = board + 0.1 * np.random.default_rng(0).standard_normal(board.shape)
    yield "black beside white is not cut off at both ends", board.clip(0, 1), 0.1, 0.1
    yield "zeros of few counts are not cut off", np.random.default_rng(0).poisson(0.3, (512, 512)), 0.3**0.5, 0.1


def test_the_level_of_noise_is_found() -> None:
    for name, pixels, level, tolerance in level_rows():
        assert level_of(Counted(pixels)) == pytest.approx(level, rel=tolerance), name
    assert level_of(Counted(np.random.default_rng(0).integers(0, 2, (200, 200)))) > 0, "an image of two values"
    random = np.random.default_rng(0)
    sky = random.poisson(0.3, (512, 512))
    stars = sky + random.poisson(4.0, sky.shape) * binary_blobs(512, 0.02, volume_fraction=0.1, rng=random)
    assert level_of(Counted(stars)) < 0.7


def test_an_image_whose_noise_cannot_be_estimated_is_refused(tmp_path: Path) -> None:
    flat, level = np.full((300, 300), 3.0), "2 x 2 pixels have no diagonal difference"
    rows = [(flat, level), (np.tile(np.arange(300.0), (300, 1)), level), (flat * np.nan, "no 2 x 2 pixels are finite")]
    for pixels, why in rows:
        words = f"no noise could be estimated .* {why}.* Write the level in the units of the file"
        with pytest.raises(InputError, match=words):
            level_of(Counted(pixels))
    for shape in ((5,), (1, 300), (3, 1, 40)):
        with pytest.raises(InputError, match="Write the level in the units of the file"):
            level_of(Counted(np.zeros(shape)))
    for dtype, is_named in (("uint8", True), ("bool", True), ("float32", False)):
        labels = np.zeros((300, 300), dtype)
        labels[100:200] = 1
        with pytest.raises(InputError, match="Write the level in the units of the file") as error:
            level_of(Counted(labels))
        assert ("gaussian and median would mix classes" in str(error.value)) == is_named
    for folder, shape in in_folders(tmp_path, ((64, 64), (64, 1))):
        np.save(folder / "blank.npy", np.full(shape, 100, "uint8"))
        with pytest.raises(InputError, match=r"/blank\.npy.* Write the level in the units of the file"):
            level_of(open_source(folder / "blank.npy"))
    assert np.isnan(plane_level([]))


def test_the_same_places_are_read_every_time_and_little_of_a_large_image() -> None:
    row = np.random.default_rng(5).standard_normal(110_000)
    image = Counted(np.lib.stride_tricks.as_strided(row, (50_000, 60_000), row.strides * 2))
    level_of(image)
    first = [*image.reads]
    image.reads.clear()
    level_of(image)
    assert image.reads == first
    assert sum(region.size for region in first) == 64 * 256**2


@settings(deadline=None, max_examples=60)
@given(shape=st.lists(st.integers(1, 3000), min_size=2, max_size=4).map(tuple), samples=st.integers(1, 64))
def test_samples_lie_inside_the_image_and_none_twice(shape: tuple[int, ...], samples: int) -> None:
    regions = sample_regions(shape, samples, (len(shape) - 2, len(shape) - 1))
    assert 1 <= len(regions) <= samples
    assert len(set(regions)) == len(regions)
    assert all(region.inside(Region.whole(shape)) for region in regions)


def test_samples_are_spread_over_every_axis() -> None:
    regions = sample_regions((8, 10_000, 10_000), 64, (1, 2))
    starts = np.array([region.start for region in regions])
    counts, _, _ = np.histogram2d(starts[:, 1], starts[:, 2], bins=4, range=[[0, 10_000]] * 2)
    assert counts.min() >= 1
    assert set(starts[:, 0]) == set(range(8))


LEVELS = [0.02, 0.2, 0.0, 0.7]


def test_each_plane_is_measured_by_itself_wherever_its_axis_lies() -> None:
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        planes = np.stack([noisy((300, 280), level) for level in LEVELS])
        planes[2] = 0.5
        looped = order.index(0)
        spatial = [axis for axis in range(3) if axis != looped]
        found = estimate_noise_levels(Counted(planes.transpose(order)), spatial, [looped])
        assert found == pytest.approx(LEVELS, rel=0.1)


@dataclass(frozen=True)
class Chunked(Counted):
    """An array in chunks."""

    chunks: tuple[int, ...] = ()


def test_planes_of_one_chunk_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.stack([noisy((64, 64), 0.1 * (1 + plane % 7)) for plane in range(60)]).reshape(2, 30, 64, 64)
    apart, together = Counted(pixels), Chunked(pixels, chunks=(1, 20, 64, 64))
    expected = estimate_noise_levels(apart, (2, 3), (0, 1))
    np.testing.assert_array_equal(estimate_noise_levels(together, (2, 3), (0, 1)), expected)
    assert (len(apart.reads), len(together.reads)) == (60, 4)
    monkeypatch.setattr(estimate, "AT_ONCE_BYTES", 64**2 * 8 * 5)
    bounded = Chunked(pixels, chunks=(2, 20, 64, 64))
    np.testing.assert_array_equal(estimate_noise_levels(bounded, (2, 3), (0, 1)), expected)
    assert max(region.size for region in bounded.reads) <= 5 * 64**2


def cut_off(pixels: NDArray[np.float64], share: float, side: str) -> NDArray[np.float64]:
    """Pixels of which this share lies at one end of the range, or at both together."""
    low = {"low": share, "high": 0.0, "both": share / 2}[side]
    return np.clip(pixels, np.quantile(pixels, low), np.quantile(pixels, 1 + low - share))


def test_noise_that_was_cut_off_counts_as_before() -> None:
    kinds = ("float32", "uint8", "uint16"), ("low", "high", "both"), (0.1, 0.4, 0.54, 0.7)
    for dtype, side, share in itertools.product(*kinds):
        pixels = cut_off(np.random.default_rng(0).normal(10, 0.1, (512, 512)), share, side)
        steps = 0.9 * 255 / np.ptp(pixels) if dtype == "uint8" else 50_000
        pixels = np.rint((pixels - pixels.min()) * steps).astype(dtype)
        tolerance = 0.12 if dtype == "uint8" else 0.1
        assert level_of(Counted(pixels)) == pytest.approx(0.1 * steps, rel=tolerance)


def test_noise_that_was_cut_off_in_a_photograph_counts_as_before() -> None:
    kinds = ("low", "both"), (0.2, 0.7), (0.05, 0.2), ("retina", "camera")
    for side, share, sigma, name in itertools.product(*kinds):
        image = (retina()[300:900, 100:700, 1] if name == "retina" else camera()) / 255
        pixels = image + sigma * np.random.default_rng(7).standard_normal(image.shape)
        whole = level_of(Counted(pixels))
        assert level_of(Counted(np.clip(pixels, 0, 1))) == pytest.approx(whole, rel=0.04)
        tolerance = 0.17 if share > 0.6 else 0.08
        assert level_of(Counted(cut_off(pixels, share, side))) == pytest.approx(whole, rel=tolerance)


def test_black_and_white_places_are_no_noise_that_was_cut_off() -> None:
    random, lines = np.random.default_rng(3), np.arange(512) % 8 == 0
    blobs, fine = binary_blobs(512, 0.2, rng=random), binary_blobs(512, 0.01, volume_fraction=0.4, rng=random)
    most, dead = ~binary_blobs(512, 0.1, volume_fraction=0.1, rng=random), random.random((512, 512)) < 0.2
    for places, white in itertools.product((blobs, fine, np.add.outer(lines, lines), dead, most), (False, True)):
        pixels = 0.1 * random.standard_normal((512, 512))
        pixels[places] = 0.6 if white else -0.6
        assert level_of(Counted(pixels)) == pytest.approx(0.1, rel=0.04)


def test_noise_of_which_too_little_is_left_is_known_as_such() -> None:
    noise = np.random.default_rng(0).standard_normal((256, 256))
    found = measure_plane([cut_off(noise, 0.8, "low")])
    assert found.level < 0.2
    assert found.share == pytest.approx(0.8, abs=0.01)
    assert found.saturated[0] == pytest.approx(0.84, abs=0.01)
    assert np.isnan(found.saturated[1])
    assert measure_plane([cut_off(noise, 0.5, "low")]).share == 0
    assert measure_plane([np.random.default_rng(0).poisson(0.3, (256, 256)).astype(float)]).share == 0


Image = NDArray[np.float64]


def clean() -> Image:
    green: Image = retina()[400:900, :500, 1] / 236.0
    return green


def counted(peak: float, gain: float = 1.0, offset: float = 0.0, read_sigma: float = 0.0) -> Image:
    rng = np.random.default_rng(0)
    counts = rng.poisson(clean() * peak)
    return gain * counts + offset + read_sigma * rng.standard_normal(counts.shape)


def photons_of(pixels: Image, *axes: Any, **options: Any) -> Any:
    found = estimate_photon_noise(Counted(pixels), *axes or ((0, 1),), **options)
    assert found is not None
    return found


def test_the_gain_is_found() -> None:
    rows: list[tuple[float, float]] = [(1.0, 0.0), (3.7, 100.0), (0.001, 0.0)]
    for (gain, offset), peak in itertools.product(rows, (5, 20, 100)):
        found = photons_of(counted(peak, gain, offset))
        assert found.gain == pytest.approx(gain, rel=0.1)
        assert found.offset == pytest.approx(offset, abs=0.05 * peak * gain)
        assert found.read_sigma < 0.5 * gain * np.sqrt(peak)
    # With as much noise of the readout as of photons, a gain from an image of this size varies by a fifth.
    found = photons_of(counted(20, read_sigma=4.0))
    assert found.gain == pytest.approx(1, rel=0.3)
    assert found.read_sigma == pytest.approx(4, rel=0.1)
    rng, truth = np.random.default_rng(0), np.zeros((256, 256))  # a dark background does not outvote what is bright
    truth[:120, :120] = 40 + 120 * (np.arange(120) // 40)
    found = photons_of(2.2 * rng.poisson(truth) + 100 + rng.normal(0, 2, truth.shape))
    assert found.gain == pytest.approx(2.2, rel=0.1)
    pixels = counted(100)  # holes and saturated pixels do not count
    pixels = np.minimum(pixels, np.quantile(pixels, 0.9))
    pixels[100:180, 100:300], pixels[::50, ::50] = np.nan, np.inf
    assert photons_of(pixels).gain == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("peak", [thorough(5), 20, thorough(100)])
def test_scattered_holes_do_not_change_the_estimate(peak: float) -> None:
    rng = np.random.default_rng(1)
    whole = rng.poisson(retina()[..., 1] / 236.0 * peak) + 500.0
    before, columns = estimate_photon_noise(Counted(whole.copy()), (0, 1)), whole.copy()
    columns[:, 3::16] = np.nan
    rows = ((0.01, np.nan), (0.1, np.nan), (0.01, 65535.0), (0.03, 0.0))
    for pixels in (columns, *(np.where(rng.random(whole.shape) < share, hole, whole) for share, hole in rows)):
        after = estimate_photon_noise(Counted(pixels), (0, 1), clearly=True)
        assert before is not None
        assert after is not None
        assert after.gain == pytest.approx(before.gain, rel=0.05)
        assert after.offset == pytest.approx(before.offset, abs=0.05 * peak)


def test_planes_are_estimated_by_themselves_and_an_even_one_like_the_others_where_that_suits_it() -> None:
    rng = np.random.default_rng(1)
    lit, empty = 2 * rng.poisson(20.0, (500, 500)), 30 + 1.5 * rng.standard_normal((500, 500))
    planes = np.stack([counted(50), 3 * counted(50), lit, empty, np.full((500, 500), 7.0)])
    found = photons_of(planes, (1, 2), (0,), shared=False)
    alone = [estimate_photon_noise(Counted(plane), (0, 1)) for plane in planes[:2]]
    assert [part.gain for part in alone if part] == list(found.gain[:2])
    assert found.gain[2] == np.median(found.gain[:2])
    assert list(found.gain[3:]) == [0, 0]
    assert list(found.read_sigma[3:]) == pytest.approx([1.5, 0], abs=0.03)
    assert estimate_photon_noise(Counted(planes), (1, 2), (0,), shared=False, clearly=True) is None
    assert [plane.grows for plane in survey_planes(Counted(planes), (1, 2), (0,))] == [True, True] + 3 * [False]


def test_a_plane_of_correlated_noise_does_not_pass_for_the_quiet_part_of_all() -> None:
    truth, rng = 8.5 * 6 * clean()[:300, :300], np.random.default_rng(0)
    planes = np.stack([8.5 * rng.poisson(truth / 8.5) + 20 + rng.normal(0, 3, truth.shape) for _ in range(6)])
    away = planes - truth - 20
    planes[3] = truth + 20 + np.sqrt(3) * (away[3] + np.roll(away[4], 1, 1) + np.roll(away[5], 2, 1)) / 3
    planes[3] = (planes[3] + np.roll(planes[3], 1, 1) + np.roll(planes[3], 2, 1)) / 3
    found = photons_of(planes, (1, 2), (0,))
    assert found.gain == pytest.approx(8.5, rel=0.1)
    assert found.offset == pytest.approx(20, abs=6)


def test_noise_of_one_level_is_not_taken_for_that_of_photons_cut_off_or_not() -> None:
    rows = [(clean(), sigma) for sigma in (0.005, 0.02, 0.1, 0.2)]
    for image, sigma in rows + [(pixels / 255, 20 / 255) for pixels in (camera(), retina()[..., 1])]:
        noisy = 255 * (image + sigma * np.random.default_rng(0).standard_normal(image.shape))
        for stored in (noisy, np.rint(noisy), np.rint(noisy).clip(0, 255).astype(np.uint8)):
            assert not survey_planes(Counted(stored), (0, 1))[0].grows


def test_an_image_without_noise_shows_none() -> None:
    ramp, nothing = np.tile(np.arange(300.0), (300, 1)), np.full((300, 300), np.nan)
    for pixels in (np.zeros((300, 300)), nothing, np.ones((10, 9)), ramp, (ramp > 150).astype(float)):
        fit = fit_noise(windows_of([pixels]))
        assert fit is None or fit.gain == 0


@pytest.mark.parametrize("unit", [1e300, 1e-300])
def test_values_may_have_no_squares(unit: float) -> None:
    pixels = np.random.default_rng(0).standard_normal((256, 256)) + 5
    one, other = (fit_noise(windows_of([scale * pixels])) for scale in (1.0, unit))
    assert one is not None
    assert other is not None
    assert other.level / unit == pytest.approx(one.level, rel=1e-2)


def test_the_inverse_is_unbiased() -> None:
    for mean, read_sigma in itertools.product((0.5, 1.0, 2.0, 5.0, 20.0, 200.0), (0.0, 1.0, 4.0)):
        rng = np.random.default_rng(0)
        counts = rng.poisson(mean, 200_000) + read_sigma * rng.standard_normal(200_000)
        transformed = 2 * np.sqrt(np.maximum(counts + 0.375 + read_sigma**2, 0))
        found = float(exact_inverse(torch.tensor(transformed.mean()))) - read_sigma**2
        assert found == pytest.approx(mean, rel=2e-3, abs=0.05)


def test_any_tiling_gives_the_same_bits() -> None:
    noises: list[Any] = ["gaussian", "poisson", "none"]
    for block, noise in itertools.product((32, 67), noises):
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


def test_operators_seeds_and_planes_have_noise_of_their_own() -> None:
    keys = ((4, 1), (5, 1), (4, 2))
    drawn = [gaussian(np.zeros(WHOLE.shape), WHOLE, sigma=0.3, seed=seed, operator=operator) for seed, operator in keys]
    planes: Any = np.stack([plane.ravel() for each in drawn for plane in each])
    assert abs(np.corrcoef(planes) - np.eye(6)).max() < 0.03
    flat = InMemory(np.zeros((64, 64), "float32"))
    pair: Any = [read_all(Simulated(flat, "gaussian", level=1.0, operator=number)).ravel() for number in (0, 1)]
    assert abs(np.corrcoef(pair)[0, 1]) < 0.06


def test_no_count_is_drawn_of_light_that_is_none_and_rounding_below_0_is_no_light() -> None:
    for light in (-1e-7, 0.0, -0.1, np.nan, np.inf):
        clean = InMemory(np.array([[light, 1.0]], "float32"))
        simulated = Simulated(clean, "poisson", level=0.1 if abs(light) != 1e-7 else 1e-9)
        if abs(light) < 1e-6:
            assert read_all(simulated)[0, 0] == 0
            continue
        with pytest.raises(InputError, match="1 of 2 pixels"):
            read_all(simulated)
    assert not poisson(np.full(WHOLE.shape, -1.0), WHOLE, gain=1.0, seed=0, operator=0).any()


WHOLE = Region((0, 0, 0), (2, 200, 170))


MODELS: dict[str, Any] = {"gaussian": partial(gaussian, sigma=0.3), "poisson": partial(poisson, gain=0.5)}


def test_a_tile_draws_what_the_whole_draws_and_a_part_of_a_line_what_the_line_does() -> None:
    parts = [((0, 5, 7), (2, 80, 90)), ((1, 64, 64), (2, 128, 128)), ((0, 199, 0), (1, 200, 1))]
    rows = [(WHOLE, Region(*part)) for part in parts] + [(Region((0,), (300,)), Region((50,), (200,)))]
    for draw, (region, part) in itertools.product(MODELS.values(), rows):
        clean = np.full(region.shape, 3.0, "float32")
        whole = draw(clean, region, seed=4, operator=1)
        assert len(np.unique(whole)) > 5
        assert np.array_equal(draw(clean[part.slices], part, seed=4, operator=1), whole[part.slices])


def test_shot_noise_is_the_quantile_of_one_uniform_number() -> None:
    for rate in (0.0, 0.01, 3.7, 200.0):
        drawn = poisson(np.full(WHOLE.shape, 2.0 * rate), WHOLE, gain=2.0, seed=0, operator=0)
        uniform = draw_cells(WHOLE, 0, 0, lambda stream: stream.random((CELL, CELL)))
        assert np.array_equal(drawn / 2, np.maximum(scipy.stats.poisson.ppf(uniform, rate), 0) if rate else 0 * uniform)
