"""A plan refuses a reconstruction that cannot be meant, and notes what probably is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.engine import ask, printed, refused, sets

REFLECT = ("operators[0].boundary=reflect",)
REFUSED = [
    ("k0", np.array([[0.5, np.nan]]), REFLECT, "operators[0]: kernel has 1 of 2 numbers that are NaN or infinite. Write finite ones."),
    ("k0", np.zeros((3, 3)), REFLECT, "operators[0]: kernel is 0 everywhere: the measurement would be empty. Write another kernel."),
    ("k0", np.ones(5), REFLECT, "operators[0]: kernel has shape (5,): write an array of rows and columns"),
    ("k0", np.ones((2, 2, 3, 3)), REFLECT, "operators[0]: kernel has shape (2, 2, 3, 3): write an array of rows and columns"),
    ("k0", np.ones((3, 3), complex), REFLECT, "operators[0]: kernel is complex128: a blur adds light. Write real numbers."),
    ("k0", np.ones((201, 201)), REFLECT, "operators[0]: the kernel is 201 pixels long and the image 96: with boundary reflect the kernel must be"),
    ("k0", np.ones((3, 5, 5)), REFLECT, "operators[0]: the kernel has shape (3, 5, 5), one for each of 3 planes, but the image of"),
    ("y0", np.ones((50, 80), "f4"), (), "y0.npy has shape [50, 80], but blur of an image of shape [96, 80] gives [96, 80]. Write shape"),
    ("y0", np.ones(80, "f4"), (), "y0.npy: the array's shape is (80,): an image has at least the axes y and x"),
    ("m", np.ones((20, 20), "f4"), (), "operators[1]: the mask has shape (20, 20) and the image (96, 80). Write a mask of the image's shape"),
    ("truth", np.ones((50, 80), "f4"), (), "truth.npy has shape [50, 80], and the image has [96, 80]. Give one of that shape."),
    ("", None, ("operators[1]={name: composition, operators: [], data: y1.npy}",), "operators[1]: a composition without operators"),
    ("", None, ("solver.checkpoint_every=2", "fuse=false"), "solver.checkpoint_every: 2 with fuse: false, and a gradient that is stored"),
]  # fmt: skip
BAD_DATA = ("y0.npy: the array's", "truth.npy has")
"""Beginnings of messages about files, not about the job."""


@pytest.mark.parametrize(("name", "pixels", "settings", "words"), REFUSED)
def test_a_plan_refuses_what_cannot_be_meant(
    reconstruction: Path, name: str, pixels: Any, settings: tuple[str, ...], words: str
) -> None:
    if name:
        np.save(reconstruction.with_name(f"{name}.npy"), pixels)
    code = 4 if words.startswith(BAD_DATA) else 2
    assert words in refused("plan", reconstruction, *sets(*settings), code=code)


@pytest.mark.parametrize("solver", ["pgd", "pgd, step: 0.1", "cg"])
@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("name: mask, mask: zeros.npy", "operators[0]: the mask is 0 everywhere: nothing of the image would be measured"),
        ("name: shift, shift: [500, 0]", "operators[0]: shift is (500, 0) and the image is 96 pixels long: only the zeros"),
    ],
)  # fmt: skip
def test_an_operator_that_sees_nothing_is_refused(reconstruction: Path, operator: str, words: str, solver: str) -> None:
    np.save(reconstruction.with_name("zeros.npy"), np.zeros((96, 80)))
    settings = (f"operators=[{{{operator}, data: y0.npy}}]", f"solver={{name: {solver}}}", "prior={name: none}")
    assert words in refused("plan", reconstruction, *sets(*settings))


@pytest.mark.parametrize(
    ("kernel", "note"),
    [
        (np.full((3, 3), 2 / 9), "the kernel sums to 2: the image comes out 0.5 times as bright as the measurement"),
        (np.full((3, 3), -1 / 9), "the kernel sums to -1: light is taken away"),
        (np.full((4, 3), 1 / 12), "the kernel is 4 × 3: an even edge has no middle pixel, and the image comes out half"),
    ],
    ids=["bright", "dark", "even"],
)  # fmt: skip
def test_a_kernel_that_was_hardly_meant_is_noted(reconstruction: Path, kernel: Any, note: str) -> None:
    np.save(reconstruction.with_name("k0.npy"), kernel)
    result = ask("plan", reconstruction, "--json")
    assert [note in said for said in json.loads(result.stdout)["notes"]] == [True]


@pytest.mark.parametrize(
    ("shape", "reference", "noted"), [("auto", "null", True), ("[192, 160]", "null", False), ("auto", "big.npy", False)]
)
def test_an_inferred_shape_is_told(reconstruction: Path, shape: str, reference: str, noted: bool) -> None:
    np.save(reconstruction.with_name("big.npy"), np.ones((192, 160), np.float32))
    settings = ("operators=[{name: downsample, factor: 2, data: y0.npy}]", "start=null")
    words = sets(*settings, f"shape={shape}", f"reference={reference}")
    result = ask("plan", reconstruction, "--json", *words)
    note = "shape is auto: the image is taken to be 192 × 160, 4 times the pixels"
    assert any(note in said for said in json.loads(result.stdout)["notes"]) == noted


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("measured", "measured: that is the input. Write another path"),
        ("measured/x.zarr", "measured is a file, so nothing can be made in it"),
        ("no/x.zarr", "there is no folder"),
    ],
)
def test_an_output_cannot_be_what_is_read(reconstruction: Path, path: str, words: str) -> None:
    reconstruction.with_name("y0.npy").rename(reconstruction.with_name("measured"))
    settings = sets("operators[0].data=measured", f"output.path={path}")
    assert words in refused("plan", reconstruction, *settings)


def test_a_plan_tells_of_several_iterations_in_a_pass(reconstruction: Path) -> None:
    words = ("plan", reconstruction, "--set", "solver.checkpoint_every=2")
    assert " for each of 2 in one pass, which computes " in printed(*words)
    figures = json.loads(printed(*words, "--json"))
    assert (figures["per_pass"], figures["total_passes"]) == (2, figures["passes_before"] + 2 + 1)
    assert "direct convolutions" in figures["form"]


def test_a_plan_notes_iterations_that_look_farther_than_a_block(reconstruction: Path) -> None:
    text = printed("plan", reconstruction, *sets("solver.checkpoint_every=4", "prior.denoiser.sigma=3"))
    assert "of the gradient more than once: so many iterations look far" in " ".join(text.split())


def test_what_sees_the_whole_image_needs_every_iteration_stored(tmp_path: Path) -> None:
    pytest.importorskip("deepinv")
    for name in ("mask", "y"):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 20, 16), np.float32))
    (tmp_path / "job.yaml").write_text(
        "version: 1\njob: reconstruct\noutput: {path: x.zarr}\noperators:\n"
        "  - {name: deepinv, physics: MRI, options: {mask: mask.npy}, data: y.npy}\n"
        "solver: {name: pgd, step: 0.5, iterations: 4, checkpoint_every: 2}\n"
    )
    text = refused("plan", tmp_path / "job.yaml")
    assert "solver.checkpoint_every is 2, and operators[0] (deepinv) sees the whole image" in text
