"""Whole jobs on a GPU: the pixels of the CPU, the same bits however they are run, within the planned memory, by a driver that never initialises CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common.machine import gpus_here, has_dask_cuda
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Cluster as Choice
from halotile.graphs.kinds.sections import DenoiserChoice, Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.trials.gpu_trial import PRECISIONS, TrialRequest, tune
from tests.cases import thorough
from tests.faults import REPOSITORY, members, run_python, until
from tests.graphs.solving import kernel
from tests.support import Image, dncnn_weights, job_of, noisy_image, read_zarr, work_of, write_zarr

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]


DENOISERS: Mapping[str, Mapping[str, Any]] = {
    "gaussian": {"sigma": 1.5},
    "tv": {"strength": 0.2},
    "dncnn": {"weights": "WEIGHTS", "depth": 5, "width": 8},
    "torch": {"import": "tests.networks:unet"},
}


def job(folder: Path, output: str, name: str, device: str, **parts: Any) -> Denoising:
    """A job of several blocks, on workers of this machine."""
    source, weights = folder / "in.zarr", folder / "weights.safetensors"
    if not source.exists():
        write_zarr(source, noisy_image((700, 610)))
        dncnn_weights(weights)
    options = {key: str(weights) if value == "WEIGHTS" else value for key, value in DENOISERS[name].items()}
    made = job_of(source, folder / output, name, options, tile=TILE, run={"device": device} | parts)
    return replace(made, cluster=Choice(kind="local"))


TILE: dict[str, Any] = {"block": 256, "size": 128, "batch": 4, "channels_last": False}


"""A GPU that is tried may choose another tile and batch each time, and so other last bits."""


def reporting(folder: Path, output: str, device: str, kind: str = "local", **parts: Any) -> Denoising:
    """A job whose network reports where it runs."""
    options: dict[str, Any] = {"folder": str(folder)}
    options = {"import": "tests.gpu.models:build", "options": options, "receptive_field": 3, "alignment": 1}
    made = job_of(folder / "in.zarr", folder / output, "torch", options, run={"device": device, "workers": 1}, **parts)
    return replace(made, cluster=Choice(kind=kind, gpus=(0,) if kind == "local-cuda" else 0))


def denoised(wanted: Denoising | Reconstruction, cluster: RunningCluster) -> Image:
    """What it writes."""
    outcome = run(make_plan(wanted), cluster=cluster)
    assert outcome.done == outcome.total > 1
    return read_zarr(Path(wanted.output.path))


@pytest.mark.thorough
def test_every_denoiser_agrees_with_the_cpu(gpu: str, cluster: RunningCluster, tmp_path: Path) -> None:
    apart = {}
    for name in DENOISERS:
        want = denoised(job(tmp_path, f"{name}-cpu.zarr", name, "cpu"), cluster)
        got = denoised(job(tmp_path, f"{name}-gpu.zarr", name, gpu), cluster)
        assert np.abs(want).max() > 0
        apart[name] = float(np.abs(got - want).max() / np.abs(want).max())
    assert max(apart.values()) <= 1e-5, apart


@pytest.mark.parametrize("name", ["gaussian", thorough("dncnn")])
def test_one_worker_and_two_on_a_gpu_write_the_same_bits_each_time(
    gpu: str, cluster: RunningCluster, name: str, tmp_path: Path
) -> None:
    first = denoised(job(tmp_path, "first.zarr", name, gpu), cluster)
    again = denoised(job(tmp_path, "again.zarr", name, gpu), cluster)
    with local.start(Order(workers=1, memory_bytes=4 * 2**30)) as alone:
        single = denoised(job(tmp_path, "single.zarr", name, gpu, workers=1), alone)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(single, first)
    plans = [RunDirectory(tmp_path / f"{run}.zarr.run").read_valid_plan() for run in ("first", "again", "single")]
    bits = [plan["bits"] for plan in plans if plan]
    assert bits == bits[:1] * 3
    assert bool(bits[0]) == (gpu != "cpu")


@pytest.mark.thorough
def test_a_job_that_is_killed_goes_on_and_writes_the_same_bits(
    gpu: str, cluster: RunningCluster, tmp_path: Path
) -> None:
    write_zarr(tmp_path / "in.zarr", noisy_image((512, 512)))
    pace, config = tmp_path / "pace", tmp_path / "job.yaml"

    def wanted(output: str) -> Denoising:
        # The planner would rehearse the network, each of its tiles at the same pace.
        tile = {"block": 64, "size": 64, "batch": 1, "channels_last": False, "seams": "allow"}
        return reporting(tmp_path, output, gpu, shard=64, tile=tile)

    pace.write_text("0")
    undisturbed = denoised(wanted("undisturbed.zarr"), cluster)
    plan = make_plan(wanted("out.zarr"))
    parts = {key: value for key, value in plan.documents.asked.items() if key not in ("allow_import", "import_folder")}
    config.write_text(json.dumps(parts))
    journal = RunDirectory(plan.run_directory).journal_path

    def done() -> int:
        return len(Journal.open_any(journal).done) if journal.exists() else 0

    pace.write_text("0.1")
    driver = subprocess.Popen(
        [sys.executable, "-m", "halotile", "run", str(config), "--allow-import"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: driver.poll() is not None or done() >= 6, seconds=120)
        assert driver.poll() is None
    finally:
        for process in members(driver.pid):
            os.kill(process, signal.SIGKILL)
        driver.wait()
    finished = done()
    assert 6 <= finished < len(plan.grid)
    pace.write_text("0")
    assert run(make_plan(wanted("out.zarr")), cluster=cluster).resumed == finished
    np.testing.assert_array_equal(read_zarr(tmp_path / "out.zarr"), undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["local", "local-cuda"])
def test_a_run_computes_on_the_gpu_and_its_driver_does_not(gpu: str, kind: str, tmp_path: Path) -> None:
    if kind == "local-cuda":
        if gpu == "cpu":
            pytest.skip("a rehearsal on the CPU: local-cuda has no GPU to give to a worker")
        if not has_dask_cuda():
            pytest.skip("dask-cuda is not installed")
    (tmp_path / "pace").write_text("0")
    pixels = noisy_image((300, 260))
    write_zarr(tmp_path / "in.zarr", pixels)
    report = driven(tmp_path, kind, gpu)
    assert report["done"] == report["total"] > 1
    assert not report["initialised_cuda"]
    seen = {path.name: path.read_text() for path in tmp_path.glob("worker-*")}  # trials use the CPU as well
    assert seen
    for each in seen.values():
        device, _, visible = each.partition(" ")
        assert device == gpu
        if kind == "local-cuda":
            assert visible.split(",")[0] == gpus_here().names[0]
    result = read_zarr(tmp_path / "out.zarr")
    assert np.isfinite(result).all()
    assert not np.array_equal(result, pixels)


def driven(folder: Path, kind: str, device: str) -> dict[str, Any]:
    """Run the driver in a separate process and return its report."""
    program = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from halotile.graphs.plans.plan import make_plan\n"
        "from halotile.graphs.runs.driver import run\n"
        "from tests.gpu.test_jobs import reporting\n"
        "folder, kind, device = sys.argv[1:]\n"
        "outcome = run(make_plan(reporting(Path(folder), 'out.zarr', device, kind, tile={'block': 128})))\n"
        "report = {'done': outcome.done, 'total': outcome.total}\n"
        "print(json.dumps(report | {'initialised_cuda': torch.cuda.is_initialized()}))\n"
    )
    done = run_python("-c", program, str(folder), kind, device, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def tried(folder: Path, device: str) -> Denoising:
    """A network on an image of nine blocks."""
    source = write_zarr(folder / "in.zarr", noisy_image((3000, 3000), "uint16"), chunk=512)
    options = {"weights": str(dncnn_weights(folder / "w.safetensors", 7, 32)), "depth": 7, "width": 32}
    sizes: dict[str, Any] = {"shard": 1024, "chunk": 256, "tile": {"block": 1024}}
    given = job_of(source, folder / "out.zarr", "dncnn", options, run={"device": device, "workers": 1}, **sizes)
    return replace(given, cluster=Choice(kind="local"))


@pytest.mark.thorough
def test_a_trial_reports_speed_memory_and_errors(gpu_device: Gpu, tmp_path: Path) -> None:
    task = work_of(make_plan(tried(tmp_path, "cpu"))).task
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


def deblurring(folder: Path, output: str, device: str, tile: Tile) -> Reconstruction:
    """A deblurring with a network, of nine blocks."""
    data, weights = folder / "y.zarr", folder / "w.safetensors"
    if not data.exists():
        write_zarr(data, noisy_image((700, 610), "float32"), chunk=128)
        dncnn_weights(weights, 5, 8)
    network = DenoiserChoice(name="dncnn", options={"weights": str(weights), "depth": 5, "width": 8})
    return Reconstruction(
        output=Output(path=str(folder / output), shard=256, chunk=128),
        operators=(OperatorChoice(name="blur", data=str(data), options={"kernel": kernel(5)}),),
        prior=PriorChoice(name="pnp", options={"denoiser": network}),
        solver=SolverChoice(name="pgd", step=0.5, iterations=3),
        tile=tile,
        run=Run(device=device, workers=2),  # type: ignore[arg-type]
        cluster=Choice(kind="local"),
    )


@pytest.mark.thorough
def test_a_reconstruction_agrees_with_the_cpu_and_with_itself(
    gpu: str, cluster: RunningCluster, tmp_path: Path
) -> None:
    tile = Tile(**TILE)
    want = denoised(deblurring(tmp_path, "cpu.zarr", "cpu", tile), cluster)
    got, again = (denoised(deblurring(tmp_path, f"{name}.zarr", gpu, tile), cluster) for name in ("gpu", "again"))
    assert np.abs(want).max() > 0
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize(
    "made", [thorough(tried), lambda folder, gpu: deblurring(folder, "x.zarr", gpu, Tile(block=256))]
)
def test_a_run_holds_what_was_planned_of_the_gpu(made: Any, gpu: str, cluster: RunningCluster, tmp_path: Path) -> None:
    plan = make_plan(made(tmp_path, gpu))
    outcome = run(plan, cluster=cluster)
    assert outcome.done == outcome.total
    if gpu == "cuda":
        assert outcome.compute_seconds > 0
        assert work_of(plan).tuned is not None
        assert 0.5 < outcome.device_peak_bytes / work_of(plan).tuned.device_bytes < 1.1
