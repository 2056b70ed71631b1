"""Limits on memory, files and threads, whatever an input asks for: a plan that fits is not killed, and what has no room is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import psutil
import pytest
import zarr
from numpy.typing import NDArray

from halotile.errors import DiskRefused, MemoryRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT
from halotile.graphs.kinds.sections import Cluster, Output, Run, Tile, parse_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.plans.trials.denoiser_trials import try_denoiser
from halotile.graphs.runs import records
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.records import damaged_blocks, image_digest
from halotile.storage.grid import Region
from halotile.storage.sharded.layout import MOST_FILES
from halotile.storage.sharded.output import Layout, create_output
from halotile.tasks.denoisers.function import Function, GivenFunction
from tests.cases import all_of, thorough
from tests.faults import REPOSITORY, run_python
from tests.graphs.solving import kernel
from tests.storage.outputs import PLAIN, written
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr

Patch = pytest.MonkeyPatch

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone keeps to it, and has /proc")
MIB, GIB = 2**20, 2**30


def take(nbytes: int) -> int | str:
    """Allocate memory without using it."""
    try:
        return np.empty(nbytes, np.uint8).nbytes
    except MemoryError:
        return "refused"


@on_linux
@pytest.mark.cluster
def test_a_worker_is_refused_what_goes_beyond_its_memory(cluster: RunningCluster) -> None:
    """A machine with 4 GiB; the real one may have far more, or overcommit."""
    assert cluster.client.submit(take, GIB, pure=False).result(timeout=60) == GIB
    assert cluster.client.submit(take, 6 * GIB, pure=False).result(timeout=60) == "refused"


LIMITED = """
from halotile.tasks.devices.device import allow_memory, size_limited
from tests.graphs.test_limits import take

with size_limited(2**20):  # for a while, if it is a worker of ours: in another process, other threads may do unrelated work
    print(take(2**28))
allow_memory(2**28)
print(take(2**29))
allow_memory(None)
print(take(2**29))
allow_memory(2**31)
with size_limited(2**20):
    print(take(2**29))
print(take(2**29))
"""
COMMAND = """
import resource, sys
from halotile.cli.main import main

sys.argv = ["recon-cli", "--version"]
try:
    main()
finally:
    print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


@on_linux
def test_a_limit_holds_until_it_is_lifted_and_a_command_takes_no_more_than_was_free() -> None:
    """In other processes, which give freed memory back at once."""
    usual = {name: word for name, word in os.environ.items() if not name.startswith("MALLOC_")}
    found, limit = (
        subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60, env=usual).split()
        for code in (LIMITED, COMMAND)
    )
    assert found == [str(2**28), "refused", str(2**29), "refused", str(2**29)]
    assert 0 < int(limit[-1]) < psutil.virtual_memory().total + GIB


