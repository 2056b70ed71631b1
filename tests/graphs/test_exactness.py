"""The tiled result has the bits of the whole image, however it is cut and whoever computes it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
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
EDGES, F = (301, 270), "float32"
CASES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    **{dtype: (dtype, EDGES, {}) for dtype in (F, "uint16", "uint8", "float16")},
    **{str(shape): (F, shape, {}) for shape in ((17, 19), (1, 300), (129, 130), (64, 200), (300, 3))},
    "tiles of 77": (F, EDGES, {"size": 77, "batch": 3}),
    "tiles and blocks": (F, EDGES, {"size": (50, 90), "block": (128, 256)}),
    "depth of 40": (F, EDGES, {"depth": 40}),
    "tiles of 64": (F, EDGES, {"size": 64}),
    "tiles of 100": (F, EDGES, {"size": 100, "batch": 1}),
    "tiles of 512": (F, EDGES, {"size": 512}),
    "large blocks": (F, EDGES, {"size": 64, "block": 256}),
}
SELDOM = ("uint8", "float16", "(64, 200)", "(300, 3)", "tiles of 64", "tiles of 100", "tiles of 512", "large blocks")


def options_of(name: str, folder: Path) -> dict[str, Any]:
    extra = {"weights": str(dncnn_weights(folder / "w.safetensors"))} if name == "dncnn" else {}
    return DENOISERS[name] | extra


def depth_of(job: Denoising) -> int:
    depth: int = work_of(make_plan(job)).task.tiling.depth[0][0]
    return depth


@pytest.mark.parametrize("case", all_of(CASES, thorough=SELDOM))
@pytest.mark.parametrize("name", DENOISERS)
def test_tiles_have_the_bits_of_the_whole_picture_however_it_is_cut(name: str, case: str, tmp_path: Path) -> None:
    dtype, shape, cut = CASES[case]
    pixels = noisy_image(shape, dtype)
    source, options = write_zarr(tmp_path / "in.zarr", pixels), options_of(name, tmp_path)
    plain = job_of(source, tmp_path / "out.zarr", name, options)
    result = run_inline(job_of(source, tmp_path / "cut.zarr", name, options, tile=cut))
    assert np.array_equal(result, whole_picture(plain, pixels, depth_of(plain)))


@pytest.mark.parametrize("kernel", [thorough(1), 3])
@pytest.mark.parametrize(
    "name", all_of(["Mish", "Sigmoid", "Softplus", "SiLU", "GELU"], thorough=["Mish", "Softplus", "SiLU"])
)
def test_activations_have_their_bits_wherever_a_tile_ends(name: str, kernel: int, tmp_path: Path) -> None:
    pixels = noisy_image((253, 277), "float32")
    options = {"import": "tests.networks:activated", "options": {"name": name, "kernel": kernel}}
    source = write_zarr(tmp_path / "in.zarr", pixels)
    for number, cut in enumerate(({"size": 75}, {"size": 64, "batch": 3})):
        job = job_of(source, tmp_path / f"{number}.zarr", "torch", options, tile=cut)
        assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth=2))


@pytest.mark.parametrize("name", ["gaussian", "median", thorough("tv")])
def test_volumes_are_tiled_on_three_axes(name: str, tmp_path: Path) -> None:
    pixels, tile = noisy_image((40, 70, 60)), {"size": 24, "axes": "zyx"}
    source = write_zarr(tmp_path / "in.zarr", pixels, chunk=32, axes="zyx")
    job = job_of(source, tmp_path / "out.zarr", name, DENOISERS[name], shard=32, chunk=16, tile=tile)
    assert make_plan(job).summary()["tiled_axes"] == "zyx"
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth_of(job), spatial=3))


@pytest.mark.parametrize("wanted", ["zarr", "ome-zarr"])
def test_channels_last_keep_their_order_in_a_bare_array(tmp_path: Path, wanted: Literal["zarr", "ome-zarr"]) -> None:
    pixels = noisy_image((150, 140, 3), "uint8")
    source = write_zarr(tmp_path / "in.zarr", pixels, axes="yxc")
    job = job_of(source, tmp_path / "out.zarr", "gaussian", DENOISERS["gaussian"])
    want = whole_picture(job, np.moveaxis(pixels, -1, 0), depth_of(job))
    found = run_inline(replace(job, output=replace(job.output, format=wanted)))
    assert np.array_equal(found, np.moveaxis(want, 0, -1) if wanted == "zarr" else want)


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "workers"), [("tv", 2), ("dncnn", 2), ("dncnn", 4), thorough("dncnn", 1)])
def test_any_workers_give_the_same_bits(name: str, workers: int, cluster: RunningCluster, tmp_path: Path) -> None:
    pixels, options = noisy_image((401, 330)), options_of(name, tmp_path)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    job = job_of(source, tmp_path / "out.zarr", name, options, run={"workers": workers})
    plan = make_plan(job)
    order = Order(workers=workers, memory_bytes=4 * 2**30)
    with nullcontext(cluster) if workers == 2 else local.start(order) as several:
        outcome = run(plan, cluster=several)
    assert outcome.done == outcome.total == len(plan.grid)
    assert np.array_equal(read_zarr(plan.output), whole_picture(job, pixels, depth_of(job)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "depth", "width", "tile"),
    [((1500, 1700), 7, 32, 700), ((1100, 1300), 9, 64, 512), ((110, 1100), 17, 64, 512)],
)
def test_networks_of_the_widths_that_people_use_have_the_bits_of_the_whole(
    tmp_path: Path, shape: tuple[int, int], depth: int, width: int, tile: int
) -> None:
    pixels, source = noisy_image(shape), write_zarr(tmp_path / "in.zarr", noisy_image(shape))
    weights = str(dncnn_weights(tmp_path / "w.safetensors", depth, width))
    options = {"weights": weights, "depth": depth, "width": width}
    job = job_of(source, tmp_path / "out.zarr", "dncnn", options, tile={"size": tile})
    assert work_of(make_plan(job)).task.tiling.tile != shape
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))
