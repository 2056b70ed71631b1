"""A run ends with the figures of its residual, and a warning where it holds structure of the image."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import tifffile
import zarr
from numpy.typing import NDArray
from skimage.data import camera, retina

from halotile.cli.screens.outcome_rows import outcome_json, outcome_rows
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.watching.progress import Progress
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from tests.cases import thorough
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr

MonkeyPatch = pytest.MonkeyPatch

TOO_MUCH: dict[str, dict[str, Any]] = {
    "tv": {"strength": 6.0, "sigma": "auto"},
    "nlm": {"strength": 6.0, "sigma": "auto"},
    "gaussian": {"sigma": 6.0},
    "median": {"size": 13},
}
SENSIBLE: dict[str, dict[str, Any]] = {
    "tv": {"strength": 0.8, "sigma": "auto"},
    "nlm": {"strength": 0.6, "sigma": "auto", "distance": 3},
    "gaussian": {"sigma": 0.5},
}


def noisy(name: str, sigma: float) -> NDArray[Any]:
    clean = retina()[300:812, 300:812, 1] / 255.0 if name == "retina" else getattr(skimage.data, name)() / 255.0
    return np.asarray(clean + sigma * np.random.default_rng(0).standard_normal(clean.shape), np.float32)


def inspected(job: Denoising) -> Inspection:
    """The inspection of a job that was done in this process."""
    run_inline(job)
    plan = make_plan(job)
    return work_of(plan).inspect()  # type: ignore[no-any-return]


def residuals(inspection: Inspection) -> list[dict[str, Any]]:
    return list(inspection.figures["residual"])


@pytest.mark.parametrize("image", ["camera", thorough("coins"), thorough("retina")])
def test_too_much_is_warned_of_and_sensible_settings_are_not(tmp_path: Path, image: str) -> None:
    for sigma, settings in ((0.02, TOO_MUCH), (0.1, SENSIBLE)):
        source = write_zarr(tmp_path / f"{sigma}.zarr", noisy(image, sigma))
        for denoiser, options in settings.items():
            inspection = inspected(job_of(source, tmp_path / f"{denoiser}-{sigma}.zarr", denoiser, options))
            (entry,) = residuals(inspection)
            assert entry["holds_structure"] is (settings is TOO_MUCH)
            if settings is TOO_MUCH:
                words = "the residual, which is what was removed, holds structure of the image: "
                assert inspection.warnings[0].startswith(words)
            else:
                assert inspection.warnings == []
                assert 0.25 < entry["ratio"] < 1.15


@pytest.mark.parametrize(("axis", "words"), [("y", "down the columns (y)"), ("x", "along the rows (x)")])
def test_stripes_that_were_taken_away_are_structure_along_their_axis(tmp_path: Path, axis: str, words: str) -> None:
    """Stripes of 17 under noise of 20: the other axis has no correlation, and the mean of both is small."""
    rng = np.random.default_rng(0)
    noise, stripes = 20 * rng.standard_normal((512, 512)), 17 * rng.standard_normal(512)
    band = camera()[:512, :512] + noise + (stripes if axis == "y" else stripes[:, None])
    source = write_zarr(tmp_path / "a.zarr", band.astype(np.float32))
    inspection = inspected(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    (entry,) = residuals(inspection)
    assert entry["holds_structure"]
    assert entry["correlation"] == max(entry["correlations"].values()) == entry["correlations"][axis] > 0.15
    assert min(entry["correlations"].values()) < 0.05
    assert dict(inspection.rows)["residual"].endswith(f"{entry['correlation']:.2f} {words}")
    assert f"The correlation of neighbours is {entry['correlation']:.2f} {words}. " in inspection.warnings[0]


def test_the_faint_detail_is_measured_where_it_takes_little_beside_the_run(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr", np.stack([noisy("camera", 0.1)] * 2), axes="tyx")
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"})
    run_inline(job)
    work = work_of(make_plan(job))
    found = work.inspect(seconds=3600.0, pixel_seconds=1e-6)
    detail = found.figures["faint_detail"]
    assert [each["height"] for each in detail] == [1, 2, 5]
    assert 0.1 < detail[0]["kept"] < detail[2]["kept"] < 1
    assert detail[2]["detected"] > 0.9
    text = dict(found.rows)["faint detail"]
    assert text.startswith(f"{100 * detail[0]['kept']:.0f}, ")
    assert " % of the height kept at 1, 2, 5 noise levels; " in text
    assert text.endswith(" % detected; in t=0")
    for seconds, pixel_seconds in ((3600.0, 1e-4), (2.0, 1e-6), (0.0, float("inf"))):
        assert "faint_detail" not in work.inspect(seconds, pixel_seconds).figures


def test_every_channel_is_looked_at_and_named(tmp_path: Path) -> None:
    noise = 0.02 * np.random.default_rng(0).standard_normal((3, 12, 128, 128))
    noise[:, 4] += camera()[128:256, 128:256] / 255.0
    names = [f"stain {n}" for n in range(12)]
    words: Any = {"axes": "TCYX", "Channel": {"Name": names}}
    tifffile.imwrite(tmp_path / "a.ome.tif", noise.astype(np.float32), ome=True, metadata=words)
    inspection = inspected(job_of(tmp_path / "a.ome.tif", tmp_path / "o.zarr", "gaussian", {"sigma": 4.0}))
    assert [entry["plane"] for entry in residuals(inspection) if entry["holds_structure"]] == ["t=1, c=4"]
    assert {entry["plane"][-3:].lstrip() for entry in residuals(inspection)} >= {f"c={n}" for n in range(10)}
    assert "of the image in t=1, stain 4: the denoising was too strong" in inspection.warnings[0]
    assert inspection.rows[0][1].endswith("; looked at 12 of 36 planes, t=0, stain 0 to t=2, stain 11")


def test_photons_holes_and_masks_are_those_of_the_job(tmp_path: Path) -> None:
    clean = retina()[300:812, 300:812, 1].astype(float)
    counts = 4.0 * np.random.default_rng(0).poisson(clean / 4) + 100
    counts[50:200, 100:300] = 1e6
    np.save(tmp_path / "mask.npy", np.arange(512)[:, None].repeat(512, 1) < 400)
    source = write_zarr(tmp_path / "a.zarr", counts.astype(np.float32))
    job = job_of(
        source,
        tmp_path / "o.zarr",
        "tv",
        {"strength": 1.0, "sigma": "auto"},
        noise={"model": "poisson-gaussian", "gain": 4.0, "offset": 100.0},
        input={"nodata": 1e6, "range": (0.0, 1e3), "sides": {"mask": str(tmp_path / "mask.npy")}},
    )
    inspection = inspected(job)
    assert inspection.warnings == []
    assert 0.85 < residuals(inspection)[0]["ratio"] < 1.05


@pytest.mark.parametrize(
    ("pixels", "denoiser", "options"),
    [
        (noisy("coins", 0.1), "none", {}),
        (noisy("coins", 0.1)[:128, :128], "torch", {"import": "tests.networks:doubler", "scale": 2}),
        (np.ones((64, 64), np.float32), "gaussian", {"sigma": 1.0}),
        (np.full((64, 64), np.nan, np.float32), "gaussian", {"sigma": 1.0}),
        (np.arange(9, dtype=np.float32)[None], "gaussian", {"sigma": 1.0}),
        (np.eye(64, dtype=bool), "gaussian", {"sigma": 1.0}),
    ],
    ids=["none", "larger", "constant", "nothing", "one row", "a mask"],
)
def test_nothing_is_found_in_nothing(
    tmp_path: Path, pixels: NDArray[Any], denoiser: str, options: dict[str, Any]
) -> None:
    source = write_zarr(tmp_path / "a.zarr", pixels)
    assert inspected(job_of(source, tmp_path / "o.zarr", denoiser, options)) == Inspection()


@pytest.mark.parametrize("together", [False, True])
def test_another_brightness_of_a_channel_is_warned_of(tmp_path: Path, together: bool) -> None:
    image = np.stack([noisy("retina", 0.1), noisy("camera", 0.1)])
    image[:, :2, :100] = 1e4  # hot pixels move the mean
    source = write_zarr(tmp_path / "a.zarr", image, axes="cyx")
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 0.5})
    assert not inspected(job).warnings
    task = work_of(make_plan(job)).task
    if together:
        task = replace(task, roles=replace(task.roles, channel=0))
    result = zarr.open_array(tmp_path / "o.zarr" / "0")
    result[1] = result[1] - np.float32(0.15)
    found = inspect_residual(task, tmp_path / "o.zarr")
    assert [entry["plane"] for entry in residuals(found) if abs(entry["shift"]) > 0.5] == ["c=1"]
    (warning,) = found.warnings
    assert warning.startswith("the result is darker than the image in c=1, by 1.")


@pytest.mark.parametrize(
    ("name", "factor"),
    [("tv", 1e-100), ("nlm", 1e100), ("gaussian", 1e-100), ("median", 1e100), ("tv of photons", 1e100)],
)
def test_the_unit_of_the_image_changes_no_figure(tmp_path: Path, name: str, factor: float) -> None:
    """Not even where its squares are beyond single precision, or a double's."""
    counts = np.random.default_rng(0).poisson(np.tile(np.repeat([10, 60, 110, 160], 64), (128, 1)))
    photons: Any = {"noise": {"model": "poisson-gaussian"}} if "photons" in name else {}
    name = name.split()[0]
    options = SENSIBLE.get(name, {"size": 3})

    def figures_in(unit: float) -> tuple[NDArray[Any], tuple[float, ...]]:
        source = write_zarr(tmp_path / f"{unit}.zarr", counts * unit)
        input_of = {"input": {"range": (0.0, 200.0 * unit)}} if photons else {}
        job = job_of(source, tmp_path / f"{unit}.out.zarr", name, options, **photons, **input_of)
        pixels, work = run_inline(job) / unit, work_of(make_plan(job))
        work.task.stages().check()
        (found,) = residuals(work.inspect())
        return pixels, (found["ratio"], found["correlation"], found["shift"])

    (pixels, found), (expected, usual) = figures_in(factor), figures_in(1.0)
    np.testing.assert_allclose(pixels, expected, rtol=1e-9)
    assert found == pytest.approx(usual, rel=1e-6, abs=1e-9)


