"""Masked pixels count nowhere: not in noise levels, not in photon noise, not in contrast; other pixels are as beside holes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.data import camera

from halotile.graphs.jobs.denoise.compare import choose_crop, samples_at
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.tasks.noise.estimate import plane_level
from tests.support import job_of, run_inline, work_of, write_zarr

MASKED = np.zeros((256, 320), bool)
MASKED[:, :150] = MASKED[30:50, 200:260] = True


def scene(photons: bool) -> NDArray[np.float32]:
    """A real image with noise."""
    clean, rng = camera()[100:356, 100:420].astype(np.float32), np.random.default_rng(0)
    clean = 4 * rng.poisson(clean / 12 + 1) if photons else clean + 10 * rng.standard_normal(clean.shape)
    return np.asarray(clean, np.float32)


def job_with(folder: Path, value: float, *, photons: bool, tile: int = 128) -> Denoising:
    """A job of the scene with these pixels under its mask, or with holes there for NaN."""
    pixels = np.where(MASKED, np.float32(value), scene(photons))
    if np.isfinite(value):  # noise of its own
        pixels[MASKED] += 50 * np.random.default_rng(1).standard_normal(MASKED.sum()).astype(np.float32)
    source = write_zarr(folder / f"{value:g}.{tile}.zarr", pixels)
    mask = write_zarr(folder / f"mask{value:g}.{tile}.zarr", (~MASKED).astype(np.uint8))
    noise = {"model": "poisson-gaussian"} if photons else {}
    sides = {"sides": {"mask": str(mask)}} if np.isfinite(value) else {}
    output = folder / f"{value:g}.{tile}.out.zarr"
    return job_of(
        source, output, "tv", {"strength": 1.0, "sigma": "auto"}, tile={"size": tile}, input=sides, noise=noise
    )


@pytest.mark.parametrize("photons", [False, True])
def test_other_pixels_have_the_bits_that_they_have_beside_holes(tmp_path: Path, photons: bool) -> None:
    expected = run_inline(job_with(tmp_path, np.nan, photons=photons))
    for value in (0.0, 5000.0):
        job = job_with(tmp_path, value, photons=photons)
        result = run_inline(job)
        assert np.array_equal(result[~MASKED], expected[~MASKED])
        assert np.array_equal(result[MASKED], open_source(str(tmp_path / f"{value:g}.128.zarr"))[...][MASKED])
    assert np.array_equal(run_inline(job_with(tmp_path, 5000.0, photons=photons, tile=48)), result)


def test_the_plan_counts_them_and_shows_the_contrast_of_the_others(tmp_path: Path) -> None:
    plan = make_plan(job_with(tmp_path, 1e6, photons=False))
    assert f"masked pixels ({MASKED.sum():,} of {MASKED.size:,}) stay as they are" in "\n".join(plan.notes)
    omero = work_of(plan).task.writer.layout.omero
    assert omero is not None
    (channel,) = omero["channels"]
    assert channel["window"]["end"] < 400


def test_settings_are_compared_by_the_noise_of_other_pixels(tmp_path: Path) -> None:
    levels = []
    for value in (np.nan, 5000.0):
        plan = make_plan(job_with(tmp_path, value, photons=False))
        task = work_of(plan).task
        place = choose_crop(plan.sources[0], task, {}, None)
        (squares,) = samples_at(plan.sources[0], task, place)
        levels.append(plane_level(squares))
    assert levels[0] == levels[1] == pytest.approx(10, rel=0.15)
