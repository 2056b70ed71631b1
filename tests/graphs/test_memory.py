"""The memory model against measured peaks: a plan that fits must not be killed for memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT
from halotile.graphs.plans.needs import IMPORTS_BYTES
from halotile.graphs.plans.plan import make_plan
from halotile.storage.sharded.output import create_output
from tests.cases import all_of
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr

MIB = 2**20
SLACK_BYTES = 48 * MIB
"""What the allocator keeps and the interpreter makes in passing."""

MEASURE = """
import json, pickle, sys
from pathlib import Path
import psutil, torch
import halotile.graphs.runs.passes.worker_setup, halotile.graphs.runs.driver  # what a worker has imported
from halotile.tasks.block import BlockRunner, peak_memory_bytes
from halotile.tasks.devices.device import prepare_process
prepare_process(1)
task = pickle.loads(Path(sys.argv[1]).read_bytes())
before = psutil.Process().memory_info().rss
receipt = BlockRunner(task).run(range(int(sys.argv[2])))
assert not receipt.bad, receipt.bad[0].traceback
print(json.dumps([before, peak_memory_bytes()]))
"""

CASES: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 2},
    "median": {"size": 5},
    "tv": {"strength": 0.1},
    "nlm": {"strength": 0.1},
    "dncnn": {"depth": 7, "width": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_zarr(folder / "in.zarr", noisy_image((3072, 1500)), chunk=512)
    dncnn_weights(folder / "w.safetensors", 7, 32)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize("name", all_of(CASES, thorough=CASES.keys() - {"gaussian"}))
def test_a_worker_stays_within_what_the_plan_projects(name: str, folder: Path, tmp_path: Path) -> None:
    options = CASES[name] | ({"weights": str(folder / "w.safetensors")} if name == "dncnn" else {})
    check(folder / "in.zarr", tmp_path, name, options, 1024)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
def test_results_are_larger_than_what_is_stored_of_them(tmp_path: Path) -> None:
    """Images of bytes are computed in four bytes a pixel, and stay so until they are encoded."""
    source = write_zarr(tmp_path / "bytes.zarr", noisy_image((4096, 8192), "uint8"), chunk=512)
    check(source, tmp_path, "gaussian", {"sigma": 2}, 4096)


def test_a_thin_block_at_the_edge_tells_nothing_of_the_others(tmp_path: Path) -> None:
    """Of two rows of blocks the second may be a few pixels high."""
    needed = []
    for rows in (260, 512):
        source = write_zarr(tmp_path / f"{rows}.zarr", noisy_image((rows, 512)))
        job = job_of(
            source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, tile={"block": 256, "boundary": "reflect"}
        )
        needed.append(make_plan(job).needs)
    assert needed[0] == needed[1]


def check(source: Path, folder: Path, name: str, options: dict[str, Any], block: int) -> None:
    """Denoise a few blocks in a process that did not plan, and hold its peak against the plan."""
    (folder / "in.zarr").symlink_to(source)
    tile = {"block": block}
    job = job_of(folder / "in.zarr", folder / "out.zarr", name, options, shard="auto", chunk="auto", tile=tile)
    plan = make_plan(job)
    create_output(plan.output, plan.layout)
    (folder / "task.pickle").write_bytes(pickle.dumps(work_of(plan).task))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder / "task.pickle"), str(min(3, len(plan.grid)))],
        env=os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, peak = json.loads(done.stdout)
    imports, total = IMPORTS_BYTES, plan.memory_bytes
    print(
        f"{name}: {before / MIB:.0f} before, {(peak - before) / MIB:.0f} used, {(total - imports) / MIB:.0f} projected"
    )
    assert before <= imports
    assert peak - before <= total - imports + SLACK_BYTES
