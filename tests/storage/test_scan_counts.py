"""What a user is told of the patterns of a scan: light in the corners, hot pixels, and pixels that are no counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import skimage
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.storage.scans.convert import Framing, PatternCounts
from halotile.storage.scans.scan import open_scan

COUNT, EDGE = 20, 32


ROWS, COLUMNS = np.indices((EDGE, EDGE)) - EDGE // 2


DISC = 200.0 * (np.hypot(ROWS, COLUMNS) < 6) + 0.2


PATTERNS = np.random.default_rng(0).poisson(DISC, (COUNT, EDGE, EDGE)).astype(np.int32)


GEOMETRY = ("--energy", "8.8 keV", "--distance", "2 m", "--pixel", "50 um", "--position-unit", "um")


NAMED = ("--patterns", "frames", "--positions", "places")


def convert(folder: Path, patterns: Any, *options: str, code: int = 0, **arrays: Any) -> tuple[Any, str]:
    """Convert patterns; return the scan with its patterns in their order, and what is said of them."""
    with h5py.File(folder / "scan.h5", "w") as file:
        arrays = {"places": np.random.default_rng(1).uniform(0, 1, (len(patterns), 2)), **arrays}
        for name, array in {"frames": patterns, **arrays}.items():
            file[name] = array
    path = str(folder / "scan.zarr")
    words = ["convert", str(folder / "scan.h5"), path, "--overwrite", *NAMED, *GEOMETRY, *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    said = " ".join(done.output.split())
    if code:
        return None, said
    scan, found = open_scan(path)
    shown = " ".join(CliRunner().invoke(app, ["info", path]).output.split())
    assert all(text in said and text in shown for _, text in scan.remarks)
    return (scan, found[:][np.argsort(scan.numbers)]), said


def test_light_in_the_corners_is_told_and_moved_to_the_middle(tmp_path: Path) -> None:
    bad = np.zeros((EDGE, EDGE), bool)
    bad[3, 4] = True
    (scan, found), said = convert(tmp_path, PATTERNS, "--bad-pixels", "bad", bad=bad)
    assert "note" not in said
    cornered = np.fft.ifftshift(PATTERNS, (1, 2))
    options = ("--bad-pixels", "bad")
    assert "write --corner" in convert(tmp_path, cornered, *options, bad=np.fft.ifftshift(bad))[1]
    (moved, same), said = convert(tmp_path, cornered, *options, "--corner", bad=np.fft.ifftshift(bad))
    assert "note" not in said
    assert np.array_equal(same, found)
    assert np.array_equal(moved.mask, scan.mask)
    (_, cropped), _ = convert(tmp_path, cornered, "--corner", "--crop", "16")
    assert np.array_equal(cropped, found[:, 8:24, 8:24])
    assert "Leave one of them out" in convert(tmp_path, cornered, "--corner", "--center", "0,0", code=2)[1]


@pytest.mark.parametrize("options", [(), ("--crop", "24"), ("--bin", "2"), ("--corner",)])
def test_hot_pixels_are_named_as_they_are_in_the_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    hot = PATTERNS.copy()
    hot[:, 7, 9], hot[:, 22, 25] = 20_000, 50_000
    hot[4, 12, 20] = 30_000  # in one pattern only
    _, said = convert(tmp_path, hot, *options)
    assert "2 pixels are more than 10 times as bright as all around in nearly every pattern" in said
    assert '--bad-pixels "7,9 22,25"' in said
    (scan, _), said = convert(tmp_path, hot, *options, "--bad-pixels", "7,9 22,25")
    assert "10 times" not in said
    assert (~scan.mask).sum() == 2
    outside = convert(tmp_path, hot, "--bad-pixels", "7,32", code=2)[1]
    assert "--bad-pixels 7,32: the patterns have 32 rows and 32 columns" in outside


def test_dead_pixels_and_beams_that_vary_are_told(tmp_path: Path) -> None:
    counts = PATTERNS.copy()
    counts[::4] //= 5
    counts[:, 15, 18] = counts[:, 3, 4] = 0
    counts[7] = 0
    counts[7, 2, 2] = 3  # a dark count
    (scan, _), said = convert(tmp_path, counts)
    assert "a pixel that never counts is in the midst of light" in said
    assert '--bad-pixels "15,18"' in said
    assert "write intensities into model.refine" in said
    assert "1 blank pattern, in which next to nothing was counted: number 7 of the file" in said
    assert sorted(scan.numbers) == [n for n in range(COUNT) if n != 7]
    path = tmp_path / "job.yaml"
    places = f"input: {{path: {tmp_path}/scan.zarr}}\noutput: {{path: {tmp_path}/a.cxi}}\n"
    path.write_text(f"version: 1\njob: ptychography\n{places}")
    planned = halotile.plan(path)
    assert any("never counts" in note for note in planned.notes)


def test_a_beam_stop_and_saturated_pixels_are_told(tmp_path: Path) -> None:
    stopped = np.where((np.hypot(ROWS, COLUMNS) < 3) | ((ROWS > 0) & (COLUMNS == 0)), 0, PATTERNS)
    said = convert(tmp_path, stopped)[1]
    assert "pixels in the middle never count, in the midst of light, as behind a beam stop" in said
    assert "note" not in convert(tmp_path, stopped, "--bad-pixels", "bad", bad=stopped.sum(0) == 0)[1]
    bright = np.random.default_rng(0).poisson(25 * DISC, (COUNT, EDGE, EDGE)).astype(np.uint16)
    assert "note" not in convert(tmp_path, bright)[1]
    _, said = convert(tmp_path, bright.clip(max=4095))
    assert "pixels have 4,095 counts in some pattern, and none more, as saturated ones do" in said


@pytest.mark.parametrize(("flag", "kind"), [(-1, np.int32), (np.nan, np.float32)])
def test_gaps_are_told_and_left_out_as_negative(tmp_path: Path, flag: float, kind: Any) -> None:
    gap = PATTERNS.astype(kind)
    gap[:, 3, :] = flag
    said = convert(tmp_path, gap, code=4)[1]
    assert "32 of the pixels are negative or NaN in 20 of 20 patterns" in said
    assert f"the first one is {flag:g} in pattern 0, row 3, column 0" in said
    assert "as gaps and bad pixels are. Leave them out: --bad-pixels negative" in said
    assert not list(tmp_path.glob(".*"))
    (scan, found), said = convert(tmp_path, gap, "--bad-pixels", "negative")
    assert "32 pixels of the detector left out" in said
    assert (~scan.mask).sum() == (~scan.mask[3]).sum() == EDGE
    assert np.array_equal(found[:, scan.mask], PATTERNS[:, scan.mask])


def test_words_are_those_of_the_command(tmp_path: Path) -> None:
    convert(tmp_path, PATTERNS)
    source, path = str(tmp_path / "scan.h5"), str(tmp_path / "scan.zarr")
    there = f"the path is {path}: something stands there. Write another path, or --overwrite."
    for words, said in (
        ([source, path], there),
        ([f"{source}5", f"{path}2"], f"there is no file {source}5."),
        ([f"{source}.npy", f"{path}2"], f"there is no file {source}.npy."),
        ([source, f"{path}2", "--position-unit", "10 m"], "Write their unit, such as --position-unit um"),
    ):
        done = CliRunner().invoke(app, ["convert", *words[:2], *NAMED, *GEOMETRY, *words[2:]])
        assert done.exit_code in (2, 4)
        assert said in " ".join(done.output.split()).replace("- ", "-")


def test_a_probe_of_the_file_is_begun_with_where_it_is_named(tmp_path: Path) -> None:
    modes = np.random.default_rng(2).normal(size=(2, EDGE, EDGE)) * (1 + 1j)
    scan, _ = convert(tmp_path, PATTERNS, "--probe", "light", light=modes)[0]
    assert np.array_equal(scan.probe, modes.astype(np.complex64))
    recipe = halotile.ptychography.open(tmp_path / "scan.zarr", modes=2)
    found = recipe.state.probe.numpy()
    assert np.allclose(found / found[0, 0, 0], modes / modes[0, 0, 0], rtol=1e-5)
    assert np.square(np.abs(found)).sum() == pytest.approx(PATTERNS.sum((1, 2)).mean(), rel=1e-4)
    named = ("--probe", "light")
    assert "Leave --probe out" in convert(tmp_path, PATTERNS, *named, light=modes[:, 1:], code=4)[1]
    said = convert(tmp_path, PATTERNS, *named, "--bin", "2", light=modes, code=2)[1]
    assert "--bin and --corner out" in said


def test_patterns_that_cannot_be_and_a_result_that_is_not_there_yet_are_refused(tmp_path: Path) -> None:
    assert "has no patterns" in convert(tmp_path, PATTERNS[:0], code=4)[1]
    said = convert(tmp_path, PATTERNS - np.random.default_rng(0).normal(0, 1, PATTERNS.shape), code=4)[1]
    assert "If a dark image was subtracted, store the counts from before that" in said
    many = np.full((COUNT, EDGE, EDGE), 2**31, np.uint32)
    assert convert(tmp_path, many)[0][1].max() == 2**31
    said = "a pattern has 8,589,934,592 counts in a pixel"
    assert said in convert(tmp_path, many, "--bin", "2", code=4)[1], "more than can be kept"
    path = tmp_path / "result.cxi"
    path.touch()
    (tmp_path / "result.cxi.run").mkdir()
    for words in (["info", str(path)], ["export", str(path), str(tmp_path / "sheet.png")]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 4
        assert f"recon-cli resume {path}.run" in "".join(done.output.split("\n"))


@pytest.mark.parametrize("name", ["retina", "immunohistochemistry", "camera", "moon", "brick", "coins", "page"])
def test_nothing_is_told_of_ordinary_patterns(name: str) -> None:
    image = np.asarray(getattr(skimage.data, name)(), float)
    image = image if image.ndim == 2 else image.mean(-1)
    views = np.array([image[y : y + 64, x : x + 64] for y in range(64, 96, 8) for x in range(64, 96, 8)])
    distance = np.hypot(*(np.indices((64, 64)) - 32))
    kinds = [views]  # as of a near field
    for width in (3.0, 8.0, 20.0):
        waves = np.exp(-((distance / width) ** 2)) * np.exp(1j * views / 128)
        kinds.append(np.abs(np.fft.fftshift(np.fft.fft2(waves), (1, 2))) ** 2)
    for kind, dose in itertools.product(kinds, (None, 1e5, 300)):
        draw: Callable[[Any], Any] = np.random.default_rng(0).poisson
        exact = kind if dose is None else kind * dose / kind.sum((1, 2)).mean()
        patterns = exact if dose is None else draw(exact)
        seen = PatternCounts(patterns.shape, None, Framing())
        seen.cleaned(patterns, np.arange(len(patterns)))
        assert (seen.notes(), seen.blank().tolist()) == ([], [])
