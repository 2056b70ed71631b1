"""Pixels that cannot be denoised are refused by their place in the image."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from halotile.errors import InputError
from halotile.graphs.plans.plan import make_plan
from halotile.storage.grid import Region
from halotile.storage.rim import Rim, read_window
from halotile.storage.sharded.output import create_output
from halotile.tasks.block import BlockRunner, Receipt
from halotile.tasks.denoise_block import check_image, check_side
from halotile.tasks.operators.base import InMemory
from tests.support import Image, job_of, noisy_image, work_of, write_zarr


def with_one(value: float, at: tuple[int, ...], shape: tuple[int, ...] = (70, 90)) -> InMemory:
    pixels = noisy_image(shape)
    pixels[at] = value
    return InMemory(pixels)


def test_the_first_bad_pixel_is_named_by_its_place_in_the_image() -> None:
    for at, rule in itertools.product(
        ((0, 3), (69, 89), (31, 40)), ("reflect", "nearest", "periodic", "constant", "cut")
    ):
        source, rim, window = with_one(np.inf, at), Rim.everywhere(rule, 2), Region((-20, -20), (90, 110))
        pixels = read_window(source, window, rim)
        message = rf"rows 0–69, columns 0–89; the first is at row {at[0]}, column {at[1]}\. .*on_nan: propagate"
        with pytest.raises(InputError, match=message):
            check_image(pixels, source, window, rim, ("y", "x"))


def test_other_axes_are_named_by_their_letters() -> None:
    source, rim = with_one(np.nan, (2, 5, 6), (4, 30, 30)), Rim.everywhere("cut", 3)
    window = Region((1, 0, 0), (4, 20, 20))
    with pytest.raises(InputError, match="z 1–3, rows 0–19, columns 0–19; the first is at z 2, row 5, column 6"):
        check_image(read_window(source, window, rim), source, window, rim, ("z", "y", "x"))


def test_a_side_input_with_invalid_pixels_is_refused() -> None:
    rows: list[tuple[str, float, str]] = [
        ("sigma", np.nan, "sigma holds NaN, infinity or negative values"),
        ("sigma", -0.5, "sigma holds NaN, infinity or negative values"),
        ("mask", np.inf, "mask holds NaN or infinity"),
    ]
    rim, window, axes = Rim.everywhere("reflect", 2), Region((-9, -9), (50, 50)), ("y", "x")
    for name, value, words in rows:
        source = with_one(value, (7, 8))
        with pytest.raises(InputError, match=f"the side input {words} in .* row 7, column 8"):
            check_side(name, read_window(source, window, rim), source, window, rim, axes)
    source = with_one(-1.0, (7, 8))
    check_side("mask", read_window(source, window, rim), source, window, rim, axes)


def run_with_sigma(tmp_path: Path, sigma: Image) -> Receipt:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((2, 300, 260)), axes="tyx")
    sides = {"sigma": str(write_zarr(tmp_path / "sigma.zarr", sigma))}
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": 0.1}, input={"sides": sides})
    plan = make_plan(job)
    create_output(plan.output, plan.layout)
    return BlockRunner(work_of(plan).task).run(range(len(plan.grid)))


def test_a_block_with_a_bad_noise_map_is_refused_and_not_tried_again(tmp_path: Path) -> None:
    sigma = np.full((300, 260), 0.1, "float32")
    sigma[200, 30] = -1
    receipt = run_with_sigma(tmp_path, sigma)
    assert {bad.kind for bad in receipt.bad} == {"input"}
    assert "the first is at row 200, column 30" in receipt.bad[0].error
    assert receipt.done


def test_a_noise_map_in_counts_is_refused_for_a_image_that_is_mapped() -> None:
    counts = np.full((8, 8), 150, np.uint16)
    place = InMemory(counts), Region.whole((8, 8)), Rim.everywhere("cut", 2), ("y", "x")
    check_side("sigma", counts, *place)
    check_side("mask", counts, *place, (0.0, 4095.0))
    with pytest.raises(InputError, match=r"holds 150. The image's 0 to 4095 .* as 0 to 1.*Divide the map by 4095"):
        check_side("sigma", counts, *place, (0.0, 4095.0))
