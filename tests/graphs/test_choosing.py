"""Advice on settings and noise, against images whose truth is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from scipy import ndimage
from skimage.data import camera, cell, clock, coins, moon

from halotile.graphs.jobs.denoise.compare import Comparison, TriedSetting, compare
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.noise.estimate import plane_level
from halotile.tasks.noise.noise_correlation import noise_correlation
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import faint_detail, unbiased_risk, without_outliers
from halotile.tasks.noise.quiet_windows import fit_noise, windows_of
from tests.benchmarks.choosing import NOISES, Row, images, losses, rows_of
from tests.support import job_of, write_zarr

Image = NDArray[np.float64]


def nuclei(seed: int, count: int = 14, edge: int = 256, background: float = 4.0, brightest: float = 60.0) -> Image:
    """Cells of 10 photons and more over a background."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:edge, :edge]
    photons = np.full((edge, edge), background)
    for _ in range(count):
        row, column = rng.uniform(10, edge - 10, 2)
        high, wide = rng.uniform(6, 13, 2)
        inside = np.hypot((rows - row) / high, (columns - column) / wide)
        photons = np.maximum(photons, background + rng.uniform(10, brightest) / (1 + np.exp(6 * (inside - 1))))
    return photons


def tried(folder: Path, pixels: NDArray[Any], settings: Sequence[tuple[float, str]], name: str = "tv") -> Comparison:
    """Strengths with the model of the noise that each takes."""
    job = job_of(write_zarr(folder / "a.zarr", pixels), folder / "o.zarr", name)

    def job_with(setting: tuple[str, ...]) -> Any:
        options = {"strength": float(setting[0]), "sigma": "auto"}
        noise = replace(job.noise, model=setting[1])  # type: ignore[arg-type]
        return replace(job, denoiser=DenoiserChoice(name=name, options=options), noise=noise)

    return compare([(str(strength), model) for strength, model in settings], job_with)


def true_error(one: TriedSetting, truth: Image, variance: Image) -> float:
    return float(np.mean(np.square(one.denoised[0] - truth)) / variance.mean())


def errors(found: Comparison, truth: Image, variance: Image) -> tuple[list[float], list[float]]:
    """Estimates and truth."""
    return [one.error for one in found.tried], [true_error(one, truth, variance) for one in found.tried]


def test_counts_of_20_photons(tmp_path: Path) -> None:
    truth = camera()[:256, :256] / 255 * 20.0
    counts = np.random.default_rng(0).poisson(truth).astype(np.uint16)
    found = tried(tmp_path, counts, [(0.01, "gaussian"), (0.5, "gaussian"), (0.5, "poisson-gaussian"), (2, "gaussian")])
    estimates, true = errors(found, truth, truth)
    assert true[0] == pytest.approx(0.97, abs=0.01)
    assert estimates == pytest.approx(true, abs=0.03)


def test_a_camera_with_gain_and_offset(tmp_path: Path) -> None:
    photons = nuclei(3, count=30)
    truth, variance = 2.2 * photons + 100, 2.2**2 * photons + 1.5**2
    rng = np.random.default_rng(1)
    pixels = (2.2 * rng.poisson(photons) + 100 + 1.5 * rng.standard_normal(photons.shape)).round().astype(np.uint16)
    models = [(strength, model) for strength in (0.5, 1.0, 2.0) for model in ("gaussian", "poisson-gaussian")]
    found = tried(tmp_path, pixels, models)
    estimates, true = errors(found, truth, variance)
    assert estimates == pytest.approx(true, abs=0.03)
    assert int(np.argmin(estimates)) == int(np.argmin(true))
    assert found.photons is not None
    assert found.photons.gain.item() == pytest.approx(2.2, rel=0.1)


def test_photon_noise_of_few_bright_pixels_is_seen_and_judged_by(tmp_path: Path) -> None:
    fits = [fit_noise(windows_of([np.random.default_rng(s).poisson(nuclei(s)).astype(float)])) for s in range(50)]
    assert sum(fit is not None and fit.is_clear for fit in fits) >= 45
    assert np.mean([fit.gain for fit in fits if fit]) == pytest.approx(1, abs=0.05)
    truth = nuclei(7)
    counts = np.random.default_rng(7).poisson(truth).astype(np.uint16)
    found = tried(tmp_path, counts, [(s, "poisson-gaussian") for s in (0.5, 1.0, 2.0)])
    estimates, true = errors(found, truth, truth)
    assert estimates == pytest.approx(true, abs=0.03)
    assert int(np.argmin(estimates)) == int(np.argmin(true)) > 0


