"""Settings compared on a crop have the pixels of a run, and estimates that follow the true error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.data import camera, retina

from halotile.errors import ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.compare import Comparison, Setting, compare
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.grid import Region
from tests.cases import all_of, thorough
from tests.graphs.holed import scene, with_tag
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr

CROP = Region((37, 101), (150, 230))
CASES: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 1.5},
    "tv": {"strength": 1.0, "sigma": "auto"},
    "nlm": {"strength": 0.8, "sigma": "auto", "distance": 3},
    "median": {"size": 5},
    "torch": {"import": "tests.networks:convolutions"},
    "function": {"import": "scipy.ndimage:uniform_filter", "options": {"size": 5}, "depth": 2},
}


def only(job: Denoising, at: dict[str, int] | None = None, region: Region | None = CROP) -> Comparison:
    """The job as it is, on a crop."""
    return compare([()], lambda _: job, at=at, region=region)


def noisy_retina(sigma: float = 0.1, edge: int = 512) -> tuple[NDArray[Any], NDArray[Any]]:
    clean = retina()[300 : 300 + edge, 300 : 300 + edge, 1].astype(np.float32) / 255
    noise = np.random.default_rng(0).standard_normal(clean.shape)
    return clean, (clean + sigma * noise).astype(np.float32)


@pytest.mark.parametrize("name", all_of(CASES, thorough=["tv", "median", "torch"]))
@pytest.mark.parametrize("dtype", ["float32", thorough("uint16")])
def test_a_crop_has_the_bits_of_a_run(tmp_path: Path, name: str, dtype: str) -> None:
    pixels = noisy_retina(edge=320)[1]
    if dtype == "uint16":
        pixels = (pixels.clip(0, 1) * 65535).astype("uint16")
    job = job_of(write_zarr(tmp_path / "a.zarr", pixels), tmp_path / "o.zarr", name, CASES[name], tile={"size": 64})
    tried = only(job).best
    np.testing.assert_array_equal(tried.denoised[0], run_inline(job)[CROP.slices])
    assert not (tmp_path / "o.zarr.run").exists()


@pytest.mark.parametrize("name", all_of(CASES, thorough=["gaussian", "nlm", "function"]))
@pytest.mark.parametrize("value", [-9999.0, thorough(None)])
def test_a_crop_with_holes_has_the_bits_of_a_run(tmp_path: Path, name: str, value: float | None) -> None:
    pixels, holes = scene(np.nan if value is None else value)
    source = (
        write_zarr(tmp_path / "a.zarr", pixels) if value is None else with_tag(tmp_path / "a.tif", pixels, f"{value:g}")
    )
    options = CASES[name]
    job = job_of(source, tmp_path / "o.zarr", name, options, tile={"size": 64})
    found = only(job)
    np.testing.assert_array_equal(found.best.denoised[0], run_inline(job)[CROP.slices])
    assert np.array_equal(np.isnan(found.best.residual[0]), holes[CROP.slices])
    assert np.isfinite(found.best.error)


@pytest.mark.parametrize("model", ["gaussian", thorough("poisson-gaussian")])
def test_a_crop_of_one_plane_has_the_bits_of_a_run(tmp_path: Path, model: str) -> None:
    rng = np.random.default_rng(0)
    counts = np.stack([3.0 * rng.poisson(retina()[::4, ::4, c][30:330, 30:330] / 4.0) + 50 for c in (0, 1)])
    source = write_zarr(tmp_path / "a.zarr", counts.astype("uint16"), axes="cyx")
    job = job_of(source, tmp_path / "o.zarr", "tv", CASES["tv"], noise={"model": model})
    found = only(job, {"c": 1}, Region((60, 70), (130, 160)))
    np.testing.assert_array_equal(found.best.denoised[0], run_inline(job)[1, 60:130, 70:160])
    assert found.score == "PURE"
    assert 0.8 < found.best.statistics.ratio < 1.1


@pytest.mark.parametrize(
    ("axes", "name", "options", "dtype"),
    [
        ("zyx", "tv", {"strength": 1.0, "sigma": "auto", "iterations": 5}, "float32"),
        thorough("zyx", "nlm", {"strength": 0.8, "sigma": "auto", "distance": 2, "patch": 3}, "uint32"),
        thorough(
            "cyx",
            "torch",
            {"import": "tests.networks:convolutions", "options": {"channels": 3}, "channels": [3, 3]},
            "uint8",
        ),
        ("yxc", "tv", {"strength": 1.0, "sigma": "auto"}, "uint8"),
        thorough("qyx", "torch", {"import": "tests.networks:unet"}, ">f4"),
        ("cyx", "gaussian", {"sigma": 1.0}, "float16"),
    ],
)
def test_a_crop_of_a_stack_or_volume_has_the_bits_of_a_run(
    tmp_path: Path, axes: str, name: str, options: dict[str, Any], dtype: str
) -> None:
    planes = np.stack([noisy_retina(edge=96, sigma=s)[1] for s in (0.05, 0.1, 0.2)], axis=axes.index(axes.strip("yx")))
    scale = 200 if np.dtype(dtype).kind == "u" else 1
    np.save(tmp_path / "a.npy", (planes.clip(0, 1) * scale).astype(dtype))
    given = {"axes": axes} if "q" not in axes else {}
    job = job_of(
        tmp_path / "a.npy", tmp_path / "o.zarr", name, options, input=given, tile={"axes": "zyx"} if "z" in axes else {}
    )
    crop = Region((13, 29), (60, 90))
    result = run_inline(job)  # c before y and x, as OME-Zarr has it
    for index in (0, 2):
        plane = {axes.strip("yx"): index}
        np.testing.assert_array_equal(only(job, plane, crop).best.denoised[0], result[index][crop.slices])
    if "c" in axes and dtype == "uint8":
        np.testing.assert_array_equal(only(job, {}, crop).best.denoised, result[:, *crop.slices])


def test_noise_maps_and_masks_are_those_of_the_job(tmp_path: Path) -> None:
    clean, _ = noisy_retina(edge=320)
    sigma = np.linspace(0.02, 0.2, 320, dtype=np.float32)[:, None].repeat(320, 1)
    mask = np.ones(clean.shape, np.uint8)
    mask[60:90, 120:160] = 0
    np.save(tmp_path / "sigma.npy", sigma)
    np.save(tmp_path / "mask.npy", mask)
    noise = np.random.default_rng(1).standard_normal(clean.shape)
    source = write_zarr(tmp_path / "a.zarr", (clean + sigma * noise).astype(np.float32))
    sides = {name: str(tmp_path / f"{name}.npy") for name in ("sigma", "mask")}
    job = job_of(source, tmp_path / "o.zarr", "tv", CASES["tv"], input={"sides": sides})
    found = only(job)
    np.testing.assert_array_equal(found.best.denoised[0], run_inline(job)[CROP.slices])
    assert np.array_equal(np.isnan(found.noisy[0]), mask[CROP.slices] == 0)
    kept = mask[CROP.slices] != 0
    assert found.noise == pytest.approx(sigma[CROP.slices][kept].mean(), rel=1e-6)
    assert 0.85 < found.best.statistics.ratio < 1.05


@pytest.mark.thorough
@pytest.mark.cluster
def test_a_crop_has_the_bits_of_a_run_on_workers(tmp_path: Path, cluster: RunningCluster) -> None:
    job = job_of(
        write_zarr(tmp_path / "a.zarr", noisy_retina(edge=320)[1]),
        tmp_path / "o.zarr",
        "torch",
        {"import": "tests.networks:convolutions"},
        run={"workers": 2},
    )
    run(make_plan(job), cluster=cluster)
    np.testing.assert_array_equal(only(job).best.denoised[0], read_zarr(tmp_path / "o.zarr")[CROP.slices])


def with_strength(job: Denoising) -> Any:
    """Return the job of a setting ``NAME=VALUE`` of its denoiser."""

    def job_with(setting: Setting) -> Denoising:
        options = dict(CASES["tv"] if job.denoiser.name == "tv" else CASES["nlm"])
        options |= {name: float(value) for name, _, value in (part.partition("=") for part in setting)}
        return replace(job, denoiser=DenoiserChoice(name=job.denoiser.name, options=options))

    return job_with


@pytest.mark.parametrize(
    ("name", "score", "model"),
    [
        ("tv", "SURE", "gaussian"),
        thorough("nlm", "SURE", "gaussian"),
        ("tv", "PURE", "poisson-gaussian"),
        thorough("tv", "PURE", "gaussian"),  # the image shows it
    ],
)
def test_the_estimated_error_follows_the_true_one(tmp_path: Path, name: str, score: str, model: str) -> None:
    strengths = (0.3, 1.2, 8.0)
    clean = 255 * noisy_retina(edge=256)[0].astype(np.float64)
    rng = np.random.default_rng(0)
    gain = 2.0
    noise: dict[str, Any] = {}
    noisy: NDArray[Any] = clean + 15 * rng.standard_normal(clean.shape)
    sigma: NDArray[Any] = np.full(clean.shape, 15.0)
    if score == "PURE":
        noisy, sigma = gain * rng.poisson(clean / gain), np.sqrt(gain * np.maximum(clean, gain))
        noise = {"model": model} | ({"gain": gain} if model == "poisson-gaussian" else {})
    source = write_zarr(tmp_path / "a.zarr", noisy.astype(np.float32))
    job = job_of(source, tmp_path / "o.zarr", name, noise=noise, input={"range": (0.0, 255.0)})
    found = compare([(f"strength={s}",) for s in strengths], with_strength(job))
    assert (found.score, len(found.tried)) == (score, len(strengths))
    truth = [float(np.mean(np.square(tried.denoised[0] - clean)) / np.mean(sigma**2)) for tried in found.tried]
    estimates = [tried.error for tried in found.tried]
    np.testing.assert_allclose(estimates, truth, atol=0.05)
    assert truth[int(np.argmin(estimates))] < 1.07 * min(truth)
    kept = [detail.kept for detail in found.tried[-1].detail], [detail.kept for detail in found.tried[0].detail]
    assert 0 < kept[0][1] < kept[1][1] < 1.1


def test_where_nothing_is_asked_for_the_crop_has_structure(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 1500, 1500)).astype(np.float32)
    pixels[1, 900:1400, 900:1400] += camera()[:500, :500] / 10
    pixels[1, 20, 20] = 1e5
    source = write_zarr(tmp_path / "a.zarr", pixels, chunk=256, axes="tyx")
    place = only(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}), region=None).place
    assert place["t"] == (1, 2)
    assert all(b - a == 512 and b > 1000 for a, b in (place["y"], place["x"]))


def test_settings_that_fail_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr", noisy_retina(edge=128)[1])
    job = job_of(source, tmp_path / "o.zarr", "tv")
    found = compare([("strength=1",), ("strength=-1",)], with_strength(job))
    assert [tried.setting for tried in found.tried] == [("strength=1",)]
    assert "strength" in found.failed["strength=-1",]
    doubling = job_of(source, tmp_path / "o.zarr", "torch", {"import": "tests.networks:doubler", "scale": 2})
    with pytest.raises(ConfigError, match="no residual"):
        only(doubling, region=None)


def test_an_image_without_noise_is_refused(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr", np.ones((64, 64), np.float32))
    with pytest.raises(InputError, match="no noise can be estimated"):
        only(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}), region=None)


@pytest.mark.parametrize(
    ("region", "words"),
    [(Region((0, 0), (300, 10)), "the image has 128 rows"), (Region((0, 0), (2000, 10)), "at most 1024")],
)
def test_a_crop_outside_of_the_image_or_too_large_is_refused(tmp_path: Path, region: Region, words: str) -> None:
    source = write_zarr(tmp_path / "a.zarr", noisy_retina(edge=128)[1])
    with pytest.raises(ConfigError, match=words):
        only(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}), region=region)


def test_a_noise_map_may_be_zero_in_places(tmp_path: Path) -> None:
    clean, noisy = noisy_retina(edge=320)
    noise = np.full(noisy.shape, 0.1, np.float32)
    noise[:60] = 0
    np.save(tmp_path / "a.npy", np.where(noise > 0, noisy, clean))
    np.save(tmp_path / "s.npy", noise)
    job = job_of(
        tmp_path / "a.npy",
        tmp_path / "o.zarr",
        "tv",
        {"strength": 1.0},
        input={"sides": {"sigma": str(tmp_path / "s.npy")}},
    )
    tried = only(job).best
    assert 0 < tried.error < 0.5
    assert np.isnan(tried.residual[0, :23]).all()
    run_inline(job)
    assert inspect_residual(work_of(make_plan(job)).task, tmp_path / "o.zarr").figures["residual"][0][
        "ratio"
    ] == pytest.approx(0.9, abs=0.15)