@dataclass
class Counting:
    """An image that counts the pixels that are read of it."""

    shape: tuple[int, ...]
    pixels: list[int] = field(default_factory=list)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("float32")

    def read(self, region: Region) -> Pixels:
        self.pixels.append(region.size)
        return np.random.default_rng(region.start[-1]).standard_normal(region.shape).astype(self.dtype)


@pytest.mark.parametrize("shape", [(70000, 70000), (1000, 3000, 3000), (2, 70000, 70000)])
def test_a_large_image_is_read_at_few_places(tmp_path: Path, shape: tuple[int, ...], monkeypatch: MonkeyPatch) -> None:
    small = write_zarr(tmp_path / "a.zarr", np.zeros((4,) * len(shape), np.float32), axes="tyx"[-len(shape) :])
    task = work_of(make_plan(job_of(small, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}))).task
    source, result = Counting(shape), Counting(shape)
    monkeypatch.setattr("halotile.graphs.jobs.denoise.passes.open_array", lambda _: result)
    inspect_residual(replace(task, source=source), tmp_path / "o.zarr")
    assert source.pixels == result.pixels == [256 * 256] * 16


@pytest.mark.cluster
def test_a_run_ends_with_its_figures_whatever_becomes_of_the_image(
    tmp_path: Path, cluster: RunningCluster, monkeypatch: MonkeyPatch
) -> None:
    lines: list[str] = []

    def watch(progress: Progress) -> None:
        lines.extend(progress.message.splitlines())

    source = write_zarr(tmp_path / "a.zarr", noisy("coins", 0.02))
    job = job_of(source, tmp_path / "o.zarr", "tv", TOO_MUCH["tv"], run={"workers": 2})
    outcome = run(make_plan(job), cluster=cluster, observer=watch)
    assert [line for line in lines if line.startswith("warning: the residual")]
    assert outcome_json(outcome, 0.0, 0.0)["residual"][0]["holds_structure"] is True
    (entry,) = outcome.inspection.figures["residual"]
    assert f"correlation of neighbours {entry['correlation']:.2f} " in dict(outcome_rows(outcome, 0.0, 0.0))["residual"]
    monkeypatch.setattr(type(work_of(make_plan(job))), "inspect", lambda *_: (tmp_path / "gone").stat())
    assert run(make_plan(job), cluster=cluster).inspection == Inspection()


