"""Whole jobs on a GPU: the pixels of the CPU, and the same bits however they are run."""

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
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster as Choice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from tests.cases import thorough
from tests.faults import REPOSITORY, members, until
from tests.support import Image, dncnn_weights, job_of, noisy_image, read_zarr, write_zarr

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]

DENOISERS: Mapping[str, Mapping[str, Any]] = {
    "gaussian": {"sigma": 1.5},
    "tv": {"strength": 0.2},
    "dncnn": {"weights": "WEIGHTS", "depth": 5, "width": 8},
    "torch": {"import": "tests.networks:unet"},
}


def job(folder: Path, output: str, name: str, device: str, **parts: Any) -> Denoising:
    """A job of several blocks, on workers of this machine."""
    source = folder / "in.zarr"
    if not source.exists():
        write_zarr(source, noisy_image((700, 610)))
    options = {key: str(_weights(folder)) if value == "WEIGHTS" else value for key, value in DENOISERS[name].items()}
    # A GPU that is tried may choose another tile and batch each time, and so other last bits.
    tile = {"block": 256, "size": 128, "batch": 4, "channels_last": False}
    made = job_of(source, folder / output, name, options, tile=tile, run={"device": device} | parts)
    return replace(made, cluster=Choice(kind="local"))


def _weights(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    return path if path.exists() else dncnn_weights(path)


def denoised(wanted: Denoising, cluster: RunningCluster) -> Image:
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
    (tmp_path / "pace").write_text("0")
    source = write_zarr(tmp_path / "in.zarr", noisy_image((512, 512)))

    def wanted(output: str) -> Denoising:
        options = {
            "import": "tests.gpu.models:build",
            "options": {"folder": str(tmp_path)},
            "receptive_field": 3,
            "alignment": 1,
        }
        made = job_of(
            source,
            tmp_path / output,
            "torch",
            options,
            shard=64,
            # The planner would rehearse the network, each of its tiles at the same pace.
            tile={"block": 64, "size": 64, "batch": 1, "channels_last": False, "seams": "allow"},
            run={"device": gpu},
        )
        return replace(made, cluster=Choice(kind="local"))

    undisturbed = denoised(wanted("undisturbed.zarr"), cluster)
    plan = make_plan(wanted("out.zarr"))
    config = tmp_path / "job.yaml"
    parts = {key: value for key, value in plan.documents.asked.items() if key not in ("allow_import", "import_folder")}
    config.write_text(json.dumps(parts))
    (tmp_path / "pace").write_text("0.1")
    driver = start(config)
    try:
        until(lambda: driver.poll() is not None or len(journalled(plan.run_directory)) >= 6, seconds=120)
        alive = driver.poll() is None
    finally:
        for process in members(driver.pid):
            os.kill(process, signal.SIGKILL)
        output, _ = driver.communicate()
    assert alive, output
    done = journalled(plan.run_directory)
    assert 6 <= len(done) < len(plan.grid)
    (tmp_path / "pace").write_text("0")
    outcome = run(make_plan(wanted("out.zarr")), cluster=cluster)
    assert outcome.resumed == len(done)
    np.testing.assert_array_equal(read_zarr(tmp_path / "out.zarr"), undisturbed)


def start(config: Path) -> subprocess.Popen[str]:
    """Run a job with the command line, as the leader of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "halotile", "run", str(config), "--allow-import"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def journalled(directory: Path) -> set[int]:
    """The blocks that a journal has by now."""
    folder = RunDirectory(directory)
    plan = folder.read_plan()
    if plan is None or not folder.journal_path.exists():
        return set()
    with Journal.open(folder.journal_path, plan["fingerprint"], 64, read_only=True) as journal:
        return set(journal.done)
