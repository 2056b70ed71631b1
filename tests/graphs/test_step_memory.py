"""The memory model of reconstructions against measured peaks: a plan that fits must not be killed for memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT
from tests.cases import all_of
from tests.graphs.solving import kernel
from tests.support import dncnn_weights, noisy_image, write_zarr

MIB = 2**20
SLACK_BYTES = 48 * MIB
"""What the allocator keeps and the interpreter makes in passing."""
SHAPE = (2048, 1500)

MEASURE = """
import json, sys
from pathlib import Path
import psutil, torch
import halotile.graphs.runs.passes.worker_setup, halotile.graphs.runs.driver  # what a worker has imported
from halotile.cli.config.loading import load_job
from halotile.graphs.plans.plan import make_plan
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner, peak_memory_bytes
from halotile.tasks.devices.device import prepare_process
from halotile.tasks.image_task import Shared
from tests.graphs.inline import WORDS, InlineIterations

prepare_process(1)
plan = make_plan(load_job(Path(sys.argv[1])))
work = plan.work
back = Shared(Constant(plan.grid.shape, work.start.dtype)) if work.form.folded else None
before = psutil.Process().memory_info().rss

def run_pass(task, iteration, journal, ledger):
    receipt = BlockRunner(task).run(range(len(task.grid)))
    assert not receipt.bad, receipt.bad[0].traceback
    ledger.enter(receipt.sums)
    journal.mark(receipt.digests)

run = InlineIterations(
    work.solver, work.problem(0.1, back), work.vectors(work.solver, "iterate"), plan.grid, "a job",
    view=work.form.view(work.prior.reach()), margin=work.form.fused_reach, overlap=work.overlap, words=WORDS, run_pass=run_pass,
    by_shard=work.form.by_shard,
)
assert len(list(run.run(3 * work.form.per_pass, lambda *_: False))) == work.solver.traits.passes_before + 3
needed = work.step_footprint()
print(json.dumps([before, peak_memory_bytes(), needed["the program itself"], sum(needed.values())]))
"""

TV, NONE = "{name: tv, weight: 0.1, iterations: 10}", "{name: none}"
GAUSSIAN = "{name: pnp, denoiser: {name: gaussian, sigma: 2.0}}"
NETWORK = "{name: pnp, denoiser: {name: dncnn, weights: w.safetensors, depth: 7, width: 32}}"
CASES: dict[str, dict[str, Any]] = {
    "one by one, circular, no prior": {"exact": "true"},
    "folded, transforms": {"kernels": (13, 21)},
    "tv": {"exact": "true", "boundary": "reflect", "prior": TV, "solver": "fista"},
    "network": {"exact": "true", "prior": NETWORK},
    "cg": {"solver": "cg", "exact": "true", "step": "auto"},
    "folded, transforms, two iterations in a pass": {"kernels": (13, 21), "prior": GAUSSIAN, "every": 2},
    "tv, one by one, three iterations in a pass": {"exact": "true", "boundary": "reflect", "prior": TV, "every": 3},
}
JOB = """\
version: 1
job: reconstruct
output: {{path: x.zarr}}
operators:
  - {{name: blur, kernel: k{kernels[0]}.npy, boundary: {boundary}, data: y.zarr}}
  - {{name: blur, kernel: k{kernels[1]}.npy, boundary: {boundary}, data: y.zarr}}
prior: {prior}
solver: {{name: {solver}, step: {step}, iterations: 6, checkpoint_every: {every}}}
exact: {exact}
tile: {{block: 1024}}
run: {{memory_per_worker: 6GiB}}
"""
DEFAULTS: dict[str, Any] = {
    "kernels": (5, 9), "boundary": "circular", "prior": NONE, "solver": "pgd", "step": 0.1, "every": 1, "exact": "false",
}  # fmt: skip


def job(folder: Path, data: Path, case: dict[str, Any]) -> Path:
    """A job of two blurs, in super-blocks of 1024."""
    for path in data.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    (folder / "job.yaml").write_text(JOB.format(**DEFAULTS | case))
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_zarr(folder / "y.zarr", noisy_image(SHAPE), chunk=512)
    dncnn_weights(folder / "w.safetensors", 7, 32)
    for size in (5, 9, 13, 21):
        np.save(folder / f"k{size}.npy", kernel(size))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize("name", all_of(CASES, thorough=CASES.keys() - {"tv"}))
def test_a_worker_stays_within_what_the_plan_projects(name: str, folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(job(tmp_path, folder, CASES[name]))],
        env=os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, peak, imports, total = json.loads(done.stdout)
    used, projected = peak - before, total - imports
    print(f"{name}: {before / MIB:.0f} before, {used / MIB:.0f} used, {projected / MIB:.0f} projected")
    assert before <= imports
    assert used <= projected + SLACK_BYTES
