"""The sizes of a plan: chosen to fit together and into memory and disk, or refused with the numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile

from halotile.errors import DiskRefused, MemoryRefused
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, parse_bytes
from halotile.graphs.plans import plan
from halotile.graphs.plans.needs import DECODED, READ
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import claim
from halotile.storage.stored_array import StoredArray
from tests.support import dncnn_weights, footprint_of, job_of, load_denoising, noisy_image, work_of, write_zarr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))


def test_sizes_left_to_the_planner_fit_together(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((5000, 4000), "uint8"), chunk=2500)
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 2}, shard="auto", chunk="auto"))
    assert plan.layout.chunk == (256, 256)
    assert plan.layout.shard == (1024, 1024)
    assert plan.grid.block == (1024, 1024)
    assert work_of(plan).task.tiling.tile == (512, 512)
    assert work_of(plan).task.tiling.depth == ((8, 8), (8, 8))
    assert len(plan.grid) == 20


@pytest.mark.parametrize(("size", "batch"), [("auto", 1), (4096, 1), (10**8, 1), (64, 1)])
def test_no_more_tiles_are_computed_at_once_than_a_block_has(
    source: Path, tmp_path: Path, size: Any, batch: int
) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 2}, tile={"size": size}))
    assert work_of(plan).task.tiling.batch == batch
    assert plan.memory_bytes < 2**30


def test_the_resolved_configuration_makes_the_same_output(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((2, 300, 260), "uint16"), axes="zyx")
    denoisers: dict[str, dict[str, Any]] = {
        "gaussian": {"sigma": 1.5},
        "dncnn": {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8},
        "tv": {"strength": 1.0, "sigma": "auto", "iterations": 7},
    }
    for number, (name, options) in enumerate(denoisers.items()):
        job = job_of(source, tmp_path / f"{number}.zarr", name, options, tile={"axes": "yx"})
        plan = make_plan(job)
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps(plan.documents.resolved))
        again = make_plan(load_denoising(file))
        assert isinstance(again.job, Denoising)
        decided = replace(again.job.tile, channels_last=False)  # that is of GPUs
        assert "auto" not in decided.__dict__.values()
        ours, theirs = plan.identity, again.identity
        told = {"denoiser", "noise_level"}  # as a number, where it was estimated
        assert {key for key in ours if ours[key] != theirs[key]} <= told
        assert work_of(again).task.denoiser == work_of(plan).task.denoiser


def test_super_blocks_grow_until_workers_would_idle(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((3200, 3200), "uint8"), chunk=3200)
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1}, run={"workers": 1})
    assert make_plan(job).grid.block == (1152, 1152)
    more = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1}, run={"workers": 8})
    assert make_plan(more).grid.block == (384, 384)


def test_less_memory_means_smaller_sizes_then_a_refusal(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((6000, 6000), "uint8"), chunk=250)

    def sizes(memory: str) -> tuple[int, int]:
        run = {"memory_per_worker": memory}
        job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, shard=256, run=run)
        plan = make_plan(job)
        assert plan.memory_bytes <= parse_bytes(memory)
        return plan.grid.block[0], work_of(plan).task.tiling.tile[0]

    large, medium, small = sizes("4GiB"), sizes("724MiB"), sizes("706MiB")
    assert large > medium > small
    with pytest.raises(MemoryRefused, match=r"run\.memory_per_worker is 700MiB; one block .* needs 70\d MiB"):
        sizes("700MiB")


def test_a_plan_that_does_not_fit_can_be_looked_at(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((600, 600), "uint8"), chunk=300)
    run = {"memory_per_worker": "100MiB"}
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, run=run), refuse=False)
    assert plan.summary()["peak_memory_per_worker_bytes"] > parse_bytes("100MiB")
    with pytest.raises(MemoryRefused, match="the program itself"):
        plan.check_fits()


def test_a_small_shard_needs_no_chunk_to_be_given(source: Path, tmp_path: Path) -> None:
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1}, shard=128, chunk="auto")
    layout = make_plan(job).layout
    assert (layout.shard, layout.chunk) == ((128, 128), (128, 128))


@pytest.mark.parametrize(
    ("chunk", "sigma", "memory", "ways"),
    [
        (300, 1e9, "1GiB", "Choose a denoiser that looks less far."),
        (300, 900, "800MiB", r"Write run.memory_per_worker: \d+MiB, or choose a denoiser that looks less far."),
        (9000, 1, "800MiB", r"Write run.memory_per_worker: \d+MiB, or store the input in smaller chunks."),
        (300, 1, "100MiB", r"Write run.memory_per_worker: \d+MiB."),
    ],
)
def test_a_refusal_names_what_can_help(tmp_path: Path, chunk: int, sigma: float, memory: str, ways: str) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((9000, 9000), "uint16"), chunk=chunk)
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": sigma}, run={"memory_per_worker": memory})
    with pytest.raises(MemoryRefused, match=rf"needs .*\. {ways}$"):
        make_plan(job)


@pytest.mark.parametrize(("workers", "refused"), [(5, False), (9, True)])
def test_more_workers_than_the_machine_has_memory_for_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, refused: bool
) -> None:
    monkeypatch.setattr(plan, "machine_bytes", lambda: 3 * 2**30)
    run = {"workers": workers, "memory_per_worker": "64GiB"}
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, run=run)
    if not refused:
        make_plan(job)
        return
    with pytest.raises(MemoryRefused, match=r"run\.workers is 9; each needs 7\d\d MiB.*has 3 GiB.*workers: [56],"):
        make_plan(job)


def test_workers_on_other_machines_do_not_count_here(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "machine_bytes", lambda: 2**30)
    monkeypatch.setattr(plan, "check_job", lambda _: None)
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, run={"workers": 500})
    make_plan(replace(job, cluster=Cluster(kind="elsewhere")))


def test_sizes_shrink_to_what_the_machine_has_for_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((6000, 6000), "uint8"), chunk=250)
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, shard=256, run={"workers": 4})
    roomy = make_plan(job)
    monkeypatch.setattr(plan, "machine_bytes", lambda: 240 * 2**20 + 4 * 476 * 2**20)
    tight = make_plan(job)
    assert tight.memory_bytes <= 716 * 2**20 < roomy.memory_bytes


def test_a_window_that_is_cut_at_the_picture_needs_no_more_than_the_picture(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((700, 900)), chunk=250)
    options = {"strength": 0.1, "iterations": 5000}
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", options, shard="auto", chunk="auto"))
    assert work_of(plan).task.tiling.depth[0] >= (5000, 5000)
    assert footprint_of(plan)[READ] == 700 * 900 * 4 * (1 + work_of(plan).task.overlap)
    assert plan.summary()["compute_redundancy"] == round(700 * 900 / (512 * 512), 4)


def test_a_refusal_for_memory_names_a_depth_that_is_to_blame(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((6000, 6000), "uint8"), chunk=250)
    options = {"strength": 0.1, "iterations": 1000}
    run = {"memory_per_worker": "750MiB"}
    with pytest.raises(MemoryRefused, match=r"With depth 1\d\d\d, a tile of 128 × 128 pixels computes \d+ ×"):
        make_plan(job_of(source, tmp_path / "o.zarr", "tv", options, run=run))


@pytest.mark.parametrize(("rows", "noted"), [(None, True), (64, False)])
def test_an_input_of_one_compressed_piece_is_counted_and_noted(tmp_path: Path, rows: int | None, noted: bool) -> None:
    pixels = (noisy_image((2048, 2048)) * 1000).astype("uint16")
    tifffile.imwrite(tmp_path / "a.tif", pixels, compression="zlib", rowsperstrip=rows or 2048)
    job = job_of(tmp_path / "a.tif", tmp_path / "o.zarr", "gaussian", {"sigma": 1}, shard=256)
    plan = make_plan(job)
    assert any("pieces of 2048 × 2048 pixels" in note for note in plan.notes) == noted
    assert footprint_of(plan)[DECODED] == 2 * 2 * 2048 * (rows or 2048)


def test_an_input_that_is_decoded_whole_is_counted_and_noted(tmp_path: Path) -> None:
    pixels = (noisy_image((2048, 2048)) * 1000).astype("uint16")
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(pixels))
    (tmp_path / "mask.png").write_bytes(imagecodecs.png_encode(np.ones((2048, 2048), "uint8")))
    job = job_of(tmp_path / "a.png", tmp_path / "o.zarr", "gaussian", {"sigma": 1}, shard=256)
    plan = make_plan(job)
    assert any("keeps the last one (8 MiB)" in note for note in plan.notes)
    assert footprint_of(plan)[DECODED] == 2 * 2 * 2048**2
    masked = replace(job, input=replace(job.input, sides={"mask": str(tmp_path / "mask.png")}))
    assert footprint_of(make_plan(masked))[DECODED] == (2 * 2 + 1) * 2048**2


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_an_input_too_large_to_decode_is_refused_before_it_is(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.zeros((8192, 4096), "uint16")
    if name == "a.png":
        (tmp_path / name).write_bytes(imagecodecs.png_encode(pixels))
    else:
        tifffile.imwrite(tmp_path / name, pixels, compression="zlib", rowsperstrip=8192)
    monkeypatch.setattr(StoredArray, "read", lambda *_: pytest.fail("it was read"))
    job = job_of(tmp_path / name, tmp_path / "o.zarr", "tv", {"strength": 0.1}, run={"memory_per_worker": "100MiB"})
    with pytest.raises(MemoryRefused, match=r"8192 × 4096 pixels, 64 MiB each.*takes 128 MiB.*in small chunks"):
        make_plan(job)


def test_an_output_larger_than_the_disk_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DiskRefused, match=r"output takes up to 576 KiB, and .* has 1,000 B free"):
        make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}))


def test_memory_that_no_smaller_tile_would_save_is_asked_for(source: Path, tmp_path: Path) -> None:
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1}, run={"memory_per_worker": "65MiB"})
    with pytest.raises(MemoryRefused, match=r"Write run.memory_per_worker: 70\dMiB\.$"):
        make_plan(job)


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [("nlm", {"strength": 0.1}, 1.3), ("gaussian", {"sigma": 2.0}, 1.3), ("tv", {"strength": 0.1}, 1.6)],
)
def test_the_halo_of_a_volume_costs_little(tmp_path: Path, name: str, options: dict[str, Any], most: float) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (512, 512, 512))
    job = job_of(
        tmp_path / "a.npy", tmp_path / "out.zarr", name, options, shard="auto", chunk="auto",
        input={"axes": "zyx"}, tile={"axes": "zyx"}, run={"memory_per_worker": "4GiB", "workers": 2},
    )  # fmt: skip
    plan = make_plan(job)
    assert plan.summary()["compute_redundancy"] <= most
    plan.check_fits()


def test_a_deep_halo_gets_larger_blocks_where_memory_allows_it(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (1024, 1024, 1024))

    def plan_with(memory: str) -> Plan:
        job = job_of(
            tmp_path / "a.npy", tmp_path / "out.zarr", "tv", {"strength": 0.1}, shard="auto", chunk="auto",
            input={"axes": "zyx"}, tile={"axes": "zyx"}, run={"memory_per_worker": memory, "workers": 2},
        )  # fmt: skip
        return make_plan(job)

    redundant = {memory: plan_with(memory).summary()["compute_redundancy"] for memory in ("4GiB", "8GiB")}
    assert redundant["8GiB"] <= 1.3 < redundant["4GiB"] < 1.5
    with claim(plan_with("8GiB")):
        pass
    assert plan_with("8GiB").earlier.resumes
    assert plan_with("9GiB").earlier.resumes
