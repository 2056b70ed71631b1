"""A trial of a real GPU, whose findings hold in the run that follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster as Choice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.trials.gpu_trial import PRECISIONS, TrialRequest, tune
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr

pytestmark = pytest.mark.gpu


def job(folder: Path, device: str) -> Denoising:
    """A network on an image of nine blocks."""
    source = write_zarr(folder / "in.zarr", noisy_image((3000, 3000), "uint16"), chunk=512)
    weights = dncnn_weights(folder / "w.safetensors", 7, 32)
    options = {"weights": str(weights), "depth": 7, "width": 32}
    given = job_of(
        source,
        folder / "out.zarr",
        "dncnn",
        options,
        shard=1024,
        chunk=256,
        tile={"block": 1024},
        run={"device": device, "workers": 1},
    )
    return replace(given, cluster=Choice(kind="local"))


@pytest.mark.thorough
def test_a_trial_reports_speed_memory_and_errors(gpu_device: Gpu, tmp_path: Path) -> None:
    task = work_of(make_plan(job(tmp_path, "cpu"))).task
    found = tune(task, TrialRequest(tiles=((512, 512), (256, 256)), batch=2, compare=True), gpu_device)
    assert found.device == gpu_device.title
    assert [each.name for each in found.precisions] == list(PRECISIONS)
    errors = {each.name: each.error for each in found.precisions}
    assert errors["float32"] is not None
    assert errors["float32"] <= 1e-5, "TF32 is off"
    if gpu_device.kind == "cuda":
        assert all(each.batch_bytes > 2 * 512 * 512 * 32 for each in found.tried if each.tile == (512, 512))
        assert found.free_bytes is not None
        assert 0 < found.device_bytes < found.free_bytes
        assert None not in errors.values()


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_run_holds_what_was_planned_of_the_gpu(gpu: str, cluster: RunningCluster, tmp_path: Path) -> None:
    plan = make_plan(job(tmp_path, gpu))
    outcome = run(plan, cluster=cluster)
    assert outcome.done == outcome.total
    assert outcome.compute_seconds > 0
    if gpu == "cuda":
        assert work_of(plan).tuned is not None
        assert 0.5 < outcome.device_peak_bytes / work_of(plan).tuned.device_bytes < 1.1
