"""Planes that differ in their noise come out as each does alone; images of few whole numbers as float32, others in their own type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from skimage.data import camera, retina

from halotile.graphs.jobs.denoise.image import JobImage, choose_noise_level
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.pixels import ResultType, choose_type
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


Image = NDArray[Any]
TV = ("tv", {"strength": 1.0, "sigma": "auto"})


def counts(peak: float) -> Image:
    """Photons on a part of the retina."""
    green = retina()[400:800, 100:500, 1].astype(np.float64)
    photons: Image = green / green.max() * peak
    return photons


def counted(peak: float) -> Image:
    pixels: Image = np.random.default_rng(0).poisson(counts(peak)).astype(np.uint16)
    return pixels


def photograph(sigma: float = 5.0) -> Image:
    noisy = camera() + sigma * np.random.default_rng(0).standard_normal(camera().shape)
    pixels: Image = noisy.round().clip(0, 255).astype(np.uint8)
    return pixels


def labels() -> Image:
    numbers: Image = np.add.outer(np.arange(200) // 40, np.arange(200) // 50).astype(np.uint16)
    return numbers


def job(folder: Path, pixels: Image, denoiser: tuple[str, dict[str, Any]] = TV, **parts: Any) -> Denoising:
    return job_of(write_zarr(folder / "in.zarr", pixels), folder / "out.zarr", *denoiser, **parts)


def on_rounding(job: Denoising) -> list[str]:
    return [note for note in make_plan(job).notes if "rounding to whole numbers" in note]


@pytest.mark.parametrize("model", ["gaussian", "poisson-gaussian"])
@pytest.mark.parametrize("peak", [5, 100])
def test_counts_lose_nothing_by_default(tmp_path: Path, peak: int, model: str) -> None:
    wanted = job(tmp_path, counted(peak), noise={"model": model})
    (note,) = on_rounding(wanted)
    assert note.endswith("so the result is float32. output.dtype: uint16 rounds it all the same")
    result = run_inline(wanted)
    assert result.dtype == np.float32
    error, rounded = (np.mean((r - counts(peak)) ** 2) for r in (result, result.round()))
    assert 10 * np.log10(rounded / error) > {5: 2.0, 100: 0.1}[peak]


def test_few_levels_of_one_channel_and_little_noise_in_a_wide_type_are_not_rounded(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 3000, 300) + 1.2 * np.random.default_rng(0).standard_normal((300, 300))
    channels = np.stack([60 * counted(400), counted(5) + np.uint16(100)])
    for number, pixels in enumerate((channels, ramp.round().astype(np.uint16))):
        (tmp_path / str(number)).mkdir()
        assert len(on_rounding(job(tmp_path / str(number), pixels))) == 1


def test_whole_numbers_that_are_asked_for_are_noted(tmp_path: Path) -> None:
    wanted = job(tmp_path, counted(20))
    wanted = replace(wanted, output=replace(wanted.output, dtype="uint16"))
    (note,) = on_rounding(wanted)
    assert note.endswith("output.dtype: float32 keeps them")
    assert run_inline(wanted).dtype == np.uint16


@pytest.mark.parametrize(
    ("pixels", "denoiser"),
    [
        (photograph(), TV),
        (photograph(1.0), TV),
        (60 * counted(400), TV),
        (labels(), ("gaussian", {"sigma": 1.0})),
        (counted(5), ("none", {})),
        (counted(5), ("median", {"size": 3})),
        (counted(5)[:1], ("gaussian", {"sigma": 1.0})),
        (counted(5) + np.uint32(2**30), TV),
    ],
)
def test_others_keep_their_type(tmp_path: Path, pixels: Image, denoiser: tuple[str, dict[str, Any]]) -> None:
    assert make_plan(job(tmp_path, pixels, denoiser)).summary()["output_dtype"] == str(pixels.dtype)


@pytest.mark.parametrize(("photometric", "dtype"), [("rgb", "uint16"), ("minisblack", "float32")])
def test_a_photograph_stays_one(tmp_path: Path, photometric: str, dtype: str) -> None:
    pixels = np.stack([counted(20)] * 3, -1)
    tifffile.imwrite(tmp_path / "in.tif", pixels, photometric=photometric, planarconfig="contig")
    plan = make_plan(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", *TV))
    assert plan.summary()["output_dtype"] == dtype


@pytest.mark.parametrize("before", ["uint16", "float32"])
def test_a_resumed_run_keeps_its_type(tmp_path: Path, before: str) -> None:
    wanted, roles = job(tmp_path, counted(5)), Roles(("y", "x"), (0, 1), None)
    source = open_source(wanted.input.path)
    previous = {"identity": {"layout": {"dtype": before}}}
    image = JobImage(job=wanted, original=source, source=source, roles=roles, previous=previous)
    assert choose_type(image, TotalVariation(strength=1.0), None) == ResultType(before)


@pytest.mark.parametrize("value", [0, 65535])
def test_integers_with_holes_keep_their_type(tmp_path: Path, value: int) -> None:
    pixels = np.where(np.arange(400) % 50 == 0, value, 1000 + 60 * counted(400)).astype(np.uint16)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    for denoiser in (TV, ("none", {}), ("median", {"size": 3})):
        wanted = job_of(source, tmp_path / "out.zarr", *denoiser, input={"nodata": value})
        assert make_plan(wanted).summary()["output_dtype"] == "uint16"


@pytest.mark.parametrize("place", [0, 7])
def test_a_plane_of_few_values_is_found_among_others(tmp_path: Path, place: int) -> None:
    planes = np.stack([(3000 + 90 * np.random.default_rng(1).standard_normal((400, 400))).astype(np.uint16)] * 8)
    planes[place] = counted(5)
    wanted = job_of(write_zarr(tmp_path / "in.zarr", planes, axes="cyx"), tmp_path / "out.zarr", *TV)
    assert make_plan(wanted).summary()["output_dtype"] == "float32"
    assert any(f"grows with brightness in c={place}, as" in note for note in make_plan(wanted).notes)


@pytest.mark.parametrize("together", [False, True])
def test_a_channel_of_few_values_is_found_also_where_all_are_taken_together(tmp_path: Path, together: bool) -> None:
    rng = np.random.default_rng(0)
    bright, dark = 3000 + 90 * rng.standard_normal((256, 256)), 65 + rng.standard_normal((256, 256))
    source = open_source(write_zarr(tmp_path / "in.zarr", np.stack([bright, dark]).astype(np.uint16), axes="cyx"))
    wanted, roles = job_of(source.path, tmp_path / "out.zarr", *TV), Roles(("c", "y", "x"), (1, 2), None)
    image = JobImage(job=wanted, original=source, source=source, roles=replace(roles, channel=0 if together else None))
    assert choose_type(image, TotalVariation(strength=1.0), None).dtype == "float32"
