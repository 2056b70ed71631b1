"""The tiled result has the bits of the whole image, however it is cut and whoever computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from tests.cases import all_of, thorough
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, run_inline, whole_picture, work_of, write_zarr

DENOISERS: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 1.7},
    "median": {"size": 5},
    "tv": {"strength": 0.1, "iterations": 12},
    "nlm": {"strength": 0.1, "patch": 3, "distance": 4},
    "dncnn": {"depth": 5, "width": 8},
}
CUTS: list[dict[str, Any]] = [{"size": 77, "batch": 3}, {"size": (50, 90), "block": (128, 256)}, {"depth": 40}]
MORE_CUTS: list[dict[str, Any]] = [{"size": 64}, {"size": 100, "batch": 1}, {"size": 512}, {"size": 64, "block": 256}]


def options_of(name: str, folder: Path) -> dict[str, Any]:
    extra = {"weights": str(dncnn_weights(folder / "w.safetensors"))} if name == "dncnn" else {}
    return DENOISERS[name] | extra


@pytest.mark.parametrize("name", DENOISERS)
@pytest.mark.parametrize("dtype", all_of(["float32", "uint8", "uint16", "float16"], thorough=["uint8", "float16"]))
def test_tiles_have_the_bits_of_the_whole_picture(name: str, dtype: str, tmp_path: Path) -> None:
    pixels = noisy_image((301, 270), dtype)
    job = job_of(write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "out.zarr", name, options_of(name, tmp_path))
    depth = work_of(make_plan(job)).task.tiling.depth[0][0]
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))


@pytest.mark.parametrize("cut", all_of(CUTS + MORE_CUTS, thorough=MORE_CUTS), ids=str)
@pytest.mark.parametrize("name", DENOISERS)
def test_the_bits_do_not_depend_on_the_cut(name: str, cut: dict[str, Any], tmp_path: Path) -> None:
    pixels = noisy_image((301, 270))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    options = options_of(name, tmp_path)
    plain = job_of(source, tmp_path / "out.zarr", name, options)
    depth = work_of(make_plan(plain)).task.tiling.depth[0][0]
    cut_otherwise = job_of(source, tmp_path / "cut.zarr", name, options, tile=cut)
    assert np.array_equal(run_inline(cut_otherwise), whole_picture(plain, pixels, depth))


@pytest.mark.parametrize(
    "cut", [{"size": 75}, thorough({"size": 151, "batch": 1}), thorough({"size": 64, "batch": 3})], ids=str
)
@pytest.mark.parametrize("kernel", [thorough(1), 3])
@pytest.mark.parametrize(
    "name", all_of(["Mish", "Sigmoid", "Softplus", "SiLU", "GELU"], thorough=["Mish", "Softplus", "SiLU"])
)
def test_activations_have_their_bits_wherever_a_tile_ends(
    name: str, kernel: int, cut: dict[str, Any], tmp_path: Path
) -> None:
    pixels = noisy_image((253, 277), "float32")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    options = {"import": "tests.networks:activated", "options": {"name": name, "kernel": kernel}}
    job = job_of(source, tmp_path / "out.zarr", "torch", options, tile=cut)
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth=2))


@pytest.mark.parametrize("shape", [(17, 19), thorough((64, 200)), (1, 300), (129, 130), thorough((300, 3))], ids=str)
@pytest.mark.parametrize("name", DENOISERS)
def test_small_and_ragged_pictures_are_exact_too(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    pixels = noisy_image(shape)
    job = job_of(write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "out.zarr", name, options_of(name, tmp_path))
    depth = work_of(make_plan(job)).task.tiling.depth[0][0]
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))


@pytest.mark.parametrize("name", ["gaussian", "median", thorough("tv")])
def test_volumes_are_tiled_on_three_axes(name: str, tmp_path: Path) -> None:
    pixels = noisy_image((40, 70, 60))
    source = write_zarr(tmp_path / "in.zarr", pixels, chunk=32, axes="zyx")
    job = job_of(
        source, tmp_path / "out.zarr", name, DENOISERS[name], shard=32, chunk=16, tile={"size": 24, "axes": "zyx"}
    )
    plan = make_plan(job)
    assert plan.summary()["tiled_axes"] == "zyx"
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, work_of(plan).task.tiling.depth[0][0], spatial=3))


def test_other_axes_are_looped_plane_by_plane(tmp_path: Path) -> None:
    pixels = noisy_image((2, 3, 150, 140), "uint16")
    source = write_zarr(tmp_path / "in.zarr", pixels, axes="tcyx")
    job = job_of(source, tmp_path / "out.zarr", "tv", DENOISERS["tv"])
    depth = work_of(make_plan(job)).task.tiling.depth[0][0]
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))


@pytest.mark.parametrize("wanted", ["zarr", "ome-zarr"])
def test_channels_last_pictures_keep_their_axis_order_in_a_bare_array(
    tmp_path: Path, wanted: Literal["zarr", "ome-zarr"]
) -> None:
    pixels = noisy_image((150, 140, 3), "uint8")
    source = write_zarr(tmp_path / "in.zarr", pixels, axes="yxc")
    job = job_of(source, tmp_path / "out.zarr", "gaussian", DENOISERS["gaussian"])
    depth = work_of(make_plan(job)).task.tiling.depth[0][0]
    want = whole_picture(job, np.moveaxis(pixels, -1, 0), depth)
    found = run_inline(replace(job, output=replace(job.output, format=wanted)))
    assert np.array_equal(found, np.moveaxis(want, 0, -1) if wanted == "zarr" else want)


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["tv", "dncnn"])
def test_workers_give_the_same_bits(name: str, cluster: RunningCluster, tmp_path: Path) -> None:
    pixels = noisy_image((601, 530))
    job = job_of(write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "out.zarr", name, options_of(name, tmp_path))
    plan = make_plan(job)
    outcome = run(plan, cluster=cluster)
    assert outcome.done == outcome.total == len(plan.grid)
    assert np.array_equal(read_zarr(plan.output), whole_picture(job, pixels, work_of(plan).task.tiling.depth[0][0]))


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [thorough(1), 4])
def test_any_number_of_workers_gives_the_same_bits(workers: int, tmp_path: Path) -> None:
    pixels = noisy_image((401, 330))
    job = job_of(
        write_zarr(tmp_path / "in.zarr", pixels),
        tmp_path / "out.zarr",
        "dncnn",
        options_of("dncnn", tmp_path),
        run={"workers": workers},
    )
    plan = make_plan(job)
    with local.start(Order(workers=workers, memory_bytes=4 * 2**30)) as several:
        run(plan, cluster=several)
    assert np.array_equal(read_zarr(plan.output), whole_picture(job, pixels, work_of(plan).task.tiling.depth[0][0]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "depth", "width", "tile"),
    [thorough((1500, 1700), 7, 32, 700), thorough((1100, 1300), 9, 64, 512), ((110, 1100), 17, 64, 512)],
    ids=["7x32", "9x64", "17x64"],
)
def test_networks_of_the_widths_that_people_use_have_the_bits_of_the_whole(
    tmp_path: Path, shape: tuple[int, int], depth: int, width: int, tile: int
) -> None:
    pixels = noisy_image(shape)
    weights = str(dncnn_weights(tmp_path / "w.safetensors", depth, width))
    options = {"weights": weights, "depth": depth, "width": width}
    source = write_zarr(tmp_path / "in.zarr", pixels)
    job = job_of(source, tmp_path / "out.zarr", "dncnn", options, tile={"size": tile})
    assert work_of(make_plan(job)).task.tiling.tile != shape
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))
