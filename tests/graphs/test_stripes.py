"""Stripes are measured, reported and removed; and a run ends with the figures of its residual, with a warning where it holds structure of the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import skimage.data
import tifffile
import zarr
from numpy.typing import NDArray
from skimage.data import retina

from halotile.cli.screens.outcome_rows import outcome_json, outcome_rows
from halotile.errors import ConfigError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.compare import compare
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.jobs.denoise.stripes import PHASE
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.grid import Region
from halotile.tasks.noise.stripes import LineCorrections, StripedLines, agreement, line_offsets, means_along
from halotile.tasks.operators.base import InMemory
from tests.cases import all_of, in_folders, thorough
from tests.faults import REPOSITORY
from tests.graphs.sampling import killed
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr

Image = NDArray[Any]
WITHOUT_STRIPES = ("brick", "grass", "gravel", "text", "shepp_logan_phantom", "checkerboard", "cell", "colorwheel")


def natural(name: str) -> Image:
    """An image of 0 to 255."""
    image = np.asarray(getattr(skimage.data, name)(), float)
    grey: Image = image[..., :3].mean(-1) if image.ndim == 3 else image
    return grey * 255 if grey.max() <= 1 else grey


def noisy(clean: Image, offsets: Image | float = 0.0, sigma: float = 20.0, seed: int = 0) -> Image:
    noise = np.random.default_rng(seed).normal(0, sigma, clean.shape)
    return clean + noise + offsets


def drawn(count: int, rms: float = 17.0, seed: int = 1) -> Image:
    """Independent offsets of mean 0."""
    offsets: Image = np.random.default_rng(seed).normal(0, rms, count)
    offsets -= offsets.mean()
    return offsets


def corrections(image: Image, lines: StripedLines) -> Image:
    readable = LineCorrections(InMemory(image), lines)
    return np.asarray(readable.read(Region.whole(readable.shape)), float)


@pytest.mark.parametrize(("name", "most"), [("moon", 2), ("retina", 2), ("camera", 17 / 5), thorough("cell", 17 / 5)])
def test_stripes_of_17_go_and_the_own_columns_of_an_image_stay(name: str, most: float) -> None:
    clean = natural(name)
    offsets = drawn(clean.shape[1])
    assert (corrections(noisy(clean, offsets), StripedLines(1, 0))[0] - offsets).std() <= most
    assert np.sqrt(np.mean(corrections(noisy(clean), StripedLines(1, 0)) ** 2)) <= 1


@pytest.mark.parametrize("name", all_of(WITHOUT_STRIPES, thorough=WITHOUT_STRIPES[3:]))
@pytest.mark.parametrize("sigma", [5, 20])
def test_nothing_is_seen_in_images_without_stripes_and_stripes_are_seen_in_all(name: str, sigma: float) -> None:
    clean = natural(name)
    for image in (clean, clean.T):
        plain, striped = (
            means_along(InMemory(noisy(image, off, sigma)), StripedLines(1, 0), Region.whole(image.shape), 128)
            for off in (0.0, drawn(image.shape[1]))
        )
        assert agreement(plain) < 0.25
        assert agreement(striped) > 0.5
        assert line_offsets(striped).std() == pytest.approx(drawn(image.shape[1]).std(), rel=0.2)


def test_a_dead_line_stays_and_drags_no_other_along_and_a_strong_stripe_goes() -> None:
    clean = natural("moon")
    for offsets in (np.zeros(clean.shape[1]), drawn(clean.shape[1])):
        image = noisy(clean, offsets)
        before = corrections(image, StripedLines(1, 0))[0]
        image[:, [100, 101, 150]] = 0
        image[:, 60] += 400
        found = corrections(image, StripedLines(1, 0))[0]
        assert np.abs(found[[100, 101, 150]]).max() < 1
        assert abs(found[60] - before[60] - 400) < 10
        others = np.delete(found - before, [60, 100, 101, 150])
        assert np.abs(others).max() < 3


def test_the_stripes_of_two_taps_have_their_own_size() -> None:
    image = noisy(natural("moon"), np.tile([12.0, -12.0], 256))
    means = means_along(InMemory(image), StripedLines(1, 0), Region.whole(image.shape), 128)
    assert line_offsets(means).std() == pytest.approx(12, rel=0.05)


def test_gains_are_removed_with_offsets() -> None:
    clean = natural("retina")
    rng = np.random.default_rng(3)
    gains = rng.normal(0, 0.08, clean.shape[1])
    image = noisy(clean * (1 + gains), drawn(clean.shape[1], 5), 5)
    errors = []
    for gain in (False, True):
        first, *rest = corrections(image, StripedLines(1, 0, gain))
        corrected = image - first - (rest[0] * image if rest else 0)
        error = corrected - noisy(clean, 0.0, 5)
        errors.append(np.std(error - error.mean()))
    assert errors[1] < 0.6 * errors[0]
    assert errors[1] < 3


@pytest.mark.parametrize("axis", [0, 1])
def test_bands_have_the_bits_of_the_whole(axis: int) -> None:
    image = noisy(np.zeros((300, 5000) if axis else (5000, 300)))
    lines = StripedLines(axis, 1 - axis, gain=True)
    whole = LineCorrections(InMemory(image), lines)
    everything = whole.read(Region.whole(whole.shape))
    for start, stop in ((0, 10), (1000, 1030), (1024, 3000), (4990, 5000)):
        part = Region((0, start), (2, stop)) if axis else Region((start, 0), (stop, 2))
        np.testing.assert_array_equal(LineCorrections(InMemory(image), lines).read(part), everything[part.slices])


def test_groups_of_lines_have_no_seam() -> None:
    offsets = drawn(3000)
    off = corrections(noisy(np.zeros((512, 3000)), offsets), StripedLines(1, 0))[0] - offsets
    steps = np.abs(np.diff(off))
    assert steps[[1023, 2047]].max() < np.quantile(steps, 0.99)


def stack(dtype: str = "float32", axis: str = "x", holes: bool = False) -> tuple[Image, Image]:
    """A stack whose planes have different stripes, and the same without any."""
    clean = np.stack([natural("moon")[100 + 20 * z : 356 + 20 * z, 100:420] for z in range(3)])
    offsets = np.stack([drawn(320 if axis == "x" else 256, seed=z) for z in range(3)])
    off = offsets[:, None] if axis == "x" else offsets[:, :, None]
    noise = np.random.default_rng(5).normal(0, 10, clean.shape)
    scale = 200 if dtype == "uint16" else 1
    striped, plain = scale * (clean + noise + off), scale * (clean + noise)
    if holes:
        at = np.random.default_rng(6).random(clean.shape) < 0.01
        at[:, 50:90, 100:140] = True
        striped = np.where(at, np.nan, striped)
    if np.dtype(dtype).kind == "u":
        striped = np.clip(np.rint(striped), 0, np.iinfo(dtype).max)
    return striped.astype(dtype), plain


def striped_job(
    folder: Path, pixels: Image, name: str = "out.zarr", denoiser: str = "gaussian", axes: Any = "zyx", **parts: Any
) -> Denoising:
    """A job with these stripes, those of x where nothing is written."""
    if not (source := folder / "in.zarr").exists():
        write_zarr(source, pixels, axes=axes)
    given = {"stripes": parts.pop("stripes", {"axis": "x"}), **parts.pop("input", {})}
    options = {"sigma": 1.0} if denoiser == "gaussian" else {"strength": 1.0, "sigma": "auto"}
    tile = {"axes": "yx", **parts.pop("tile", {})}
    return job_of(source, folder / name, denoiser, options, input=given, tile=tile, **parts)


@pytest.mark.parametrize(("dtype", "axis"), [("uint8", "x"), ("uint16", "y"), ("float32", "x")])
def test_a_run_removes_the_stripes_of_each_plane(tmp_path: Path, dtype: str, axis: str) -> None:
    pixels, plain = stack(dtype, axis)
    scale = 200 if dtype == "uint16" else 1
    errors = []
    for wanted in ("none", {"axis": axis}):
        result = run_inline(striped_job(tmp_path, pixels, f"{wanted != 'none'}.zarr", stripes=wanted))
        assert result.dtype == dtype
        inside = plain[:, 8:-8, 8:-8] / scale
        lines = (result[:, 8:-8, 8:-8] / scale - inside).mean(1 if axis == "x" else 2)
        errors.append(float((np.diff(lines, axis=1)).std()))
    assert errors[1] < errors[0] / 3


def test_holes_stay_and_do_not_count(tmp_path: Path) -> None:
    pixels, _ = stack(holes=True)
    holes = np.isnan(pixels)
    result = run_inline(striped_job(tmp_path, pixels))
    np.testing.assert_array_equal(np.isnan(result), holes)
    np.save(tmp_path / "mask.npy", ~holes)
    others: list[tuple[float, dict[str, Any]]] = [(-9999, {"nodata": -9999})]
    others += [(1e4, {"sides": {"mask": str(tmp_path / "mask.npy")}})]
    for value, given in others:
        (tmp_path / str(value)).mkdir()
        filled = np.where(holes, np.float32(value), pixels)
        same = run_inline(striped_job(tmp_path / str(value), filled, input=given))
        assert (same[holes] == value).all()
        np.testing.assert_array_equal(np.where(holes, np.nan, same), result)


@pytest.mark.cluster
def test_tiles_and_workers_do_not_change_a_bit(tmp_path: Path, cluster: RunningCluster) -> None:
    pixels, _ = stack()
    gains: dict[str, Any] = {"stripes": {"axis": "x", "gain": True}}
    wanted = run_inline(striped_job(tmp_path, pixels, "whole.zarr", **gains))
    outcome = run(make_plan(striped_job(tmp_path, pixels, "40.zarr", tile={"size": 40}, **gains)), cluster=cluster)
    assert outcome.inspection.rows[0][1].endswith("rms along x, removed")
    np.testing.assert_array_equal(read_zarr(tmp_path / "40.zarr"), wanted)


KILLED = """
import sys
from pathlib import Path
from tests.graphs.test_stripes import long_job, make_plan, run
if __name__ == "__main__":
    run(make_plan(long_job(Path(sys.argv[1]), "killed.zarr")))
