"""Settings compared on a crop have the pixels of a run, and advice on settings and noise holds against images whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage
from skimage.data import camera, cell, clock, coins, moon, retina

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.compare import compare
from halotile.graphs.jobs.denoise.comparison import Comparison, Setting, TriedSetting, rows_of
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.plan import make_plan
from halotile.storage.grid import Region
from halotile.tasks.noise.estimate import plane_level
from halotile.tasks.noise.noise_correlation import noise_correlation
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import faint_detail, unbiased_risk
from tests.benchmarks.choosing import NOISES, images
from tests.cases import all_of, thorough
from tests.graphs.holed import scene, with_tag
from tests.support import job_of, run_inline, work_of, write_zarr

Image = NDArray[np.float64]
CROP = Region((37, 101), (150, 230))
CASES: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 1.5},
    "tv": {"strength": 1.0, "sigma": "auto"},
    "nlm": {"strength": 0.8, "sigma": "auto", "distance": 3},
    "median": {"size": 5},
    "torch": {"import": "tests.networks:convolutions"},
    "function": {"import": "scipy.ndimage:uniform_filter", "options": {"size": 5}, "depth": 2},
}
NOISE = np.random.default_rng(0).standard_normal((512, 512))


def only(job: Denoising, at: dict[str, int] | None = None, region: Region | None = CROP) -> Comparison:
    """The job as it is, on a crop."""
    return compare([()], lambda _: job, at=at, region=region)


def noisy_retina(sigma: float = 0.1, edge: int = 320) -> tuple[NDArray[Any], NDArray[Any]]:
    clean = retina()[300 : 300 + edge, 300 : 300 + edge, 1].astype(np.float32) / 255
    return clean, (clean + sigma * NOISE[:edge, :edge]).astype(np.float32)


def exact(job: Denoising, at: dict[str, int] | None = None, crop: Region = CROP) -> Comparison:
    """The comparison of a crop, which has the bits of a run."""
    found = only(job, at, crop)
    plane = run_inline(job)[tuple((at or {}).values())]  # c before y and x, as OME-Zarr has it
    assert np.array_equal(found.best.denoised if at == {} else found.best.denoised[0], plane[..., *crop.slices])
    return found


@pytest.mark.parametrize("name", all_of(CASES, thorough=["median", "function"]))
def test_a_crop_with_holes_has_the_bits_of_a_run(tmp_path: Path, name: str) -> None:
    pixels, holes = scene(-9999.0)
    source = with_tag(tmp_path / "a.tif", pixels[:, :240], "-9999")
    found = exact(job_of(source, tmp_path / "o.zarr", name, CASES[name], tile={"size": 64}))
    assert np.array_equal(np.isnan(found.best.residual[0]), holes[CROP.slices])
    assert np.isfinite(found.best.error)
    assert not (tmp_path / "o.zarr.run").exists()


COLOURS: dict[str, Any] = {"import": "tests.networks:convolutions", "options": {"channels": 3}, "channels": [3, 3]}
STACKS: list[Any] = [
    ("zyx", "tv", {"strength": 1.0, "sigma": "auto", "iterations": 5}, "float32"),
    thorough("zyx", "nlm", {"strength": 0.8, "sigma": "auto", "distance": 2, "patch": 3}, "uint32"),
    thorough("cyx", "torch", COLOURS, "uint8"),
    ("yxc", "tv", {"strength": 1.0, "sigma": "auto"}, "uint8"),
    thorough("qyx", "torch", {"import": "tests.networks:unet"}, ">f4"),
    ("cyx", "gaussian", {"sigma": 1.0}, "float16"),
    ("cyx", "tv", {"strength": 1.0, "sigma": "auto"}, "uint16"),  # with photon noise
]


@pytest.mark.parametrize(("axes", "name", "options", "dtype"), STACKS)
def test_crops_of_stacks_are_exact(tmp_path: Path, axes: str, name: str, options: dict[str, Any], dtype: str) -> None:
    axis, scale, crop = axes.strip("yx"), 200 if np.dtype(dtype).kind == "u" else 1, Region((13, 29), (60, 90))
    planes = np.stack([noisy_retina(sigma, 96)[1] for sigma in (0.05, 0.1, 0.2)], axis=axes.index(axis))
    np.save(tmp_path / "a.npy", (planes.clip(0, 1) * scale).astype(dtype))
    parts: dict[str, Any] = {"input": {"axes": axes} if axis != "q" else {}}
    parts["tile"] = {"axes": "zyx"} if axis == "z" else {}
    parts["noise"] = {"model": "poisson-gaussian", "gain": 2.0} if dtype == "uint16" else {}
    job = job_of(tmp_path / "a.npy", tmp_path / "o.zarr", name, options, **parts)
    for index in (0, 2):
        exact(job, {axis: index}, crop)
    if axis == "c" and dtype == "uint8":
        exact(job, {}, crop)


def test_noise_maps_and_masks_are_those_of_the_job(tmp_path: Path) -> None:
    clean, _ = noisy_retina()
    sigma = np.linspace(0.02, 0.2, 320, dtype=np.float32)[:, None].repeat(320, 1)
    mask = np.ones(clean.shape, np.uint8)
    mask[60:90, 120:160] = 0
    np.save(tmp_path / "sigma.npy", sigma)
    np.save(tmp_path / "mask.npy", mask)
    source = write_zarr(tmp_path / "a.zarr", (clean + sigma * NOISE[:320, :320]).astype(np.float32))
    sides = {name: str(tmp_path / f"{name}.npy") for name in ("sigma", "mask")}
    job = job_of(source, tmp_path / "o.zarr", "tv", CASES["tv"], input={"sides": sides})
    found, kept = exact(job), mask[CROP.slices] != 0
    assert np.array_equal(np.isfinite(found.noisy[0]), kept)
    assert found.noise == pytest.approx(sigma[CROP.slices][kept].mean(), rel=1e-6)
    assert 0.85 < found.best.statistics.ratio < 1.05

    sigma[:60] = 0  # a noise map may be zero in places
    np.save(tmp_path / "a.npy", clean + sigma * NOISE[:320, :320])
    np.save(tmp_path / "sigma.npy", sigma)
    given = {"sides": {"sigma": sides["sigma"]}}
    job = job_of(tmp_path / "a.npy", tmp_path / "zeros.zarr", "tv", {"strength": 1.0}, input=given)
    tried = exact(job).best
    assert 0 < tried.error < 0.5
    assert np.isnan(tried.residual[0, :23]).all()
    (row,) = inspect_residual(work_of(make_plan(job)).task, tmp_path / "zeros.zarr").figures["residual"]
    assert row["ratio"] == pytest.approx(0.9, abs=0.15)


def tried(folder: Path, pixels: Any, settings: Any, name: str = "tv", **parts: Any) -> tuple[Comparison, Denoising]:
    """Strengths, with the model of the noise that each takes; and the job."""
    at, own, axes = (parts.pop(key, None) for key in ("at", "own", "axes"))
    folder.mkdir(exist_ok=True)
    source = folder / "a.zarr" if (folder / "a.zarr").exists() else write_zarr(folder / "a.zarr", pixels, axes=axes)
    job = job_of(source, folder / "o.zarr", name, **parts)

    def job_with(setting: Setting) -> Denoising:
        strength, *model = setting or (own,)
        options = {"strength": float(strength), "sigma": "auto"}
        noise = replace(job.noise, model=model[0]) if model else job.noise  # type: ignore[arg-type]
        return replace(job, denoiser=DenoiserChoice(name=name, options=options), noise=noise)

    return compare([tuple(map(str, setting)) for setting in settings], job_with, at=at), job


def true_error(one: TriedSetting, truth: Image, variance: Any) -> float:
    return float(np.mean(np.square(one.denoised[0] - truth)) / np.mean(variance))


def check_errors(found: Comparison, truth: Image, variance: Any, tolerance: float) -> tuple[list[float], list[float]]:
    """Compare the estimates with the true errors; return both."""
    estimates, true = [one.error for one in found.tried], [true_error(one, truth, variance) for one in found.tried]
    assert estimates == pytest.approx(true, abs=tolerance)
    return estimates, true


SCORES = [
    ("tv", "SURE", "gaussian"),
    thorough("nlm", "SURE", "gaussian"),
    ("tv", "PURE", "poisson-gaussian"),
    ("tv", "PURE", "gaussian"),  # the image shows it
]


@pytest.mark.parametrize(("name", "score", "model"), SCORES)
def test_the_estimated_error_follows_the_true_one(tmp_path: Path, name: str, score: str, model: str) -> None:
    clean, rng, gain = 255 * noisy_retina(edge=256)[0].astype(np.float64), np.random.default_rng(0), 2.0
    noise: dict[str, Any] = {}
    noisy, variance = np.asarray(clean + 15 * NOISE[:256, :256], float), np.full(clean.shape, 225.0)
    if score == "PURE":
        noisy, variance = gain * rng.poisson(clean / gain), gain * np.maximum(clean, gain)
        noise = {"model": model} | ({"gain": gain} if model == "poisson-gaussian" else {})
    parts: dict[str, Any] = {"noise": noise, "input": {"range": (0.0, 255.0)}}
    found, _ = tried(tmp_path, noisy.astype(np.float32), [(0.3,), (1.2,), (8.0,)], name, **parts)
    assert (found.score, len(found.tried)) == (score, 3)
    estimates, true = check_errors(found, clean, variance, 0.05)
    assert true[int(np.argmin(estimates))] < 1.07 * min(true)
    least, most = ([detail.kept for detail in found.tried[n].detail] for n in (-1, 0))
    assert 0 < least[1] < most[1] < 1.1


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


PHOTON_NOISE: dict[str, Any] = {"model": "poisson-gaussian"}
BOTH = ("gaussian", "poisson-gaussian")
PHOTONS: dict[str, tuple[Callable[[], Image], float, float, Any]] = {
    "20 photons": (lambda: camera()[:256, :256] / 255 * 20, 1, 0, [(0.01, BOTH[0]), (0.5, BOTH[0]), (2, BOTH[1])]),
    "a camera": (lambda: nuclei(3, 30), 2.2, 1.5, [(0.5, BOTH[0]), *product((1.0, 2.0), BOTH)]),
    "few bright pixels": (lambda: nuclei(7), 1.0, 0.0, [(s, "poisson-gaussian") for s in (0.5, 1.0, 2.0)]),
}


@pytest.mark.parametrize("case", PHOTONS)
def test_errors_of_photon_noise_are_known(tmp_path: Path, case: str) -> None:
    make, gain, read, settings = PHOTONS[case]
    photons, rng, offset = make(), np.random.default_rng(7), 100 * (read > 0)
    pixels = gain * rng.poisson(photons) + offset + read * rng.standard_normal(photons.shape)
    found, _ = tried(tmp_path, pixels.round().astype(np.uint16), settings)
    estimates, true = check_errors(found, gain * photons + offset, gain**2 * photons + read**2, 0.03)
    if case == "20 photons":
        assert true[0] == pytest.approx(0.97, abs=0.01)
    else:
        assert int(np.argmin(estimates)) == int(np.argmin(true)) > 0
        assert found.photons is not None
        assert found.photons.gain.item() == pytest.approx(gain, rel=0.1)


def test_the_noise_level_of_a_plane_is_that_of_all_its_pixels(tmp_path: Path) -> None:
    """Of a dark plane with bright cells, medians over places have the level of the dark."""
    photons = nuclei(5, count=25, brightest=200)
    pixels = (2.2 * np.random.default_rng(2).poisson(photons) + 100).astype(np.float32)
    job = job_of(write_zarr(tmp_path / "a.zarr", pixels), tmp_path / "o.zarr", "tv", CASES["tv"])
    planned = make_plan(job).identity["noise_level"]
    assert planned == pytest.approx(float(np.sqrt(np.mean(2.2**2 * photons))), rel=0.05)
    assert planned == plane_level([pixels.astype(float)])


def test_one_camera_has_one_gain(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    planes = [2.2 * rng.poisson(nuclei(100 + n, count=5, edge=128, brightest=40)) + 100 for n in range(28)]
    noisy = np.stack(planes) + 2 * rng.standard_normal((28, 128, 128))
    source = write_zarr(tmp_path / "a.zarr", noisy.round().astype(np.uint16), axes="tyx")
    models = (PHOTON_NOISE, PHOTON_NOISE | {"shared": "none"})
    jobs = (job_of(source, tmp_path / "o.zarr", "tv", CASES["tv"], noise=model) for model in models)
    shared, by_plane = (make_plan(each).identity["noise"] for each in jobs)
    assert (shared["gain"], shared["offset"]) == (pytest.approx(2.2, rel=0.1), pytest.approx(100, abs=5))
    assert np.ptp(by_plane["gain"]) > 0.3


def _mosaic(noise: Image) -> Image:
    """Noise of every second pixel of rows and columns, and the mean of its neighbours between."""
    measured = np.where(np.add.outer(np.arange(len(noise)) % 2, np.arange(noise.shape[1]) % 2) == 0, noise, 0)
    for axis in (0, 1):
        measured = ndimage.convolve1d(measured, [0.5, 1, 0.5], axis=axis)
    return measured


CORRELATED: dict[str, tuple[Callable[[Image], Image], str]] = {
    "white": (lambda noise: noise, ""),
    "stripes": (lambda noise: noise + 0.85 * noise[:1], "columns that are off: write input.stripes: {axis: x}"),
    "scan": (lambda noise: ndimage.uniform_filter1d(noise, 3, axis=1), "a readout or scan along x: train a network"),
    "smooth": (lambda noise: ndimage.gaussian_filter(noise, 0.7), "resampling, smoothing, demosaicing"),
    "mosaic": (_mosaic, "or lossy compression: denoise the image as it was before that step"),
}


@pytest.mark.parametrize("kind", CORRELATED)
def test_correlated_noise_is_seen_with_its_cause_and_no_error_is_estimated_by_it(tmp_path: Path, kind: str) -> None:
    correlate, advice = CORRELATED[kind]
    noise = correlate(NOISE)
    found, job = tried(tmp_path, (camera() + 20 * noise / noise.std()).astype(np.float32), [(0.5,), (2,)])
    plan = make_plan(replace(job, denoiser=DenoiserChoice(name="tv", options=CASES["tv"])))
    notes = [note for note in plan.notes if note.startswith("the noise is correlated, by ")]
    if kind == "white":
        assert not notes
        assert found.suggested
        return
    if kind == "stripes":  # they have a note of their own
        (note,) = [note for note in plan.notes if "input.stripes" in note]
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


@pytest.mark.parametrize("photons", [0, 20])
def test_hot_pixels_change_no_error_and_are_counted(tmp_path: Path, photons: float) -> None:
    truth = camera()[100:356, 100:356] / 255 * (photons or 1)
    clean = np.random.default_rng(4).poisson(truth) if photons else truth + 0.1 * NOISE[:256, :256]
    hot = clean.astype(np.uint16 if photons else np.float32)
    plain, hot[[40, 200], [77, 130]] = hot.copy(), 60000 if photons else 50
    found = [tried(tmp_path / str(n), pixels, [(0.5,), (2.0,)])[0] for n, pixels in enumerate((plain, hot))]
    assert [one.outliers for one in found] == [0, 2]
    whole, with_hot = ([one.error for one in comparison.tried] for comparison in found)
    assert with_hot == pytest.approx(whole, abs=0.02)


def test_what_is_bright_without_detail_is_not_detected() -> None:
    image = NOISE[None, :256, :256]
    pattern = 9 * ndimage.gaussian_filter(image, (0, 1.5, 1.5))
    found = faint_detail(image, np.ones(image.shape), lambda _: pattern, pattern)
    assert [(each.kept, each.detected) for each in found] == [(0, 0)] * 3


def test_pixels_that_do_not_count_reach_no_denoiser_as_holes() -> None:
    counts = np.random.default_rng(0).poisson(5.0, (1, 64, 64)).astype(float)
    read = np.zeros(counts.shape)
    read[0, 9, 9] = np.nan
    seen: list[bool] = []

    def denoise(image: Image) -> Image:
        seen.append(bool(np.isfinite(image).all()))
        return image

    assert unbiased_risk(counts, PhotonNoise(np.array(1.0), np.array(0.0), read), denoise).error == pytest.approx(
        1, abs=0.05
    )
    assert seen == [True] * (1 + 16)


def test_what_a_pixel_sees_of_others_that_lose_a_photon_does_not_count() -> None:
    counts = np.random.default_rng(0).poisson(1.0, (1, 256, 256)).astype(float)
    noise = PhotonNoise.from_values(np.array(1.0), np.array(0.0))
    # They differ for negative counts only, which there are none of: their errors are the same.
    filters = [
        partial(lambda low, image: ndimage.uniform_filter(np.maximum(image, low), (1, 31, 31)), low)
        for low in (-np.inf, 0.0)
    ]
    linear, cut = (unbiased_risk(counts, noise, each) for each in filters)
    assert cut.error == pytest.approx(linear.error, abs=5e-4)
    assert 0 < linear.spread < 1e-3


def crops(*tops: int, edge: int = 192) -> Image:
    return np.stack([camera()[y : y + edge, 100 : 100 + edge].astype(float) for y in tops])


def test_each_channel_gets_the_strength_that_is_best_for_it(tmp_path: Path) -> None:
    smooth = 128 + 100 * np.sin(np.mgrid[:192, :192][0] / 40)
    truth = np.concatenate([crops(60, 120, 200), smooth[None]])
    noisy = (truth + 20 * np.random.default_rng(0).standard_normal(truth.shape)).astype("f4")
    found, job = tried(tmp_path, noisy, [("0.5",), ("1",), ("4",)], axes="cyx")
    assert list(found.channels) == ["0", "1", "2", "3"]
    best = {}
    for (name, one), clean in zip(found.channels.items(), truth, strict=True):
        true = [true_error(each, clean, 400.0) for each in one.tried]
        best[name] = float(one.tried[int(np.argmin(true))].setting[0])
    assert len(set(best.values())) > 1
    assert found.written == {"denoiser": {"name": "tv", "strength": best, "sigma": "auto"}}
    pasted = DenoiserChoice.from_mapping(found.written["denoiser"])
    assert len(make_plan(replace(job, denoiser=pasted)).identity["channels"]) == len(set(best.values()))


@pytest.mark.parametrize(("own", "suggested"), [(1.01, "1.01"), (9.0, "1.0")])
def test_equal_errors_make_no_advice(tmp_path: Path, own: float, suggested: str) -> None:
    truth = crops(60, 200, edge=128)
    noisy = (truth + 20 * np.random.default_rng(0).standard_normal(truth.shape)).astype("f4")
    settings = [(strength,) for strength in sorted({1.0, 1.01, own})]
    found, _ = tried(tmp_path, noisy, settings, axes="cyx", own=own)
    chosen = [one.suggested and one.suggested.setting for one in found.channels.values()]
    assert (chosen, found.written) == ([(suggested,)] * 2, {})
    alone = tried(tmp_path, noisy, settings[:2], at={"c": 0}, own=own)[0].suggested
    assert alone
    assert own == 9.0 or alone.setting == (str(own),)


@pytest.mark.parametrize("values", [None, (0.0, 255.0)])
def test_settings_are_judged_by_the_level_of_the_job(tmp_path: Path, values: tuple[float, float] | None) -> None:
    noisy, width = (camera()[:128, :128] + 20 * NOISE[:128, :128]).astype("f4"), values[1] if values else 1.0
    source, wanted = write_zarr(tmp_path / "a.zarr", noisy), {"range": values} if values else {}

    def job_with(setting: Setting) -> Denoising:
        options = {"strength": 1.0, "sigma": float(setting[0])}
        return job_of(source, tmp_path / "o.zarr", "tv", options, input=wanted)

    assert compare([(str(30 / width),)], job_with).noise == pytest.approx(30)
    tried = compare([(str(level / width),) for level in (10, 20, 40)], job_with)
    assert tried.noise == pytest.approx(20, rel=0.1)


def test_each_channel_is_judged_by_the_level_of_its_own_denoiser(tmp_path: Path) -> None:
    noisy = (crops(60, 200, edge=128) + np.reshape([5, 40], (2, 1, 1)) * NOISE[:128, :128]).astype("f4")
    source, other = write_zarr(tmp_path / "a.zarr", noisy, axes="cyx"), {"name": "tv", "sigma": "auto"}

    def job_with(setting: Setting) -> Denoising:
        strength = float((*setting, "1")[0])
        job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": strength, "sigma": 5.0})
        return replace(job, channels={"1": DenoiserChoice.from_mapping(other | {"strength": strength})})

    levels = [one.noise for one in compare([("0.5",), ("1",)], job_with).channels.values()]
    assert levels == pytest.approx([5, 40], rel=0.1)


def test_where_there_are_outliers_a_setting_that_replaces_them_is_suggested(tmp_path: Path) -> None:
    noisy = (camera()[:128, :128] + 20 * NOISE[:128, :128]).astype("f4")
    noisy[30, 40] = noisy[80, 90] = 5000
    source = write_zarr(tmp_path / "a.zarr", noisy)

    def job_with(setting: Setting) -> Denoising:
        wanted = {"defects": (*setting, "none")[0]}
        return job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"}, input=wanted)

    found = compare([("none",), ("auto",)], job_with)
    assert found.outliers == 2
    assert found.suggested
    assert found.suggested.setting == ("auto",)
    assert "write input.defects: auto" in dict(rows_of(compare([("none",)], job_with)))["outliers"]


def test_where_nothing_is_asked_for_the_crop_has_structure(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 1500, 1500)).astype(np.float32)
    pixels[1, 900:1400, 900:1400] += camera()[:500, :500] / 10
    pixels[1, 20, 20] = 1e5
    source = write_zarr(tmp_path / "a.zarr", pixels, chunk=256, axes="tyx")
    place = only(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}), region=None).place
    assert place["t"] == (1, 2)
    assert all(b - a == 512 and b > 1000 for a, b in (place["y"], place["x"]))


def test_settings_that_fail_are_named_and_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    pixels = noisy_retina(edge=128)[1]
    found, _ = tried(tmp_path, pixels, [(1,), (-1,)])
    assert [one.setting for one in found.tried] == [("1",)]
    assert "strength" in found.failed["-1",]
    flat, smooth = write_zarr(tmp_path / "flat.zarr", np.ones((64, 64), np.float32)), CASES["gaussian"]
    doubler = {"import": "tests.networks:doubler", "scale": 2}
    refused: list[tuple[Path, str, dict[str, Any], Region | None, type[Exception], str]] = [
        (tmp_path / "a.zarr", "torch", doubler, None, ConfigError, "no residual"),
        (tmp_path / "a.zarr", "gaussian", smooth, Region((0, 0), (300, 10)), ConfigError, "the image has 128 rows"),
        (tmp_path / "a.zarr", "gaussian", smooth, Region((0, 0), (2000, 10)), ConfigError, "at most 1024"),
        (flat, "gaussian", smooth, None, InputError, "no noise can be estimated"),
    ]
    for source, name, options, region, error, words in refused:
        with pytest.raises(error, match=words):
            only(job_of(source, tmp_path / "o.zarr", name, options), region=region)