@pytest.mark.thorough
def test_faint_spots_are_kept_by_what_is_suggested(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:256, :256]
    truth, spots = np.full((256, 256), 3.0), []
    for (row, column), height in zip(rng.uniform(8, 248, (60, 2)), rng.uniform(6, 12, 60), strict=True):
        truth += height * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * 1.2**2))
        spots.append((round(row), round(column), height))
    counts = rng.poisson(truth).astype(np.uint16)
    kept, visible = {}, {}
    for name in ("tv", "nlm"):
        (tmp_path / name).mkdir()
        found = tried(tmp_path / name, counts, [(0.5, "poisson-gaussian"), (1.0, "poisson-gaussian")], name)
        for one in found.tried:
            setting = f"{name} {one.setting[0]}"
            kept[setting] = one.detail_kept
            visible[setting] = np.mean([one.denoised[0][y, x] - 3 > height / 3 for y, x, height in spots])
        if name == "tv":
            assert found.best.setting[0] == "1.0"
    assert visible["tv 1.0"] > 0.7 > 0.55 > visible["nlm 1.0"], "of the spots"
    assert sorted(kept, key=kept.__getitem__) == sorted(visible, key=visible.__getitem__)


def test_gaussian_noise_is_not_taken_for_that_of_photons() -> None:
    images = [np.full((256, 256), 0.5), camera()[100:356, 100:356] / 255, nuclei(1) / 60]
    noisy = [
        image + sigma * np.random.default_rng(seed).standard_normal(image.shape)
        for image in images
        for sigma in (0.05, 0.2)
        for seed in range(17)
    ]
    alarms = sum(bool((fit := fit_noise(windows_of([each]))) and fit.is_clear) for each in noisy)
    assert alarms <= 0.02 * len(noisy)