def hungry(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """It uses 3 GiB, if it gets them."""
    return image + np.ones(3 * GIB // 8)[:1].astype(np.float32)


@on_linux
@pytest.mark.parametrize(
    "denoiser", [GivenFunction(call=hungry, depth=0), Function(import_=f"{__name__}:hungry", depth=0)]
)
def test_a_function_is_tried_with_the_memory_of_a_worker(denoiser: Any) -> None:
    run, before = Run(memory_per_worker="2GiB"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = r"memory_per_worker is 2 GiB, and .*hungry needs more than that to be tried"
    with pytest.raises(MemoryRefused, match=words):
        try_denoiser(denoiser, Tile(), (500, 500), None, run=run, report=print)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; it would be 3 GiB here


SLACK_BYTES = 48 * MIB
"""What the allocator keeps and the interpreter makes in passing."""


def measured(script: str, *words: object) -> list[int]:
    """Figures that a script prints, in a process with the environment of a worker."""
    own = WORKER_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    done = run_python("-c", script, *map(str, words), environment=own)
    assert done.returncode == 0, done.stderr
    return [int(figure) for figure in json.loads(done.stdout)]


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
PEAKS: dict[str, tuple[str, dict[str, Any], tuple[int, int], str, int]] = {
    "gaussian": ("gaussian", {"sigma": 2}, (3072, 1500), "float32", 1024),
    "median": ("median", {"size": 5}, (3072, 1500), "float32", 1024),
    "tv": ("tv", {"strength": 0.1}, (3072, 1500), "float32", 1024),
    "nlm": ("nlm", {"strength": 0.1}, (3072, 1500), "float32", 1024),
    "dncnn": ("dncnn", {"depth": 7, "width": 32}, (3072, 1500), "float32", 1024),
    # Images of bytes are computed in four bytes a pixel, and stay so until they are encoded.
    "bytes": ("gaussian", {"sigma": 2}, (4096, 8192), "uint8", 4096),
}


@on_linux
@pytest.mark.parametrize("case", all_of(PEAKS, thorough=PEAKS.keys() - {"gaussian"}))
def test_a_worker_stays_within_what_the_plan_projects(case: str, tmp_path: Path) -> None:
    """A few blocks in a process that did not plan."""
    name, options, shape, dtype, block = PEAKS[case]
    source = write_zarr(tmp_path / "in.zarr", noisy_image(shape, dtype), chunk=512)
    if name == "dncnn":
        options |= {"weights": str(dncnn_weights(tmp_path / "w.safetensors", 7, 32))}
    sizes: dict[str, Any] = {"shard": "auto", "chunk": "auto", "tile": {"block": block}}
    plan = make_plan(job_of(source, tmp_path / "out.zarr", name, options, **sizes))
    create_output(plan.output, plan.layout)
    (tmp_path / "task.pickle").write_bytes(pickle.dumps(work_of(plan).task))
    before, peak = measured(MEASURE, tmp_path / "task.pickle", min(3, len(plan.grid)))
    assert before <= IMPORTS_BYTES
    assert peak - before <= plan.memory_bytes - IMPORTS_BYTES + SLACK_BYTES


def test_a_thin_block_at_the_edge_tells_nothing_of_the_others(tmp_path: Path) -> None:
    """Of two rows of blocks the second may be a few pixels high."""
    needed, tile = [], {"block": 256, "boundary": "reflect"}
    for rows in (260, 512):
        source = write_zarr(tmp_path / f"{rows}.zarr", noisy_image((rows, 512)))
        needed.append(make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, tile=tile)).needs)
    assert needed[0] == needed[1]


def unwritten(folder: Path, shape: tuple[int, ...], dtype: str = "float32", **layout: Any) -> Path:
    """An image of which nothing is written."""
    stored: Any = {"chunks": (512, 512), "dimension_names": ["y", "x"], "dtype": dtype} | layout
    zarr.create_array(folder / "huge.zarr", shape=shape, overwrite=True, **stored)
    return folder / "huge.zarr"


def planned(source: Path, memory: str = "4GiB", **changed: Any) -> Plan:
    """As it would be, whether it fits the disk or not."""
    job = job_of(source, source.parent / "out.zarr", "gaussian", {"sigma": 2}, shard="auto", chunk="auto")
    run = Run(workers=8, memory_per_worker=memory)
    return make_plan(replace(job, run=run, cluster=Cluster(kind="slurm"), **changed), refuse=False)


def test_shards_grow_until_there_are_few_files(tmp_path: Path) -> None:
    plan = planned(unwritten(tmp_path, (300 * 1024,) * 2))
    assert (plan.layout.shard, len(plan.layout.arrays[0].grid)) == ((2048, 2048), 22_500)
    assert plan.layout.files <= MOST_FILES, "with all levels"
    assert plan.layout.arrays[-1].shape == (1200, 1200)
    bare = planned(tmp_path / "huge.zarr", output=Output(path=str(tmp_path / "bare.zarr"), format="zarr"))
    assert (bare.layout.shard, bare.layout.files) == ((1024, 1024), 90_000)
    plan = planned(unwritten(tmp_path, (2**20,) * 2))
    assert (plan.layout.shard, len(plan.layout.arrays[0].grid)) == ((8192, 8192), 16_384)
    assert plan.layout.files <= MOST_FILES
    assert plan.grid.block == (8192, 8192)
    assert len(plan.layout.arrays) == 6, "more would make more files"


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("memory", ["1GiB", "2GiB", "4GiB", "64GiB"])
def test_and_no_further_than_memory_allows(memory: str, dtype: str, tmp_path: Path) -> None:
    plan, allowed = planned(unwritten(tmp_path, (2**24,) * 2, dtype), memory), parse_bytes(memory)
    width = max(4, work_of(plan).task.source.dtype.itemsize)
    assert plan.layout.shard[0] * plan.layout.shard[1] * width <= allowed // 8
    assert plan.memory_bytes <= allowed


def test_the_shards_of_the_input_are_a_hint_and_a_run_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    source = unwritten(tmp_path, (2**20,) * 2, shards=(5 * 1024, 5 * 1024))
    assert planned(source).layout.shard == (5 * 1024, 5 * 1024)
    assert planned(source, "1GiB").layout.shard == (2048, 2048), "which is all that memory allows"
    source = unwritten(tmp_path, (2**20,) * 2)
    first = planned(source, "2GiB")
    with claim(first):
        pass
    larger = planned(source, "64GiB")
    assert larger.layout.shard == first.layout.shard
    assert larger.resumes


MANY = "the output is 1,000,000 files and 3,000,006 inodes: each of 1,000,000 planes along t has files of its own, whatever output.shard is"
NOTED: list[Any] = [
    thorough(1_000_000, 256, "4GiB", MANY),
    (100_000, 256, "4GiB", None),
    thorough(50_000, 4096, "64GiB", None),
    (50_000, 4096, "1GiB", r"the output is 200,000 files and .*: fewer, larger shards take more run\.memory_per_worker$"),
    thorough(200_000, 4096, "1GiB", r"the output is 800,000 files .* larger shards.*; and each of 200,000 planes"),
]  # fmt: skip


@pytest.mark.parametrize(("planes", "edge", "memory", "note"), NOTED)
def test_many_files_are_noted(
    planes: int, edge: int, memory: str, note: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("halotile.graphs.jobs.denoise.pixels.survey_planes", lambda *_, **__: [])  # of so many planes
    stored: Any = {"chunks": (1, 64, 64), "dimension_names": ["t", "y", "x"]}
    source = unwritten(tmp_path, (planes, edge, edge), "uint16", **stored)
    found = [said for said in planned(source, memory).notes if " files and " in said]
    assert len(found) == (note is not None)
    assert note is None or re.match(note, found[0])
    if memory == "64GiB":
        asked = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 2}, shard=128)  # for these shards
        assert not any(" files and " in said for said in make_plan(asked, refuse=False).notes)


