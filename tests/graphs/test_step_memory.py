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

from halotile.cli.config.loading import load_job
from halotile.graphs.clusters.common import machine as gpu_detection
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.plans import needs
from halotile.graphs.plans.needs import PROCESS, TILES, Footprint, gpu_bytes
from halotile.graphs.plans.plan import make_plan
from tests.cases import all_of
from tests.graphs.solving import kernel
from tests.support import dncnn_weights, noisy_image, work_of, write_zarr

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

CASES: dict[str, dict[str, Any]] = {
    "one by one, circular, no prior": {"exact": True},
    "folded, transforms": {"kernels": (13, 21)},
    "tv": {"exact": True, "boundary": "reflect", "prior": "{name: tv, weight: 0.1, iterations: 10}", "solver": "fista"},
    "network": {
        "exact": True,
        "prior": "{name: pnp, denoiser: {name: dncnn, weights: w.safetensors, depth: 7, width: 32}}",
    },
    "cg": {"solver": "cg", "exact": True},
    "folded, transforms, two iterations in a pass": {
        "kernels": (13, 21),
        "prior": "{name: pnp, denoiser: {name: gaussian, sigma: 2.0}}",
        "every": 2,
    },
    "tv, one by one, three iterations in a pass": {
        "exact": True,
        "boundary": "reflect",
        "prior": "{name: tv, weight: 0.1, iterations: 10}",
        "every": 3,
    },
}


def job(folder: Path, case: dict[str, Any]) -> Path:
    """A job of two blurs, in super-blocks of 1024."""
    operators = "".join(
        f"  - {{name: blur, kernel: k{size}.npy, boundary: {case.get('boundary', 'circular')}, data: y.zarr}}\n"
        for size in case.get("kernels", (5, 9))
    )
    step = "auto" if case.get("solver") == "cg" else 0.1
    path = folder / "job.yaml"
    path.write_text(
        f"version: 1\njob: reconstruct\noutput: {{path: x.zarr}}\noperators:\n{operators}"
        f"prior: {case.get('prior', '{name: none}')}\n"
        f"solver: {{name: {case.get('solver', 'pgd')}, step: {step}, iterations: 6, "
        f"checkpoint_every: {case.get('every', 1)}}}\n"
        f"exact: {str(case.get('exact', False)).lower()}\ntile: {{block: 1024}}\nrun: {{memory_per_worker: 6GiB}}\n"
    )
    return path


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
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(job(tmp_path, CASES[name]))],
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


def test_a_prior_on_a_card_takes_what_its_libraries_keep_and_no_tiles_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (needs, gpu_detection):
        monkeypatch.setattr(module, "gpus_here", lambda: Gpus(("0",)))
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    here, gpu, without = (
        footprint(job(tmp_path, CASES[case] if case else {}), device)
        for case, device in (("network", "cpu"), ("network", "cuda"), ("", "cuda"))
    )
    assert gpu[PROCESS] == here[PROCESS] + gpu_bytes(None)
    assert gpu[TILES] < here[TILES]
    assert without[PROCESS] == here[PROCESS], "nothing is computed there"


def footprint(config: Path, device: str) -> Footprint:
    """What is planned for a worker."""
    wanted = load_job(config, [f"run.device={device}"])
    assert isinstance(wanted, Reconstruction)
    found: Footprint = work_of(make_plan(wanted)).step_footprint()
    return found
