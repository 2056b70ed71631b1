"""A worker on its own GPU, started by a driver that never initialises CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.clusters.common.machine import gpus_here, has_dask_cuda
from tests.faults import REPOSITORY
from tests.support import noisy_image, read_zarr, write_zarr

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]


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
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/gpu/driver.py"), str(folder), kind, device],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report