@pytest.mark.parametrize(("total", "free"), [(10**6, 35), (10**6, 36), (0, 0)])
def test_files_without_room_are_refused(total: int, free: int, tmp_path: Path, monkeypatch: Patch) -> None:
    """btrfs, which does not count, has none and none free. The file system stands still: others write to the real one meanwhile."""
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    job = job_of(source, tmp_path / "out.zarr", "median", {"size": 3}, shard=64, chunk=64)
    known = list(os.statvfs(tmp_path))
    known[5], known[6], known[7] = total, free, free
    monkeypatch.setattr("halotile.graphs.plans.plan.os.statvfs", lambda _: os.statvfs_result(known))
    if (total, free) == (10**6, 35):
        with pytest.raises(DiskRefused, match=r"makes 36 files and folders, and .* has room for 35 \(`df -i`\)"):
            make_plan(job)
    else:
        figures = make_plan(job).summary()
        assert (figures["files"], figures["inodes"]) == (25, 25 + 5 + 2 + 4)
        assert figures.get("free_inodes") == (free or None)


@pytest.mark.parametrize("levels", [1, 3])
def test_what_is_counted_is_what_is_made(levels: int, tmp_path: Path) -> None:
    """All but the run directory."""
    bare = Layout((40, 30), "uint8", (8, 8), (4, 4), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
    layout = bare if levels == 1 else replace(bare, ome=True, levels=3, factor=(2, 2), block=(16, 16))
    create_output(tmp_path / "o.zarr", layout)
    for array in layout.arrays:
        for name, _ in array.shards(Region.whole(array.shape)):
            path = tmp_path / "o.zarr" / array.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    made = sum(1 for _ in (tmp_path / "o.zarr").rglob("*")) + 1
    assert made <= layout.inodes <= made + 2


def test_checks_take_as_many_threads_as_there_are_cores_and_memory_for(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(records, "ThreadPoolExecutor", threads := Mock(wraps=ThreadPoolExecutor))
    monkeypatch.setattr(records, "cores_here", lambda: 4)
    written(tmp_path / "a.zarr", layout := replace(PLAIN, dtype="uint16"))
    shard_bytes = 8 * 8 * 2
    for held, count in ((100 * shard_bytes, 4), (3 * shard_bytes - 1, 2), (shard_bytes - 1, 1)):
        monkeypatch.setattr(records, "HELD_BYTES", held)
        assert list(damaged_blocks(tmp_path / "a.zarr", layout, layout.grid, thorough=True)) == []
        image_digest(tmp_path / "a.zarr", layout, layout.grid)
        assert threads.call_args_list[-2:] == [call(count), call(4)]


ITERATIONS_MEASURED = """
import json, sys
from pathlib import Path
import psutil, torch
import halotile.graphs.runs.passes.worker_setup, halotile.graphs.runs.driver  # what a worker has imported
from halotile.cli.config.loading import load_job
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.block import peak_memory_bytes
from halotile.tasks.devices.device import prepare_process
from tests.graphs.inline import inline
from tests.graphs.solving import iterations_of_plan

prepare_process(1)
plan = make_plan(load_job(Path(sys.argv[1])))
before, work = psutil.Process().memory_info().rss, plan.work
run = iterations_of_plan(plan, inline)
run.overlap = work.overlap
assert len(list(run.run(3 * work.form.per_pass, lambda *_: False))) == work.solver.traits.passes_before + 3
needed = work.step_footprint()
print(json.dumps([before, peak_memory_bytes(), needed["the program itself"], sum(needed.values())]))
"""

TV, NONE = "{name: tv, weight: 0.1, iterations: 10}", "{name: none}"
GAUSSIAN = "{name: pnp, denoiser: {name: gaussian, sigma: 2.0}}"
NETWORK = "{name: pnp, denoiser: {name: dncnn, weights: w.safetensors, depth: 7, width: 32}}"
STEPS: dict[str, dict[str, Any]] = {
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


@on_linux
@pytest.mark.parametrize("name", all_of(STEPS, thorough=STEPS.keys() - {"tv"}))
def test_a_worker_of_a_reconstruction_stays_within_what_the_plan_projects(name: str, tmp_path: Path) -> None:
    case = DEFAULTS | STEPS[name]
    write_zarr(tmp_path / "y.zarr", noisy_image((1536, 1500)), chunk=512)
    dncnn_weights(tmp_path / "w.safetensors", 7, 32)
    for size in case["kernels"]:
        np.save(tmp_path / f"k{size}.npy", kernel(size))
    (tmp_path / "job.yaml").write_text(JOB.format(**case))
    before, peak, imports, total = measured(ITERATIONS_MEASURED, tmp_path / "job.yaml")
    assert before <= imports
    assert peak - before <= total - imports + SLACK_BYTES