def test_the_noise_level_of_a_plane_is_that_of_all_its_pixels(tmp_path: Path) -> None:
    """Of a dark plane with bright cells, medians over places have the level of the dark."""
    photons = nuclei(5, count=25, brightest=200)
    pixels = (2.2 * np.random.default_rng(2).poisson(photons) + 100).astype(np.float32)
    truth = float(np.sqrt(np.mean(2.2**2 * photons)))
    job = job_of(write_zarr(tmp_path / "a.zarr", pixels), tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"})
    planned = make_plan(job).identity["noise_level"]
    assert planned == pytest.approx(truth, rel=0.05)
    assert planned == plane_level([pixels.astype(float)])


def test_one_camera_has_one_gain(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    planes = [2.2 * rng.poisson(nuclei(100 + n, count=5, edge=128, brightest=40)) + 100 for n in range(28)]
    noisy = np.stack(planes) + 2 * rng.standard_normal((28, 128, 128))
    source = write_zarr(tmp_path / "a.zarr", noisy.round().astype(np.uint16), axes="tyx")
    options: dict[str, Any] = {"strength": 1.0, "sigma": "auto"}
    job = job_of(source, tmp_path / "o.zarr", "tv", options, noise={"model": "poisson-gaussian"})
    noise = make_plan(job).identity["noise"]
    assert noise["gain"] == pytest.approx(2.2, rel=0.1)
    assert noise["offset"] == pytest.approx(100, abs=5)
    by_plane = make_plan(replace(job, noise=replace(job.noise, shared="none"))).identity["noise"]
    assert np.ptp(by_plane["gain"]) > 0.3


def _mosaic(noise: Image) -> Image:
    """Noise of every second pixel of rows and columns, and the mean of its neighbours between."""
    measured = np.where(np.add.outer(np.arange(len(noise)) % 2, np.arange(noise.shape[1]) % 2) == 0, noise, 0)
    for axis in (0, 1):
        measured = ndimage.convolve1d(measured, [0.5, 1, 0.5], axis=axis)
    return measured


CORRELATED: dict[str, tuple[Callable[[Image], Image], str]] = {
    "white": (lambda noise: noise, ""),
    "stripes": (
        lambda noise: noise + 0.85 * noise[:1],
        "line noise, columns that are off: write input.stripes: {axis: x}",
    ),
    "scan": (lambda noise: ndimage.uniform_filter1d(noise, 3, axis=1), "a readout or scan along x: train a network"),
    "smooth": (lambda noise: ndimage.gaussian_filter(noise, 0.7), "resampling, smoothing, a mosaic of colours"),
    "mosaic": (_mosaic, "or lossy compression: denoise the image from before that"),
}


@pytest.mark.parametrize("kind", CORRELATED)
def test_correlated_noise_is_seen_with_its_cause_and_no_error_is_estimated_by_it(tmp_path: Path, kind: str) -> None:
    correlate, advice = CORRELATED[kind]
    noise = correlate(np.random.default_rng(0).standard_normal((512, 512)))
    pixels = (camera() + 20 * noise / noise.std()).astype(np.float32)
    found = tried(tmp_path, pixels, [(0.5, "gaussian"), (2, "gaussian")])
    job = job_of(tmp_path / "a.zarr", tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"})
    notes = [note for note in make_plan(job).notes if note.startswith("the noise is correlated, by ")]
    if kind == "white":
        assert not notes
        assert found.suggested
        return
    if kind == "stripes":  # they have a note of their own
        (note,) = [note for note in make_plan(job).notes if "input.stripes" in note]
        assert note.endswith("write input.stripes: {axis: x}")
    else:
        assert advice in notes[0]
    assert found.correlation is not None
    assert advice in found.correlation.advice
    assert np.isnan([one.error for one in found.tried]).all()
    assert found.suggested is found.keeps_more is None
    assert found.tried[0].detail[2].kept > 0.5


def test_white_noise_is_not_taken_for_correlated_noise() -> None:
    """Of gaussian and Poisson noise on the images of the bench and larger ones, at most 2 %: see docs/design/037."""
    known = [*images().values(), *(image() / 255 for image in (camera, moon, coins, clock, cell))]
    found = [noise_correlation([noise.draw(image, 1).astype(float)]) for image in known for noise in NOISES]
    assert sum(each is not None and each.is_clear for each in found) <= 0.02 * len(found)


def test_estimates_are_close_to_the_truth_and_suggestions_to_the_best() -> None:
    """A few of the rows that ``make bench ARGS=choosing`` measures."""
    noises = [noise for noise in NOISES if noise.name in ("gaussian 0.1", "20 photons")]
    rows: list[Row] = list(rows_of(noises, names=("camera",), denoisers=("tv", "gaussian")))
    assert np.mean([row.is_close for row in rows]) >= 0.95
    assert max(losses(rows)) < 0.3


@pytest.mark.parametrize("stated", [None, -1])
def test_channels_without_colours_get_different_ones(tmp_path: Path, stated: int | None) -> None:
    pixels = np.random.default_rng(0).poisson(20, (4, 64, 64)).astype(np.uint16)
    channels: dict[str, Any] = {"Name": ["DAPI", "FITC", "TRITC", "Cy5"]} | ({"Color": [stated] * 4} if stated else {})
    tifffile.imwrite(tmp_path / "a.tif", pixels, ome=True, metadata={"axes": "CYX", "Channel": channels})
    plan = make_plan(job_of(tmp_path / "a.tif", tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}))
    omero: Any = plan.layout.omero
    colours = [channel["color"] for channel in omero["channels"]]
    assert len(set(colours)) == 4
    assert "FFFFFF" not in colours


@pytest.mark.parametrize("photons", [0, 20])
def test_hot_pixels_change_no_error_and_are_counted(tmp_path: Path, photons: float) -> None:
    truth = camera()[100:356, 100:356] / 255 * (photons or 1)
    rng = np.random.default_rng(4)
    clean = rng.poisson(truth) if photons else truth + 0.1 * rng.standard_normal(truth.shape)
    hot = clean.astype(np.uint16 if photons else np.float32)
    hot[[40, 200], [77, 130]] = 60000 if photons else 50
    found = []
    for number, pixels in enumerate((clean.astype(hot.dtype), hot)):
        (tmp_path / str(number)).mkdir()
        found.append(tried(tmp_path / str(number), pixels, [(0.5, "gaussian"), (2.0, "gaussian")]))
    assert [one.outliers for one in found] == [0, 2]
    whole, with_hot = ([one.error for one in comparison.tried] for comparison in found)
    assert with_hot == pytest.approx(whole, abs=0.02)


def test_stars_are_no_outliers() -> None:
    rows, columns = np.mgrid[:9, :9] - 4
    star = np.exp(-(rows**2 + columns**2) / (2 * 0.9**2))
    image = np.random.default_rng(0).standard_normal((1, 128, 128))
    for number, height in enumerate((5, 10, 30, 100, 1000)):
        image[0, 20 * number + 4 : 20 * number + 13, 50:59] += height * star
    found = without_outliers(image, PhotonNoise.of(np.array(0.0), np.array(1.0)))[1]
    assert not found.any()


def test_pixels_that_do_not_count_reach_no_denoiser_as_holes() -> None:
    counts = np.random.default_rng(0).poisson(5.0, (1, 64, 64)).astype(float)
    read = np.zeros(counts.shape)
    read[0, 9, 9] = np.nan
    seen: list[bool] = []

    def denoise(image: Image) -> Image:
        seen.append(bool(np.isfinite(image).all()))
        return image

    assert unbiased_risk(counts, PhotonNoise(np.array(1.0), np.array(0.0), read), denoise) == pytest.approx(1, abs=0.05)
    assert all(seen)
    assert len(seen) == 1 + 16


def test_each_channel_gets_the_strength_that_is_best_for_it(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(0), np.mgrid[:192, :192][0]
    smooth = 128 + 100 * np.sin(rows / 40)
    truth = np.stack([camera()[y : y + 192, 100:292].astype(float) for y in (60, 120, 200)] + [smooth])
    noisy = (truth + 20 * rng.standard_normal(truth.shape)).astype("f4")
    job = job_of(write_zarr(tmp_path / "a.zarr", noisy, axes="cyx"), tmp_path / "o.zarr", "tv")

    def job_with(setting: tuple[str, ...]) -> Any:
        options = {"strength": float(setting[0]), "sigma": "auto"}
        return replace(job, denoiser=DenoiserChoice(name="tv", options=options))

    found = compare([("0.5",), ("1",), ("4",)], job_with)
    assert list(found.channels) == ["0", "1", "2", "3"]
    best = {}
    for (name, one), clean in zip(found.channels.items(), truth, strict=True):
        true = [true_error(each, clean, np.full(clean.shape, 400.0)) for each in one.tried]
        best[name] = float(one.tried[int(np.argmin(true))].setting[0])
    assert len(set(best.values())) > 1
    assert found.written == {"denoiser": {"name": "tv", "strength": best, "sigma": "auto"}}
    pasted = DenoiserChoice.of(found.written["denoiser"])
    assert len(make_plan(replace(job, denoiser=pasted)).identity["channels"]) == len(set(best.values()))


@pytest.mark.parametrize(
    ("strengths", "own", "suggested"), [((1.0, 1.01), 1.01, "1.01"), ((1.0, 1.01, 9.0), 9.0, "1.0")]
)
def test_settings_of_equal_errors_make_no_advice(
    tmp_path: Path, strengths: tuple[float, ...], own: float, suggested: str
) -> None:
    rng = np.random.default_rng(0)
    truth = np.stack([camera()[y : y + 128, 100:228].astype(float) for y in (60, 200)])
    noisy = (truth + 20 * rng.standard_normal(truth.shape)).astype("f4")
    job = job_of(write_zarr(tmp_path / "a.zarr", noisy, axes="cyx"), tmp_path / "o.zarr", "tv")

    def job_with(setting: tuple[str, ...]) -> Any:
        options = {"strength": float(setting[0]) if setting else own, "sigma": "auto"}
        return replace(job, denoiser=DenoiserChoice(name="tv", options=options))

    settings = [(str(strength),) for strength in strengths]
    found = compare(settings, job_with)
    chosen = [one.suggested and one.suggested.setting for one in found.channels.values()]
    assert chosen == [(suggested,)] * 2
    assert found.written == {}
    alone = compare(settings[:2], job_with, at={"c": 0}).suggested
    assert alone
    assert (alone.setting == (str(own),)) or own == 9.0


@pytest.mark.parametrize("values", [None, (0.0, 255.0)])
def test_a_level_in_the_job_is_that_by_which_settings_are_judged(
    tmp_path: Path, values: tuple[float, float] | None
) -> None:
    noisy = (camera()[:128, :128] + 20 * np.random.default_rng(0).standard_normal((128, 128))).astype("f4")
    width = values[1] if values else 1.0
    source, wanted = write_zarr(tmp_path / "a.zarr", noisy), {"range": values} if values else {}
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": 30 / width}, input=wanted)
    assert compare([()], lambda _: job).noise == pytest.approx(30)

    def job_with(setting: tuple[str, ...]) -> Any:
        return replace(job, denoiser=DenoiserChoice(name="tv", options={"strength": 1.0, "sigma": float(setting[0])}))

    tried = compare([(str(level / width),) for level in (10, 20, 40)], job_with)
    assert tried.noise == pytest.approx(20, rel=0.1)


def test_what_is_bright_without_the_faint_detail_is_not_detected() -> None:
    image = np.random.default_rng(0).standard_normal((1, 256, 256))
    pattern = 9 * ndimage.gaussian_filter(image, (0, 1.5, 1.5))
    found = faint_detail(image, np.ones(image.shape), lambda _: pattern, pattern)
    assert [(each.kept, each.detected) for each in found] == [(0, 0)] * 3
