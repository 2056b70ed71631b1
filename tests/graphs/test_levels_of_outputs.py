"""Outputs of runs to which levels are added: what a run knows of them stays right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zarr

from halotile.errors import InputError, OutputInUse
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import add_levels
from halotile.storage.run_directory.directory import RunDirectory
from tests.faults import flip_bit
from tests.support import job_of, noisy_image, read_zarr, write_zarr

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: Patch) -> None:
    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 30)


def job_in(folder: Path, levels: int) -> Denoising:
    """An image of 4 x 3 blocks, stored with so many levels."""
    source = write_zarr(folder / "noisy.zarr", noisy_image((250, 180)))
    job = job_of(source, folder / "clean.zarr", "none", shard=64, chunk=32, tile={"block": 64})
    return replace(job, output=replace(job.output, levels=levels))


@pytest.mark.parametrize("levels", [1, 2])
def test_a_finished_run_stays_sound_and_finished(tmp_path: Path, cluster: RunningCluster, levels: int) -> None:
    job, output = job_in(tmp_path, levels), tmp_path / "clean.zarr"
    run(make_plan(job), cluster=cluster)
    count, shapes = add_levels(output)
    assert (count, len(shapes)) == (5, 6 - levels)
    kept = [open_source(output, level=level)[...].tobytes() for level in range(count)]
    verdict = verify(output)
    assert verdict.problems == ()
    assert not verdict.undone
    assert verdict.repairable
    again = run(make_plan(job), cluster=cluster)
    assert again.resumed == again.total
    flip_bit(output / "0" / "c" / "1" / "1")
    assert len(verify(output).problems) == 1
    assert verify(output, job=job, repair=True).sound
    assert [open_source(output, level=level)[...].tobytes() for level in range(count)] == kept
    (output.parent / "clean.zarr.run").rename(tmp_path / "elsewhere")
    assert verify(output).problems == ()
    assert not verify(output).repairable


def test_an_output_that_is_not_finished_is_refused(tmp_path: Path, cluster: RunningCluster) -> None:
    job, output = job_in(tmp_path, 1), tmp_path / "clean.zarr"

    def cut_off(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_plan(job), observer=cut_off, cluster=cluster)
    with pytest.raises(
        InputError, match=r"has 12 of 12 blocks left to do\. `recon-cli resume .*clean\.zarr` finishes it"
    ):
        add_levels(output)
    run(make_plan(job), cluster=cluster)
    with RunDirectory.beside(output).lock(), pytest.raises(OutputInUse, match="is writing this output"):
        add_levels(output)
    assert sorted(zarr.open_group(output, mode="r").array_keys()) == ["0"]
    assert add_levels(output)[0] == 5
    assert read_zarr(output).shape == (250, 180)
