"""Planes of one image that differ in their noise come out as each does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.data import retina

from halotile.graphs.jobs.denoise.image import JobImage, choose_noise_level
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.inner_tiles import Roles
from tests.cases import thorough
from tests.support import job_of, run_inline, work_of, write_zarr

NOISE = (0.02, 0.2)
AUTO: dict[str, dict[str, Any]] = {
    "tv": {"strength": 1.0, "sigma": "auto"},
    "nlm": {"strength": 0.8, "sigma": "auto"},
    "torch": {"import": "tests.networks:by_sigma", "sigma": "auto"},
}


def scene() -> NDArray[np.float32]:
    plane = retina()[300:700, 300:660, 1].astype(np.float32) / 255
    noise = np.random.default_rng(0).standard_normal((2, *plane.shape)).astype(np.float32)
    planes: NDArray[np.float32] = plane + noise * np.array(NOISE, np.float32)[:, None, None]
    return planes


@pytest.mark.parametrize("name", AUTO)
@pytest.mark.parametrize("axes", ["cyx", thorough("yxc")])
def test_each_plane_has_the_bits_that_it_has_alone(tmp_path: Path, name: str, axes: str) -> None:
    planes = scene()

    def denoised(image: NDArray[np.float32], axes: str, label: str) -> NDArray[Any]:
        source = write_zarr(tmp_path / f"{label}.zarr", image, axes=axes)
        return run_inline(job_of(source, tmp_path / f"{label}.out.zarr", name, AUTO[name], tile={"size": 128}))

    together = denoised(np.moveaxis(planes, 0, axes.index("c")), axes, "all")
    assert together.shape == planes.shape  # planes come first, whatever their axis is
    for number, plane in enumerate(planes):
        assert np.array_equal(together[number], denoised(plane, "yx", str(number)))


def test_the_plan_has_a_level_for_each_plane_or_the_map_of_the_job(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", scene(), axes="cyx")
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "tv", AUTO["tv"]))
    assert plan.identity["noise_level"] == pytest.approx(NOISE, rel=0.15)
    assert any(note.startswith("noise level 0.0") and "of c 0 to 1" in note for note in plan.notes)
    assert plan.documents.resolved["denoiser"]["sigma"] == "auto"
    assert work_of(plan).task.sides["sigma"].shape == (2, 1, 1)
    np.save(tmp_path / "sigma.npy", np.full((400, 360), 0.1, np.float32))
    sides = {"sides": {"sigma": str(tmp_path / "sigma.npy")}}
    plan = make_plan(job_of(source, tmp_path / "other.zarr", "tv", AUTO["tv"], input=sides))
    assert plan.identity["noise_level"] is None
    assert not any("estimated" in note for note in plan.notes)
    assert work_of(plan).task.sides["sigma"].shape == (400, 360)


def test_levels_of_an_earlier_run_with_another_number_of_planes_are_not_taken(tmp_path: Path) -> None:
    planes = scene()
    source = write_zarr(tmp_path / "in.zarr", planes, axes="cyx")
    job, roles = job_of(source, tmp_path / "out.zarr", "tv", AUTO["tv"]), Roles(("c", "y", "x"), (1, 2), None)
    denoiser = TotalVariation(strength=1.0, sigma="auto")
    before: dict[str, Any] = {"identity": {"noise_level": [0.5, 0.6]}}
    opened = open_source(source)
    image = JobImage(job=job, original=opened, source=opened, roles=roles, previous=before)
    _, kept = choose_noise_level(image, denoiser, None, {})
    assert kept == pytest.approx([0.5, 0.6])
    for known in (0.5, [0.5, 0.6, 0.7]):
        before = {"identity": {"noise_level": known}}
        _, levels = choose_noise_level(replace(image, previous=before), denoiser, None, {})
        assert levels == pytest.approx(NOISE, rel=0.15)