"""


def long_job(folder: Path, name: str) -> Denoising:
    """A stack whose lines are measured in several blocks."""
    return striped_job(folder, noisy(np.zeros((40, 256, 128)), drawn(128)).astype("f4"), name, run={"workers": 1})


@pytest.mark.cluster
def test_a_killed_run_goes_on_with_the_lines_that_it_has_measured(tmp_path: Path, cluster: RunningCluster) -> None:
    wanted = run_inline(long_job(tmp_path, "whole.zarr"))
    given: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(REPOSITORY)}, "stderr": subprocess.PIPE}
    start = partial(subprocess.Popen, [sys.executable, "-c", KILLED, str(tmp_path)], text=True, **given)
    shards = tmp_path / "killed.zarr.run" / "state" / PHASE / "lines.zarr" / "c"
    journal = shards.parents[1] / f"journal.{PHASE}"
    killed(start, lambda: journal.exists() and len(journal.read_bytes().splitlines()) > 1)

    def written() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in shards.rglob("*") if path.is_file()}

    before = written()
    run(make_plan(long_job(tmp_path, "killed.zarr")), cluster=cluster)
    assert len(after := written()) == 5
    assert before & after
    np.testing.assert_array_equal(read_zarr(tmp_path / "killed.zarr"), wanted)


def test_a_crop_that_is_tried_has_the_bits_of_a_run(tmp_path: Path) -> None:
    pixels, _ = stack()
    crop = Region((37, 101), (150, 230))
    job = striped_job(tmp_path, pixels)
    tried = compare([()], lambda _: job, at={"z": 1}, region=crop).best
    np.testing.assert_array_equal(tried.denoised[0], run_inline(job)[1][crop.slices])


FOUND = [("x", "none", "kept"), ("x", "auto", "removed"), ("y", "auto", "removed"), ("x", {"axis": "x"}, "removed")]


@pytest.mark.parametrize(("axis", "wanted", "text"), FOUND)
def test_a_plan_names_stripes_and_what_to_write(tmp_path: Path, axis: str, wanted: Any, text: str) -> None:
    off = drawn(512)
    image = noisy(natural("moon"), off if axis == "x" else off[:, None]).clip(0, 255).astype("uint8")
    plan = make_plan(striped_job(tmp_path, image, denoiser="tv", axes=None, stripes=wanted))
    rms, _, _, along, end = plan.summary()["stripes"].split()
    assert float(rms) == pytest.approx(off.std(), rel=0.1)
    assert (along.removesuffix(","), end) == (axis, text)
    notes = [note for note in plan.notes if f"input.stripes: {{axis: {axis}}}" in note]
    assert bool(notes) == (text == "kept")
    assert plan.identity["range"] == [0, 255]
    assert plan.layout.dtype == plan.summary()["dtype"] == "uint8"
    assert plan.identity["noise_level"] * 255 == pytest.approx(20, rel=0.1)


GAINS = [("none", 0.08, 1), ("auto", 0.08, 1), ({"axis": "x", "gain": True}, 0.08, 0), ("none", 0.02, 0)]


@pytest.mark.parametrize(("wanted", "spread", "count"), GAINS)
def test_lines_that_differ_by_factors_are_named(tmp_path: Path, wanted: Any, spread: float, count: int) -> None:
    image = noisy(natural("camera") * np.random.default_rng(3).normal(1, spread, 512), sigma=10).astype("float32")
    plan = make_plan(striped_job(tmp_path, image, axes=None, stripes=wanted))
    notes = [note for note in plan.notes if "input.stripes: {axis: x" in note]
    assert sum("gain: true" in note for note in notes) == count
    assert len(notes) == (wanted != {"axis": "x", "gain": True})


def test_auto_takes_nothing_from_an_image_without_stripes_and_sees_those_of_one_channel_of_four(tmp_path: Path) -> None:
    names = enumerate(("camera", "moon", "cell", "retina"))
    bands = np.stack([noisy(natural(name)[:500, :500], seed=seed) for seed, name in names])
    for folder in ("plain", "striped"):
        (tmp_path / folder).mkdir()
    plan = make_plan(striped_job(tmp_path / "plain", bands[1].astype("f4"), axes=None, stripes="auto"))
    assert (plan.summary()["stripes"], plan.identity["stripes"], len(plan.work.passes)) == ("", None, 1)
    bands[2] += drawn(bands.shape[2])[None]
    wanted: Any = {"axes": "cyx", "stripes": "auto"}
    plan = make_plan(striped_job(tmp_path / "striped", bands.astype("f4"), **wanted))
    assert "along x, removed" in plan.summary()["stripes"]
    kept = make_plan(striped_job(tmp_path / "striped", bands, "kept.zarr", "tv", stripes="none"))
    (note,) = [note for note in kept.notes if "input.stripes" in note]
    assert note.startswith("columns of c=2 are off by ")


@pytest.mark.parametrize("shape", [(31, 100), (100, 31)])
def test_few_or_short_lines_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    job = striped_job(tmp_path, noisy(np.zeros(shape)).astype("float32"), axes=None)
    with pytest.raises(ConfigError, match=r"input\.stripes\.axis is x, and the image has .* Leave input\.stripes out"):
        make_plan(job)


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


def natural_noisy(name: str, sigma: float) -> Image:
    clean = retina()[300:812, 300:812, 1] if name == "retina" else natural(name)
    return noisy(clean / 255, sigma=sigma).astype(np.float32)


def inspected(job: Denoising) -> Inspection:
    """The inspection of a job that was done in this process."""
    run_inline(job)
    return work_of(make_plan(job)).inspect()  # type: ignore[no-any-return]


def residuals(inspection: Inspection) -> list[dict[str, Any]]:
    return list(inspection.figures["residual"])


@pytest.mark.parametrize("image", ["camera", thorough("coins"), thorough("retina")])
def test_too_much_is_warned_of_and_sensible_settings_are_not(tmp_path: Path, image: str) -> None:
    for sigma, settings in ((0.02, TOO_MUCH), (0.1, SENSIBLE)):
        source = write_zarr(tmp_path / f"{sigma}.zarr", natural_noisy(image, sigma))
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
    stripes = drawn(512)
    band = noisy(natural("camera"), stripes if axis == "y" else stripes[:, None])
    source = write_zarr(tmp_path / "a.zarr", band.astype(np.float32))
    inspection = inspected(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    (entry,) = residuals(inspection)
    assert entry["holds_structure"]
    assert entry["correlation"] == max(entry["correlations"].values()) == entry["correlations"][axis] > 0.15
    assert min(entry["correlations"].values()) < 0.05
    assert dict(inspection.rows)["residual"].endswith(f"{entry['correlation']:.2f} {words}")
    assert f"The correlation of neighbours is {entry['correlation']:.2f} {words}. " in inspection.warnings[0]
    assert ("Columns are off by" if axis == "y" else "Rows are off by") in inspection.warnings[0]
    assert f"write input.stripes: {{axis: {'x' if axis == 'y' else 'y'}}}" in inspection.warnings[0]


def test_the_faint_detail_is_measured_where_it_takes_little_beside_the_run(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr", np.stack([natural_noisy("camera", 0.1)] * 2), axes="tyx")
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
    noise[:, 4] += natural("camera")[128:256, 128:256] / 255
    words: Any = {"axes": "TCYX", "Channel": {"Name": [f"stain {n}" for n in range(12)]}}
    tifffile.imwrite(tmp_path / "a.ome.tif", noise.astype(np.float32), ome=True, metadata=words)
    inspection = inspected(job_of(tmp_path / "a.ome.tif", tmp_path / "o.zarr", "gaussian", {"sigma": 4.0}))
    assert [entry["plane"] for entry in residuals(inspection) if entry["holds_structure"]] == ["t=1, c=4"]
    assert {entry["plane"][-3:].lstrip() for entry in residuals(inspection)} >= {f"c={n}" for n in range(10)}
    assert "of the image in t=1, stain 4: the denoising was too strong" in inspection.warnings[0]
    assert inspection.rows[0][1].endswith("; looked at 12 of 36 planes, t=0, stain 0 to t=2, stain 11")


def test_values_that_the_type_clipped_are_no_fault_of_the_denoiser(tmp_path: Path) -> None:
    noise = 3 * np.random.default_rng(0).standard_normal((256, 256))
    np.save(tmp_path / "a.npy", (natural("camera")[128:384, 128:384] - 100 + noise).astype(np.float32))
    for name, options in (("none", {}), ("gaussian", {"sigma": 1.0})):
        job = job_of(tmp_path / "a.npy", tmp_path / f"{name}.zarr", name, options)
        (warning,) = inspected(replace(job, output=replace(job.output, dtype="uint8"))).warnings
        assert re.fullmatch(
            r"about \d\d % of the pixels .* range of uint8, 0 to 255, .* output\.dtype: float32", warning
        )


def test_photons_holes_and_masks_are_those_of_the_job(tmp_path: Path) -> None:
    counts = 4.0 * np.random.default_rng(0).poisson(retina()[300:812, 300:812, 1] / 4) + 100
    counts[50:200, 100:300] = 1e6
    np.save(tmp_path / "mask.npy", np.arange(512)[:, None].repeat(512, 1) < 400)
    source = write_zarr(tmp_path / "a.zarr", counts.astype(np.float32))
    noise = {"model": "poisson-gaussian", "gain": 4.0, "offset": 100.0}
    section = {"nodata": 1e6, "range": (0.0, 1e3), "sides": {"mask": str(tmp_path / "mask.npy")}}
    options = {"strength": 1.0, "sigma": "auto"}
    inspection = inspected(job_of(source, tmp_path / "o.zarr", "tv", options, noise=noise, input=section))
    assert inspection.warnings == []
    assert 0.85 < residuals(inspection)[0]["ratio"] < 1.05


def test_nothing_is_found_in_nothing(tmp_path: Path) -> None:
    constant, nothing, row = np.ones((64, 64), "f4"), np.full((64, 64), np.nan, "f4"), np.arange(9, dtype="f4")[None]
    cases: list[tuple[Image, str, dict[str, Any]]] = [
        (natural_noisy("coins", 0.1), "none", {}),
        (natural_noisy("coins", 0.1)[:128, :128], "torch", {"import": "tests.networks:doubler", "scale": 2}),
        *((pixels, "gaussian", {"sigma": 1.0}) for pixels in (constant, nothing, row, np.eye(64, dtype=bool))),
    ]
    for folder, (pixels, denoiser, options) in in_folders(tmp_path, cases):
        source = write_zarr(folder / "a.zarr", pixels)
        assert inspected(job_of(source, folder / "o.zarr", denoiser, options)) == Inspection()


@pytest.mark.parametrize("together", [False, True])
def test_another_brightness_of_a_channel_is_warned_of(tmp_path: Path, together: bool) -> None:
    image = np.stack([natural_noisy("retina", 0.1), natural_noisy("camera", 0.1)])
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


UNITS = [("tv", 1e-100), ("nlm", 1e100), ("gaussian", 1e-100), ("median", 1e100), ("tv of photons", 1e100)]


@pytest.mark.parametrize(("name", "factor"), UNITS)
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


@pytest.mark.parametrize("shape", [(70000, 70000), (1000, 3000, 3000), (2, 70000, 70000)])
def test_a_large_image_is_read_at_few_places(tmp_path: Path, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_zarr(tmp_path / "a.zarr", np.zeros((4,) * len(shape), np.float32), axes="tyx"[-len(shape) :])
    task = work_of(make_plan(job_of(small, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}))).task
    read: dict[str, list[int]] = {"source": [], "result": []}

    def counting(name: str) -> Any:
        def noise_of(region: Region) -> Image:
            read[name].append(region.size)
            return np.random.default_rng(region.start[-1]).standard_normal(region.shape).astype(np.float32)

        return SimpleNamespace(shape=shape, dtype=np.dtype("float32"), read=noise_of)

    monkeypatch.setattr("halotile.graphs.jobs.denoise.passes.open_array", lambda _: counting("result"))
    inspect_residual(replace(task, source=counting("source")), tmp_path / "o.zarr")
    assert read["source"] == read["result"] == [256 * 256] * 16


@pytest.mark.cluster
def test_a_run_ends_with_its_figures_whatever_becomes_of_the_image(
    tmp_path: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    source = write_zarr(tmp_path / "a.zarr", natural_noisy("coins", 0.02))
    job = job_of(source, tmp_path / "o.zarr", "tv", TOO_MUCH["tv"], run={"workers": 2})
    outcome = run(make_plan(job), cluster=cluster, observer=lambda progress: lines.append(progress.message))
    assert "\nwarning: the residual" in "\n".join(["", *lines])
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
    assert written > 3
    assert f"the blocks of this run have {written} pixels of NaN or infinity where their input has 3," in warning
    assert all("write nodata: nan" in text for text in (warning, notes[0]))
    assert f"warning: {warning}" in "\n".join(lines)
