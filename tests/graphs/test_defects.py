"""Hot, dead and other pixels that the noise does not explain are replaced before anything is computed, when the job asks for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from skimage.data import retina

from halotile.errors import InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.compare import compare
from halotile.graphs.jobs.denoise.job import Denoising, kept_defects
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.kinds.sections import Input
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import run as run_job
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import PAGE
from halotile.tasks.noise import defects
from halotile.tasks.noise.defects import outliers, replacements
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr

Patch = pytest.MonkeyPatch

HOT, DEAD = (100, 64), (131, 140)


def scene(dtype: str = "uint16") -> NDArray[Any]:
    """A real image of photons: a dim one of the camera of a microscope, or a bright one of few grey levels."""
    clean = retina()[300:520, 300:530, 1] / 255
    photons = np.random.default_rng(0).poisson(clean * 60) * 2.2
    image: NDArray[Any] = np.rint(photons + 20 if dtype == "uint8" else photons + 100).astype(dtype)
    return image


def with_defects(pixels: NDArray[Any]) -> NDArray[Any]:
    hot = pixels.copy()
    hot[HOT], hot[DEAD] = 255 if pixels.dtype == np.uint8 else 60000, 0
    return hot


OPTIONS: dict[str, Any] = {"tv": {"strength": 1.0, "sigma": "auto"}, "median": {"size": 3}, "gaussian": {"sigma": 1.0}}
PHOTONS: dict[str, Any] = {"noise": {"model": "poisson-gaussian"}}
AUTO: dict[str, Any] = {"input": {"defects": "auto"}}


def job_on(
    folder: Path, name: str, pixels: NDArray[Any], denoiser: str = "tv", *, axes: str | None = None, **parts: Any
) -> Denoising:
    source = folder / f"{name}.zarr"
    if not source.exists():
        write_zarr(source, pixels, axes=axes)
    output = folder / f"{len([*folder.iterdir()])}.out.zarr"
    return job_of(source, output, denoiser, OPTIONS[denoiser], **parts)


def done(*given: Any, **parts: Any) -> Any:
    return run_inline(job_on(*given, **parts))


def planned(*given: Any, **parts: Any) -> Plan:
    return make_plan(job_on(*given, **parts))


def test_two_hot_pixels_change_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clean = retina()[300:540, 300:524, 1] / 255 * 40
    plain = np.rint(2.2 * rng.poisson(clean) + 100 + 2 * rng.standard_normal(clean.shape)).astype(np.uint16)
    hot, mask = plain.copy(), np.ones(plain.shape, np.uint8)
    hot[200, 100], hot[150, 151] = 60000, 8000
    mask[200, 100] = mask[150, 151] = 0
    np.save(tmp_path / "mask.npy", mask)
    expected, spoilt = (done(tmp_path, name, image, **PHOTONS) for name, image in (("plain", plain), ("hot", hot)))
    found = done(tmp_path, "hot", hot, **PHOTONS, **AUTO)
    masked = done(tmp_path, "hot", hot, **PHOTONS, input={"sides": {"mask": str(tmp_path / "mask.npy")}})
    others = mask == 1
    assert np.abs(spoilt - expected)[others].max() > 80
    assert np.abs(found - masked)[others].max() <= 2.4
    assert np.abs(found - expected).max() <= 2.4
    assert np.array_equal(done(tmp_path, "plain", plain, **PHOTONS, **AUTO), expected)
    for name, parts, advice in (
        ("plain", {}, ""), ("hot", {}, "write input.defects: auto"), ("hot", AUTO, "replaced before anything is computed"),
    ):  # fmt: skip
        notes = [note for note in planned(tmp_path, name, hot, **PHOTONS, **parts).notes if "stand out" in note]
        assert [note.endswith(advice) for note in notes] == [True] * bool(advice)


@pytest.mark.parametrize(("dtype", "denoiser"), [("uint8", "tv"), ("uint16", "median"), ("float32", "tv")])
def test_tiles_give_the_bits_of_the_whole_image(tmp_path: Path, dtype: str, denoiser: str) -> None:
    hot = with_defects(scene(dtype))
    hot[[0, 0, 219, 127, 128], [0, 229, 100, 127, 40]] = 250 if dtype == "uint8" else 9000
    whole = done(tmp_path, "hot", hot, denoiser, shard=256, **AUTO)
    for shard in (32, 96):
        assert np.array_equal(done(tmp_path, "hot", hot, denoiser, shard=shard, tile={"size": 32}, **AUTO), whole)


@pytest.mark.cluster
def test_workers_give_the_same_bits_and_a_run_goes_on_with_its_noise(tmp_path: Path, cluster: RunningCluster) -> None:
    hot = with_defects(scene())
    job = job_on(tmp_path, "hot", hot, "tv", **AUTO)
    outcome = run_job(make_plan(job), cluster=cluster)
    assert outcome.defects == 2
    page = (Path(f"{job.output.path}.run") / PAGE).read_text("utf-8")
    assert '["defects", "2 pixels replaced before anything was computed"]' in page
    assert np.array_equal(read_zarr(Path(job.output.path)), done(tmp_path, "hot", hot, **AUTO))
    first, again = make_plan(job, fresh=True), make_plan(job)
    assert again.identity["defects"] == first.identity["defects"] != None  # noqa: E711
    assert run_job(again, cluster=cluster).resumed > 0


@pytest.mark.parametrize("how", ["auto", "path", "stripes"])
def test_kept_defects_have_their_own_values(tmp_path: Path, how: str) -> None:
    hot, is_defect = with_defects(scene()), np.zeros((220, 230), bool)
    is_defect[HOT] = is_defect[DEAD] = True
    tifffile.imwrite(tmp_path / "defects.tif", is_defect.astype(np.uint8))
    wanted: dict[str, Any] = {"defects": str(tmp_path / "defects.tif") if how == "path" else "auto"}
    if how == "stripes":
        stripes = np.random.default_rng(1).normal(0, 20, 230)
        hot, wanted["stripes"] = with_defects(scene().astype("float32") + stripes.astype("float32")), {"axis": "x"}
    replaced = done(tmp_path, "hot", hot, input=wanted)
    kept = done(tmp_path, "hot", hot, input=wanted | {"defects_in_output": "kept"})
    assert np.array_equal(kept[is_defect], hot[is_defect])
    assert np.array_equal(kept[~is_defect], replaced[~is_defect])
    assert (np.abs(replaced - hot.astype(float))[is_defect] > 50).all()


def test_only_the_defects_of_a_path_are_replaced(tmp_path: Path) -> None:
    pixels, mask = scene(), np.zeros((220, 230), np.uint8)
    mask[50, 60] = 1
    hot = with_defects(pixels)
    hot[50, 60] = 0
    np.save(tmp_path / "defects.npy", mask)
    own = done(tmp_path, "hot", hot, "median", input={"defects": str(tmp_path / "defects.npy")})
    repaired = hot.copy()
    repaired[50, 60] = replacements(hot, np.array([[50, 60]]), np.ones(hot.shape, bool))[0][0]
    assert np.array_equal(own, done(tmp_path, "repaired", repaired, "median"))


def test_a_stack_has_its_own_noise_and_defects_in_each_plane(tmp_path: Path) -> None:
    stack = np.stack([scene(), with_defects(scene()) // 2, scene()])
    stack[2, 9, 9] = 3000
    together = done(tmp_path, "stack", stack, axes="cyx", **AUTO)
    for number, plane in enumerate(stack):
        assert np.array_equal(together[number], done(tmp_path, f"plane{number}", plane, **AUTO))


def test_a_volume_is_repaired_plane_by_plane(tmp_path: Path) -> None:
    volume = np.stack([np.roll(scene()[:96, :96], 7 * z, 0) for z in range(8)])
    volume[3, 40, 50] = 60000
    parts: dict[str, Any] = {"axes": "zyx", "chunk": 16, "tile": {"axes": "zyx", "size": 32}}
    whole, small = (done(tmp_path, "volume", volume, "gaussian", shard=n, **parts, **AUTO) for n in (96, 32))
    assert np.array_equal(whole, small)
    plain = done(tmp_path, "plain", np.delete(volume, 3, 0), "gaussian", axes="zyx", tile={"axes": "zyx"})
    assert whole.max() < 1.1 * plain.max()


@pytest.mark.parametrize("axis", ["t", "q"])  # q: an axis that the file does not name
def test_pixels_that_are_hot_in_no_plane_but_in_all_are_found(tmp_path: Path, axis: str) -> None:
    rng = np.random.default_rng(3)
    stack = (rng.standard_normal((12, 1, 90, 100)) + 100).astype(np.float32)
    stack[:, 0, 20, 30] += 3
    stack[5, 0, 70, 70] += 300  # a cosmic ray is in one plane alone
    plan = planned(tmp_path, "stack", stack, "gaussian", axes=f"{axis}cyx", **AUTO)
    assert plan.identity["defects"]["places"] == [[-1, 0, 20, 30]]
    task = work_of(plan).task
    image: Any = task.repaired()
    repaired = image.read(Region.whole(stack.shape))
    assert (repaired != stack)[:, 0, 20, 30].all()
    assert np.count_nonzero(repaired != stack) == 13


def test_holes_are_neither_defects_nor_neighbours(tmp_path: Path) -> None:
    hot = with_defects(scene("float32"))
    hot[HOT[0] - 1 : HOT[0] + 2, HOT[1] + 1] = np.nan
    hot[HOT[0] - 1, HOT[1] - 1] = -9999
    wanted = {"defects": "auto", "nodata": -9999.0}
    found = done(tmp_path, "holed", hot, input=wanted)
    plan = planned(tmp_path, "holed", hot, input=wanted)
    holes = np.isnan(hot) | (hot == -9999)
    assert np.array_equal(found[holes], hot[holes], equal_nan=True)
    assert 100 < found[HOT] < 250
    assert np.isfinite(found[~holes]).all()
    image: Any = work_of(plan).task.repaired()
    image.read(Region.whole(hot.shape))
    assert image.defects_of(Region.whole(hot.shape))[0].tolist() == [[*HOT], [*DEAD]]


def test_replaced_defects_are_no_residual(tmp_path: Path) -> None:
    hot = scene()
    hot[np.random.default_rng(1).integers(5, 215, 60), np.random.default_rng(2).integers(5, 215, 60)] = 60000
    for kept in ("replaced", "kept"):
        job = job_on(tmp_path, "hot", hot, "median", input={"defects": "auto", "defects_in_output": kept})
        run_inline(job)
        plan = make_plan(replace(job, output=replace(job.output, overwrite=True)), fresh=True)
        (row,) = inspect_residual(work_of(plan).task, plan.output).figures["residual"]
        assert row["ratio"] < 1.3


def test_a_crop_is_that_of_the_run(tmp_path: Path) -> None:
    hot = with_defects(scene())
    job = job_on(tmp_path, "hot", hot, "tv", **AUTO)
    found = compare([("a",)], lambda _: job, region=Region((70, 40), (170, 180)))
    assert found.outliers == 2
    assert np.array_equal(found.tried[0].denoised[0], run_inline(job)[70:170, 40:180])


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    large = np.zeros((220, 230), np.uint8)
    large[10:17, 30:37] = 1
    np.save(tmp_path / "large.npy", large)
    np.save(tmp_path / "other.npy", np.zeros((5, 6)))
    marked = r"input\.defects marks row 12, column 32 and every measured pixel"
    for name, words in (
        ("other", r"input\.defects has shape \(5, 6\)"),
        ("missing", r"missing\.npy"),
        ("large", marked),
    ):
        with pytest.raises(InputError, match=words):
            planned(tmp_path, "in", scene(), "median", input={"defects": str(tmp_path / f"{name}.npy")})


def test_defects_are_not_kept_where_the_image_has_another_shape() -> None:
    for scale in (1, 2):
        given: Any = SimpleNamespace(scale=scale, channels=(1, 1), title="a")
        faults = kept_defects(Input(path="a", defects="auto", defects_in_output="kept"), given)
        assert ["changes the image's shape" in message for _, message in faults] == [True] * (scale - 1)


@pytest.mark.parametrize("photons", [0.5, 2, 13, 20, 500])
@pytest.mark.parametrize(("gain", "offset", "read"), [(1.0, 0.0, 0.0), (2.2, 100.0, 2.0)])
def test_noise_has_no_defects(photons: float, gain: float, offset: float, read: float) -> None:
    rng = np.random.default_rng(5)
    image = gain * rng.poisson(photons, (1024, 1024)) + offset + read * rng.standard_normal((1024, 1024))
    assert len(outliers(np.rint(image).clip(0).astype(np.uint16), gain, read**2 - gain * offset)) == 0


def test_point_sources_survive() -> None:
    rng, (rows, columns) = np.random.default_rng(0), np.mgrid[-8:8, -8:8]
    image = rng.standard_normal((1024, 1024))
    for at in np.ndindex(64, 64):
        width, height = rng.uniform(0.8, 2.5), rng.uniform(5, 200)
        row, column = rng.uniform(-0.5, 0.5, 2)
        spot = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * width**2))
        image[16 * at[0] : 16 * at[0] + 16, 16 * at[1] : 16 * at[1] + 16] += height * spot
    assert len(outliers(image, 0.0, 1.0)) == 0


@pytest.mark.parametrize(("gain", "variance"), [(0.0, 1.0), (1.0, 0.0)])
def test_no_outlier_is_overlooked(monkeypatch: Patch, gain: float, variance: float) -> None:
    rng = np.random.default_rng(2)
    image = (rng.poisson(30, (120, 130)) if gain else 5 * rng.standard_t(2, (120, 130))).astype(np.float32)
    image[rng.random(image.shape) < 0.05] = 200
    valid = rng.random(image.shape) > 0.1
    at = np.argwhere(valid)
    expected = at[defects._is_outlier(defects._around(image, at, valid), gain, variance)]
    assert len(expected) > 20
    for strip in (130, 1 << 18):
        monkeypatch.setattr(defects, "STRIP_PIXELS", strip)
        assert np.array_equal(outliers(image, gain, variance, valid), expected)