@pytest.mark.cluster
@pytest.mark.parametrize("nodata", ["none", "nan"])
def test_nan_that_spreads_is_said_before_and_after(tmp_path: Path, cluster: RunningCluster, nodata: str) -> None:
    pixels = np.random.default_rng(0).normal(100, 10, (256, 256)).astype(np.float32)
    pixels[[60, 64, 200], [60, 63, 0]] = np.nan, np.inf, np.nan
    source = write_zarr(tmp_path / "in.zarr", pixels)
    options: dict[str, Any] = {"shard": 64, "input": {"nodata": nodata}}
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}, **options))
    lines: list[str] = []
    outcome = run(plan, cluster=cluster, observer=lambda progress: lines.append(progress.message))
    notes = [note for note in plan.notes if "taken for measurements" in note]
    written = int((~np.isfinite(read_zarr(tmp_path / "out.zarr"))).sum())
    if nodata == "nan":
        assert (written, notes, list(outcome.inspection.warnings)) == (3, [], [])
        return
    assert notes[0].startswith("pixels of NaN or infinity (3 of 65,536) are taken for measurements")
    (warning,) = outcome.inspection.warnings
    said = f"the blocks of this run have {written} pixels of NaN or infinity where their input has 3,"
    assert written > 3
    assert warning.startswith(said)
    assert all("write nodata: nan" in text for text in (warning, notes[0]))
    assert f"warning: {warning}" in "\n".join(lines)
