"""Channels that a job selects, and that have settings of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from halotile.errors import ConfigError
from halotile.graphs.plans.make import make_plan
from tests.support import Image, job_of, noisy_image, run_inline, write_zarr

NAMES = ["DAPI", "GFP", "FISH", "Cy5"]


def stained(folder: Path, pixels: Image | None = None, name: str = "a.tif") -> Path:
    """Four channels with names and colours."""
    pixels = noisy_image((4, 96, 80), "uint16") if pixels is None else pixels
    colours = [0x0000FFFF, 0x00FF00FF, -16776961, 0xFFFF00FF - 2**32]
    channels = {"Name": NAMES[: len(pixels)], "Color": colours[: len(pixels)]}
    tifffile.imwrite(folder / name, pixels, ome=True, metadata={"axes": "CYX", "Channel": channels})
    return folder / name


@pytest.mark.parametrize(
    ("wanted", "numbers"), [(["FISH", "DAPI"], [2, 0]), ([1, "Cy5"], [1, 3]), ([2], [2]), (["3"], [3])]
)
def test_channels_are_selected_with_what_describes_them(tmp_path: Path, wanted: list[Any], numbers: list[int]) -> None:
    pixels = noisy_image((4, 96, 80), "uint16")
    job = job_of(stained(tmp_path, pixels), tmp_path / "o.zarr", "none", input={"channels": tuple(wanted)})
    assert (run_inline(job) == pixels[numbers]).all()
    whole: Any = make_plan(replace(job, input=replace(job.input, channels=()))).layout.omero
    omero: Any = make_plan(job).layout.omero
    for kept, number in zip(omero["channels"], numbers, strict=True):
        assert (kept["label"], kept["color"]) == (NAMES[number], whole["channels"][number]["color"])


def test_a_selection_is_part_of_the_identity(tmp_path: Path) -> None:
    job = job_of(stained(tmp_path), tmp_path / "o.zarr", "none")
    one, other, none = (
        make_plan(replace(job, input=replace(job.input, channels=each))) for each in (("DAPI",), ("GFP",), ())
    )
    assert one.fingerprint != other.fingerprint
    assert "channels" not in none.identity["input"]


def test_a_map_of_all_channels_is_selected_too(tmp_path: Path) -> None:
    pixels = noisy_image((4, 96, 80))
    sigma = np.broadcast_to(np.array([0.1, 0.2, 0.3, 0.4], "float32")[:, None, None], pixels.shape)
    source = write_zarr(tmp_path / "a.zarr", pixels, axes="cyx")
    results = []
    for number, side in enumerate((sigma, sigma[[3, 1]])):
        path = write_zarr(tmp_path / f"s{number}.zarr", np.ascontiguousarray(side))
        given = {"channels": (3, 1), "sides": {"sigma": str(path)}}
        results.append(run_inline(job_of(source, tmp_path / f"o{number}.zarr", "tv", {"strength": 1.0}, input=given)))
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize(
    ("wanted", "axes", "words"),
    [
        (("DAPY",), None, "no channel DAPY, but DAPI (0), GFP (1), FISH (2), Cy5 (3). Did you mean DAPI?"),
        (("dapi",), None, "no channel dapi"),
        ((4,), None, "no channel 4"),
        ((-1,), None, "no channel -1"),
        (("DAPI", 0), None, "a channel twice"),
        ((0,), "zyx", "has no channels"),
    ],
)
def test_channels_that_there_are_not(tmp_path: Path, wanted: tuple[Any, ...], axes: str | None, words: str) -> None:
    job = job_of(stained(tmp_path), tmp_path / "o.zarr", "none", input={"channels": wanted, "axes": axes})
    with pytest.raises(ConfigError) as caught:
        make_plan(job)
    assert words in str(caught.value)
