"""Plans note a value far from all others that many pixels share and nothing declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.data import retina

from halotile.graphs.plans.plan import make_plan
from tests.graphs.holed import FILTERS, NODATA, scene
from tests.support import job_of, write_zarr


def far_notes(folder: Path, pixels: NDArray[Any], name: str = "tv", **parts: Any) -> list[str]:
    source = write_zarr(folder / "far.zarr", pixels) if not (folder / "far.zarr").exists() else folder / "far.zarr"
    options = {"strength": 1.0, "sigma": "auto"} if name == "tv" else FILTERS[name]
    plan = make_plan(job_of(source, folder / "far.out.zarr", name, options, **parts))
    return [note for note in plan.notes if "far from all others" in note]


@pytest.mark.parametrize("name", ["tv", "gaussian"])
def test_a_value_far_from_all_others_is_noted(tmp_path: Path, name: str) -> None:
    pixels, holes = scene(NODATA)
    low, high = pixels[~holes].min(), pixels[~holes].max()
    (note,) = far_notes(tmp_path, pixels, name)
    expected = f"{holes.sum():,} pixels are -9999, far from all others ({low:,.5g} to {high:,.5g}): "
    assert (
        note
        == f"{expected}if they are no measurements, write input.nodata: -9999, or they may spoil the pixels around them"
    )
    assert far_notes(tmp_path, pixels, name, input={"nodata": NODATA}) == []
    assert far_notes(tmp_path, pixels, name, input={"nodata": "none"}) == []


@pytest.mark.parametrize("alone", [True, False])
def test_areas_of_a_far_integer_are_noted_and_hot_pixels_are_defects(tmp_path: Path, alone: bool) -> None:
    pixels = np.random.default_rng(0).normal(200, 30, (600, 600)).clip(0, 399).astype(np.uint16)
    pixels.flat[::1000] = 65535
    if alone:
        assert far_notes(tmp_path, pixels) == []
        return
    pixels[300:310, 300:310] = 65535
    (note,) = far_notes(tmp_path, pixels)
    assert "% of the pixels, by samples, are 65535, far from all others" in note
    assert "write input.nodata: 65535, or" in note


@pytest.mark.parametrize("kind", ["photo", "float photo", "mask", "few"])
def test_images_without_such_a_value_have_no_note(tmp_path: Path, kind: str) -> None:
    photo = np.rint((retina()[:600, :600, 1] - 100.0) * 3).clip(0, 255)
    photo += 0 if kind == "mask" else np.random.default_rng(0).integers(0, 9, photo.shape)
    pixels = photo.clip(0, 255).astype("float32" if "float" in kind else "uint8")
    if kind == "mask":
        pixels = np.where(np.random.default_rng(0).random(pixels.shape) < 0.5, 0, 255).astype(np.uint8)
    if kind == "few":
        pixels = pixels.astype(np.float32)
        pixels.flat[:5] = 1e6
    assert far_notes(tmp_path, pixels) == []
