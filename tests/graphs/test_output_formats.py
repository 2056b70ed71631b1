"""Outputs as OME-Zarr: levels that are resumed, verified and repaired, axes in the order that it wants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from halotile.errors import BlockFailed, ConfigError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise import pixels as pixel_choices
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.storage.arrays import open_source
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded import layout
from tests.faults import BLOCK, BLOCKS, Scene, flip_bit
from tests.support import job_of, noisy_image, read_zarr, run_inline, write_zarr

OME = {"output": {"format": "ome-zarr"}}


@pytest.fixture
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGEST_TOP", 40)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)


@pytest.mark.cluster
@pytest.mark.usefixtures("small_images_have_levels")
def test_levels_are_resumed_verified_and_repaired(scene: Scene, cluster: RunningCluster) -> None:
    cause = scene.make_trouble("raise", 19)
    with pytest.raises(BlockFailed):
        scene.run(cluster, parts=OME, retries=0)
    cause.unlink()
    assert scene.run(cluster, parts=OME).resumed == BLOCKS - 1
    written = scene.files()
    assert {name.split("/")[0] for name in written} == {"zarr.json", "0", "1", "2", "3"}
    scene.run(cluster, parts=OME, fresh=True)
    assert scene.files() == written
    shards = sorted((scene.output / "3" / "c").glob("*/*"))
    flip_bit(shards[5], 0)
    verdict = verify(scene.output)
    assert [problem.split(":")[0] for problem in verdict.problems] == ["block 5"]
    assert verify(scene.output, job=scene.job(parts=OME), repair=True).sound
    assert scene.files() == written


@pytest.mark.cluster
def test_a_georeferenced_run_goes_on_and_is_repaired(tmp_path: Path, cluster: RunningCluster) -> None:
    rasterio = pytest.importorskip("rasterio")
    source = tmp_path / "map.tif"
    place = {"crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 54e5)}
    with rasterio.open(source, "w", height=300, width=260, count=1, dtype="uint16", **place) as file:
        file.write(noisy_image((300, 260), "uint16"), 1)
    job = job_of(source, tmp_path / "out.zarr", "median", {"size": 3})
    plan = make_plan(job)
    run(plan, cluster=cluster)
    assert run(make_plan(job), cluster=cluster).resumed == plan.blocks
    flip_bit(next((tmp_path / "out.zarr/0/c").glob("*/*")), 0)
    assert verify(tmp_path / "out.zarr", job=job, repair=True).sound


@pytest.mark.usefixtures("small_images_have_levels")
def test_levels_are_as_many_as_the_job_asks_for(scene: Scene) -> None:
    for wanted, count in ((1, 1), (2, 2), ("auto", 4)):
        plan = make_plan(scene.job(parts={"output": {"format": "ome-zarr", "levels": wanted}}))
        assert len(plan.summary()["levels"]) == count
        assert plan.layout.block == ((BLOCK, BLOCK) if wanted != 1 else ())
    with pytest.raises(ConfigError, match=r"output\.levels: 0 is too small; write at least 1"):
        make_plan(scene.job(parts={"output": {"levels": 0}}))


def test_colours_come_first_as_ome_zarr_wants(tmp_path: Path) -> None:
    pixels = noisy_image((90, 70, 3), "uint8")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    mask = write_zarr(tmp_path / "mask.zarr", (pixels > pixels.mean()).astype("uint8"))
    parts = {"input": {"sides": {"mask": str(mask)}}}
    first = run_inline(job_of(source, tmp_path / "ome.zarr", "median", {"size": 3}, **parts))
    bare = job_of(source, tmp_path / "bare.zarr", "median", {"size": 3}, **parts)
    last = run_inline(replace(bare, output=replace(bare.output, format="zarr")))
    assert first.shape == (3, 90, 70)
    np.testing.assert_array_equal(first, last.transpose(2, 0, 1))
    assert open_source(str(tmp_path / "ome.zarr")).axes == ("c", "y", "x")
    kept = read_zarr(mask) == 0
    np.testing.assert_array_equal(last[kept], pixels[kept])


def test_axes_that_ome_zarr_does_not_permit_give_a_bare_array_and_a_note(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((2, 3, 2, 40, 40)), axes="pqtyx")
    job = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0})
    plan = make_plan(job)
    assert plan.summary()["format"] == "zarr"
    assert any(note.startswith("OME-Zarr has no room for the axes pqtyx") for note in plan.notes)
    with pytest.raises(ConfigError, match=r"OME-Zarr 0\.5 requires t, then c"):
        make_plan(replace(job, output=replace(job.output, format="ome-zarr")))


@pytest.mark.parametrize("dtype", [*("bool", "uint8", "int32", "uint32", "float16", "float32", "float64", ">u2")])
def test_without_a_denoiser_pixels_are_stored_as_they_are(tmp_path: Path, dtype: str) -> None:
    pixels = noisy_image((130, 71), dtype)
    if dtype == "int32":
        pixels[0, :2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    if pixels.dtype.kind == "f":
        pixels[5, 5:9] = np.nan, np.inf, -np.inf, np.finfo(dtype).max
    source = write_zarr(tmp_path / "in.zarr", pixels)
    np.testing.assert_array_equal(run_inline(job_of(source, tmp_path / "out.zarr", "none")), pixels)


def test_a_run_that_goes_on_keeps_the_contrast_of_its_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that could not be read when it began may be readable by now."""
    words = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP"]}}
    tifffile.imwrite(tmp_path / "in.tif", noisy_image((2, 90, 80), "uint16"), ome=True, metadata=words)
    job = job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "gaussian", {"sigma": 1.0})
    first = make_plan(job)
    run = RunDirectory(first.run_directory)
    run.create()
    run.write_plan(kept_of(first))
    monkeypatch.setattr(pixel_choices, "TAILS", (10, 90))
    again = make_plan(job)
    assert again.resumes
    assert again.layout == first.layout
    assert make_plan(job, fresh=True).layout != first.layout
