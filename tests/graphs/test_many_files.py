"""An output has as many files as a file system bears: shards grow with the image, and what has no room is refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zarr

from halotile.errors import DiskRefused
from halotile.graphs.kinds.sections import Cluster, Output, Run, parse_bytes
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import MOST_FILES
from halotile.storage.sharded.output import Layout, create_output
from tests.cases import thorough
from tests.support import job_of, noisy_image, work_of, write_zarr

ELSEWHERE = Cluster(kind="slurm")


def huge(folder: Path, edge: int, dtype: str = "float32", **layout: Any) -> Path:
    """An image of which nothing is written."""
    path = folder / "huge.zarr"
    stored: Any = {"chunks": (512, 512)} | layout
    zarr.create_array(path, shape=(edge, edge), dtype=dtype, dimension_names=["y", "x"], **stored)
    return path


def planned(source: Path, memory: str = "4GiB", **changed: Any) -> Plan:
    """As it would be, whether it fits the disk or not."""
    job = job_of(source, source.parent / "out.zarr", "gaussian", {"sigma": 2}, shard="auto", chunk="auto")
    run = Run(workers=8, memory_per_worker=memory)
    return make_plan(replace(job, run=run, cluster=ELSEWHERE, **changed), refuse=False)


def test_an_image_that_has_few_files_keeps_its_shards(tmp_path: Path) -> None:
    plan = planned(huge(tmp_path, 300 * 1024))
    assert (plan.layout.shard, len(plan.layout.arrays[0].grid)) == ((2048, 2048), 22_500)
    assert plan.layout.files <= MOST_FILES, "with all levels"
    assert plan.layout.arrays[-1].shape == (1200, 1200)
    bare = planned(tmp_path / "huge.zarr", output=Output(path=str(tmp_path / "bare.zarr"), format="zarr"))
    assert (bare.layout.shard, bare.layout.files) == ((1024, 1024), 90_000)


def test_shards_grow_until_there_are_few(tmp_path: Path) -> None:
    plan = planned(huge(tmp_path, 2**20))
    assert (plan.layout.shard, len(plan.layout.arrays[0].grid)) == ((8192, 8192), 16_384)
    assert plan.layout.files <= MOST_FILES
    assert plan.grid.block == (8192, 8192)
    assert len(plan.layout.arrays) == 6, "more would make more files"


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("memory", ["1GiB", "2GiB", "4GiB", "64GiB"])
def test_and_no_further_than_memory_allows(memory: str, dtype: str, tmp_path: Path) -> None:
    plan, allowed = planned(huge(tmp_path, 2**24, dtype), memory), parse_bytes(memory)
    width = max(4, work_of(plan).task.source.dtype.itemsize)
    assert plan.layout.shard[0] * plan.layout.shard[1] * width <= allowed // 8
    assert plan.memory_bytes <= allowed


def test_the_shards_of_the_input_are_a_hint(tmp_path: Path) -> None:
    source = huge(tmp_path, 2**20, shards=(5 * 1024, 5 * 1024))
    assert planned(source).layout.shard == (5 * 1024, 5 * 1024)
    assert planned(source, "1GiB").layout.shard == (2048, 2048), "which is all that memory allows"


def test_a_run_that_goes_on_keeps_its_shards(tmp_path: Path) -> None:
    source = huge(tmp_path, 2**20)
    first = planned(source, "2GiB")
    run = RunDirectory(first.run_directory)
    run.create()
    run.write_plan(kept_of(first))
    larger = planned(source, "64GiB")
    assert larger.layout.shard == first.layout.shard
    assert larger.resumes


def stack(folder: Path, planes: int, edge: int) -> Path:
    """Planes of which nothing is written."""
    stored: Any = {"chunks": (1, 64, 64), "dtype": "uint16", "dimension_names": ["t", "y", "x"]}
    zarr.create_array(folder / "stack.zarr", shape=(planes, edge, edge), **stored)
    return folder / "stack.zarr"


MANY = "the output is 1,000,000 files and 3,000,006 inodes: each of 1,000,000 planes along t has files of its own, whatever output.shard is"


@pytest.mark.parametrize(
    ("planes", "edge", "memory", "note"),
    [
        thorough(1_000_000, 256, "4GiB", MANY),
        (100_000, 256, "4GiB", None),
        thorough(50_000, 4096, "64GiB", None),
        (
            50_000,
            4096,
            "1GiB",
            r"the output is 200,000 files and .*: fewer, larger shards take more run\.memory_per_worker$",
        ),
        thorough(
            200_000, 4096, "1GiB", r"the output is 800,000 files and .* larger shards.*; and each of 200,000 planes"
        ),
    ],
)
def test_more_files_than_automatic_shards_keep_to_are_noted(
    planes: int, edge: int, memory: str, note: str | None, tmp_path: Path
) -> None:
    found = [said for said in planned(stack(tmp_path, planes, edge), memory).notes if " files and " in said]
    assert len(found) == (note is not None)
    assert note is None or re.match(note, found[0])


@pytest.mark.thorough
def test_of_shards_that_were_asked_for_nothing_is_noted(tmp_path: Path) -> None:
    job = job_of(stack(tmp_path, 1_000_000, 256), tmp_path / "out.zarr", "gaussian", {"sigma": 2}, shard=128)
    assert not any(" files and " in said for said in make_plan(job, refuse=False).notes)


def set_inodes(place: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    """Let planning see a file system with these inodes."""
    known = list(os.statvfs(place))
    known[5], known[6], known[7] = total, free, free
    monkeypatch.setattr("halotile.graphs.plans.plan.os.statvfs", lambda _: os.statvfs_result(known))


def test_files_and_inodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free is asked of a file system that stands still: others write to the real one meanwhile."""
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    set_inodes(tmp_path, monkeypatch, 10**6, 12_345)
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "median", {"size": 3}, shard=64, chunk=64))
    figures = plan.summary()
    assert (figures["files"], figures["inodes"]) == (25, 25 + 5 + 2 + 4)
    assert figures["free_inodes"] == 12_345


@pytest.mark.parametrize(("total", "free", "fits"), [(10**6, 35, False), (10**6, 36, True), (0, 0, True)])
def test_more_than_a_file_system_has_room_for_are_refused(
    total: int, free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs, which does not count, has none and none free."""
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    job = job_of(source, tmp_path / "out.zarr", "median", {"size": 3}, shard=64, chunk=64)
    set_inodes(tmp_path, monkeypatch, total, free)
    if fits:
        make_plan(job)
    else:
        with pytest.raises(DiskRefused, match=r"makes 36 files and folders, and .* has room for 35 \(`df -i`\)"):
            make_plan(job)


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
