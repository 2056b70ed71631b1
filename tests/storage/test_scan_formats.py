"""Scans in PtyD files and in arrays that are named: the values that were written; and what a user learns of odd patterns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import skimage
import zarr
from typer.testing import CliRunner

import halotile
from halotile import ptychography
from halotile.cli.main import app
from halotile.errors import ConfigError
from halotile.storage.scans.convert import Framing, PatternCounts
from halotile.storage.scans.scan import open_scan, open_summary

RASTER, EDGE = (5, 7), 8


COUNT = RASTER[0] * RASTER[1]


PATTERNS = np.random.default_rng(0).poisson(3, (COUNT, EDGE, EDGE)).astype(np.uint16)


PLACES = np.indices(RASTER).reshape(2, -1).T * ((2e-7, 3e-7))


GOOD = np.arange(EDGE**2).reshape(EDGE, EDGE) != 13


GEOMETRY = ("--energy", "12.39842 keV", "--distance", "2 m", "--pixel", "50 um,30um")


NAMED = ("--patterns", "raw/frames", "--positions", "raw/places")


def convert(source: Path, *options: str, wrong: str = "") -> Path:
    """Convert a scan; or see that this is refused with some words."""
    path = source.with_name("scan.zarr")
    done = CliRunner().invoke(app, ["convert", str(source), str(path), "--overwrite", *options])
    assert (done.exit_code == 0) == (not wrong), done.output
    assert wrong in " ".join(done.output.split())
    return path


def check(path: Path, places: Any = PLACES, good: Any = GOOD) -> None:
    """Compare a scan with what was written."""
    scan, patterns = open_scan(str(path))
    assert scan.wavelength == pytest.approx(1e-10, rel=1e-6)
    assert (scan.distance, *scan.pixel) == pytest.approx((2.0, 5e-5, 3e-5))
    assert np.array_equal(patterns[:], PATTERNS[scan.numbers])
    assert sorted(scan.numbers) == list(range(COUNT))
    assert np.allclose(scan.positions, places[scan.numbers], rtol=1e-9, atol=1e-15)
    assert (None if scan.mask is None else scan.mask.tolist()) == (None if good is None else good.tolist())
    mean, maximum = open_summary(str(path))
    assert np.allclose(mean, PATTERNS.mean(0), rtol=1e-6)
    assert np.array_equal(maximum, PATTERNS.max(0))


def write_ptyd(path: Path) -> Path:
    """Write chunks of 20 and 15 patterns, the second one in a file of its own."""
    with h5py.File(path, "w") as file, h5py.File(path.with_suffix(".part001"), "w") as part:
        for number, (group, first, last) in enumerate([(file.create_group("chunks/0"), 0, 20), (part, 20, COUNT)]):
            group["data"] = PATTERNS[first:last]
            group["positions"] = PLACES[first:last]
            weights = np.broadcast_to(GOOD, (last - first, EDGE, EDGE)).astype(np.float32)
            if number:  # a pixel counts where it does in all of them
                weights = np.ones_like(weights)
                weights[3] = GOOD
            group["weights"] = weights
        file["chunks/1"] = h5py.ExternalLink(path.with_suffix(".part001").name, "/")
        for name, value in {"energy": 12.39842, "distance": 2.0, "psize": [5e-5, 3e-5], "center": [4.0, 4.0]}.items():
            file[f"meta/{name}"] = value
    return path


def write_patterns(path: Path, patterns: Any, chunks: tuple[int, ...]) -> list[str]:
    """Write patterns as an array by themselves, or under a name; return the options that name them."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, patterns)
        return []
    if path.suffix == ".zarr":
        zarr.create_array(str(path / "frames"), data=patterns, chunks=chunks)
        zarr.open_group(str(path), mode="a")
        return ["--patterns", "frames"]
    write_named(path, frames=patterns)
    return ["--patterns", "raw/frames"]


def write_named(path: Path, **arrays: Any) -> Path:
    """Write datasets into a group of an HDF5 file."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[f"raw/{name}"] = array
    return path


def test_a_scan_of_ptypy_is_read(tmp_path: Path) -> None:
    source = write_ptyd(tmp_path / "scan.ptyd")
    check(convert(source))
    assert f"{COUNT} of {EDGE} × {EDGE}, uint16" in CliRunner().invoke(app, ["info", str(source)]).output
    scan, _ = open_scan(str(convert(source, *(("--energy", "6.19921 keV", "--distance", "1 m", "--pixel", "10 um")))))
    assert (scan.wavelength, scan.distance, *scan.pixel) == pytest.approx((2e-10, 1.0, 1e-5, 1e-5), rel=1e-6)
    with h5py.File(source, "r+") as file:
        file["meta/center"][...] = [3, 5]
    assert open_scan(str(convert(source)))[1].shape == (COUNT, 6, 6)
    with h5py.File(source, "r+") as file:
        del file["meta/center"]
        file["meta/center"] = "fftshift"
    assert open_scan(str(convert(source)))[1].shape == (COUNT, EDGE, EDGE)
    convert(source, "--positions", "info/places", wrong="Leave --positions and --step out")
    (tmp_path / "scan.part001").unlink()
    convert(source, wrong="a file that it links is not there")


PLACED: list[tuple[Any, str]] = [
    (PLACES, ""), (1e6 * PLACES, "--position-unit um"), (PLACES / 5e-9, "--position-unit 5nm"),
    (PLACES[:, ::-1], "--position-axes x,y"), (PLACES * [-1, 1], "--position-axes -y,x"),
    (PLACES[:, ::-1] * [1, -1], "--position-axes x,-y"), (PLACES[:, ::-1] * [1, -1], "--rotation 90"),
    (np.c_[np.arange(COUNT), PLACES], "--position-axes z,y,x"), (np.c_[PLACES[:, ::-1], np.arange(COUNT)], "--position-axes x,y"),
]  # fmt: skip


def test_places_have_the_unit_and_the_axes_that_are_given(tmp_path: Path) -> None:
    for places, options in PLACED:
        source = write_named(tmp_path / "scan.h5", frames=PATTERNS, places=places, bad=~GOOD)
        check(convert(source, *NAMED, *GEOMETRY, "--bad-pixels", "raw/bad", *options.split()))


def test_places_may_be_in_two_arrays_or_in_a_file_of_their_own(tmp_path: Path) -> None:
    source = write_named(tmp_path / "scan.h5", frames=PATTERNS, rows=PLACES[:, 0], columns=PLACES[:, 1])
    check(convert(source, *GEOMETRY, *NAMED[:2], "--positions", "raw/rows,raw/columns"), good=None)
    np.savetxt(tmp_path / "places.csv", PLACES, delimiter=",")
    np.save(tmp_path / "good.npy", GOOD)
    files = ("--positions", str(tmp_path / "places.csv"), "--good-pixels", str(tmp_path / "good.npy"))
    check(convert(source, *GEOMETRY, *NAMED[:2], *files))


def test_a_recording_is_not_replaced_by_its_scan_which_is_drawn(tmp_path: Path) -> None:
    source = write_ptyd(tmp_path / "scan.ptyd")
    path, run = convert(source), CliRunner().invoke
    for words in ((source, source), (source, tmp_path), ((path / "patterns", path, "--step", "1 um", *GEOMETRY))):
        assert run(app, ["convert", *map(str, words), "--overwrite"]).exit_code != 0
    assert source.is_file()
    assert open_scan(str(path))[1].shape == (COUNT, EDGE, EDGE)
    for code in (0, 2):
        assert run(app, ["export", str(path), str(tmp_path / "scan.png")]).exit_code == code
    assert (tmp_path / "scan.png").read_bytes()[1:4] == b"PNG"
    with h5py.File(source, "r+") as file:  # chunks of other types keep their counts
        del file["chunks/0/data"]
        file["chunks/0/data"] = (PATTERNS[:20] % 200).astype(np.uint8)
    scan, patterns = open_scan(str(convert(source)))
    later = scan.numbers >= 20
    assert np.array_equal(patterns[:][later], PATTERNS[scan.numbers[later]])


@pytest.mark.parametrize("format_", ["npy", "zarr", "h5"])
def test_a_raster_of_four_axes_is_read_and_positions_may_be_last(tmp_path: Path, format_: str) -> None:
    raster, source = PATTERNS.reshape(*RASTER, EDGE, EDGE), tmp_path / f"raster.{format_}"
    turned = np.ascontiguousarray(raster.transpose(2, 3, 0, 1))
    options = [*GEOMETRY, "--step", "0.2,0.3 um" if format_ == "npy" else "0.2 um,0.3 um"]
    for pixels, which in ((raster, "first two axes of 5 × 7 × 8 × 8"), (turned, "last two axes of 8 × 8 × 5 × 7")):
        said = f"the {which}"
        named = write_patterns(tmp_path / said[4:8] / source.name, pixels, (2, 3, EDGE, EDGE))
        path = convert(tmp_path / said[4:8] / source.name, *options, *["--positions-last"] * (pixels is turned), *named)
        check(path, good=None)
        assert open_scan(str(path))[0].remarks == (("raster", f"5 × 7 positions, {said}"),)
    np.save(tmp_path / "places.npy", PLACES)
    source = tmp_path / "row" / source.name
    named = write_patterns(source, np.ascontiguousarray(PATTERNS.transpose(1, 2, 0)), (3, 3, 10))
    if format_ == "zarr":
        source, named = source / "frames", []  # the array by itself
    placed = ("--positions", str(tmp_path / "places.npy"), "--positions-last")
    check(convert(source, *GEOMETRY, *placed, *named), good=None)
    if format_ == "npy":  # a raster that is larger than its patterns
        np.save(source, PATTERNS[:20].reshape(4, 5, EDGE, EDGE).transpose(2, 3, 0, 1))
        remarks = dict(open_scan(str(convert(source, *GEOMETRY, "--step", "0.2 um")))[0].remarks)
        assert remarks["raster"] == "8 × 8 positions, the first two axes of 8 × 8 × 4 × 5"
        assert "write --positions-last" in remarks["note"]


def test_electrons_have_their_wavelength_and_pixels_an_angle(tmp_path: Path) -> None:
    np.save(tmp_path / "raster.npy", PATTERNS.reshape(*RASTER, EDGE, EDGE))
    options = ("--energy", "300 keV", "--electrons", "--pixel", "0.5 mrad", "--step", "0.4 Å")
    scan, _ = open_scan(str(convert(tmp_path / "raster.npy", *options)))
    assert scan.wavelength == pytest.approx(1.9687e-12, rel=1e-4)
    assert scan.pixel[0] / scan.distance == pytest.approx(5e-4)
    rows = CliRunner().invoke(app, ["info", str(tmp_path / "scan.zarr")]).output
    assert "0.5 × 0.5 mrad" in rows
    assert "to the detector" not in rows
    with pytest.raises(ConfigError, match="pixels as angles, without the distance"):
        ptychography.open(tmp_path / "scan.zarr", field="near")
    assert np.ptp(scan.positions[:, 1]) == pytest.approx(6 * 4e-11)


UNKNOWN: list[tuple[Sequence[str], str]] = [
    ((), "is no CXI file. Write for --patterns one of raw/frames, raw/places, raw/places3."),
    (("--patterns", "raw/frame", *GEOMETRY), "has no dataset raw/frame. Write for --patterns one of raw/"),
    (("--patterns", "raw/frames", *GEOMETRY), "nothing says where the beam was. Write --positions."),
    ((*NAMED, *GEOMETRY[:2]), "Write --distance, --pixel."),
    *(((*NAMED, *GEOMETRY, "--position-axes", axes), "Write y,x or x,y") for axes in ("a,b", "y-,x", "y,y")),
    ((*NAMED, *GEOMETRY, "--position-axes", "x,y,z"), "have 2 columns, and the axes are x,y,z"),
    ((*NAMED[:3], "raw/places3", *GEOMETRY), "and a place has 2. Say which is which: --position-axes x,y,z"),
    ((*NAMED, *GEOMETRY, "--position-unit", "furlong"), "--position-unit 1 furlong: no length"),
    ((*NAMED, *GEOMETRY[2:], "--energy", "12"), "such as 8.8 keV"),
    ((*NAMED, *GEOMETRY[:2], "--pixel", "1 mrad", "--distance", "1 m"), "Leave one of them out"),
    ((*NAMED, *GEOMETRY, "--step", "1 um"), "Leave one of them out"),
    ((*NAMED, *GEOMETRY[2:], "--electrons"), "Write both"),
    ((*NAMED, *GEOMETRY, "--position-unit", ""), "no length above 0"),
    ((*NAMED, *GEOMETRY, "--bad-pixels", "raw/places"), "mask has shape"),
    ((*NAMED[:2], *GEOMETRY, "--positions", "raw/frames"), "Name an array of (positions, 2)"),
    ((*NAMED[:2], *GEOMETRY, "--positions", "nowhere.csv"), "nowhere.csv cannot be read"),
]  # fmt: skip


def test_what_is_not_known_is_asked_for(tmp_path: Path) -> None:
    arrays = {"frames": PATTERNS, "places": PLACES, "places3": np.c_[PLACES, PLACES[:, :1]]}
    source = write_named(tmp_path / "scan.h5", **arrays)
    for options, said in UNKNOWN:
        convert(source, *options, wrong=said)
    for kind in (np.complex64, np.bool_):
        source = write_named(tmp_path / "odd.h5", frames=PATTERNS.astype(kind), places=PLACES)
        convert(source, *NAMED, *GEOMETRY, wrong=f"the patterns are {np.dtype(kind).name}, which are not counts")
    convert(write_ptyd(tmp_path / "s.ptyd"), "--positions-last", wrong="Leave --positions-last out")


SHOTS, SIDE = 20, 32


ROWS, COLUMNS = np.indices((SIDE, SIDE)) - SIDE // 2


DISC = 200.0 * (np.hypot(ROWS, COLUMNS) < 6) + 0.2


DISCS = np.random.default_rng(0).poisson(DISC, (SHOTS, SIDE, SIDE)).astype(np.int32)


SETUP = ("--energy", "8.8 keV", "--distance", "2 m", "--pixel", "50 um", "--position-unit", "um")


FRAMES = ("--patterns", "frames", "--positions", "places")


def said_of(folder: Path, patterns: Any, *options: str, code: int = 0, **arrays: Any) -> tuple[Any, str]:
    """Convert patterns; return the scan with its patterns in their order, and what is said of them."""
    with h5py.File(folder / "scan.h5", "w") as file:
        arrays = {"places": np.random.default_rng(1).uniform(0, 1, (len(patterns), 2)), **arrays}
        for name, array in {"frames": patterns, **arrays}.items():
            file[name] = array
    path = str(folder / "scan.zarr")
    words = ["convert", str(folder / "scan.h5"), path, "--overwrite", *FRAMES, *SETUP, *options]
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
    bad = np.zeros((SIDE, SIDE), bool)
    bad[3, 4] = True
    (scan, found), said = said_of(tmp_path, DISCS, "--bad-pixels", "bad", bad=bad)
    assert "note" not in said
    cornered = np.fft.ifftshift(DISCS, (1, 2))
    options = ("--bad-pixels", "bad")
    assert "write --corner" in said_of(tmp_path, cornered, *options, bad=np.fft.ifftshift(bad))[1]
    (moved, same), said = said_of(tmp_path, cornered, *options, "--corner", bad=np.fft.ifftshift(bad))
    assert "note" not in said
    assert np.array_equal(same, found)
    assert np.array_equal(moved.mask, scan.mask)
    (_, cropped), _ = said_of(tmp_path, cornered, "--corner", "--crop", "16")
    assert np.array_equal(cropped, found[:, 8:24, 8:24])
    assert "Leave one of them out" in said_of(tmp_path, cornered, "--corner", "--center", "0,0", code=2)[1]


@pytest.mark.parametrize("options", [(), ("--crop", "24"), ("--bin", "2"), ("--corner",)])
def test_hot_pixels_are_named_as_they_are_in_the_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    hot = DISCS.copy()
    hot[:, 7, 9], hot[:, 22, 25] = 20_000, 50_000
    hot[4, 12, 20] = 30_000  # in one pattern only
    _, said = said_of(tmp_path, hot, *options)
    assert "2 pixels are more than 10 times as bright as all around in nearly every pattern" in said
    assert '--bad-pixels "7,9 22,25"' in said
    (scan, _), said = said_of(tmp_path, hot, *options, "--bad-pixels", "7,9 22,25")
    assert "10 times" not in said
    assert (~scan.mask).sum() == 2
    outside = said_of(tmp_path, hot, "--bad-pixels", "7,32", code=2)[1]
    assert "--bad-pixels 7,32: the patterns have 32 rows and 32 columns" in outside


def test_dead_pixels_and_beams_that_vary_are_told(tmp_path: Path) -> None:
    counts = DISCS.copy()
    counts[::4] //= 5
    counts[:, 15, 18] = counts[:, 3, 4] = 0
    counts[7] = 0
    counts[7, 2, 2] = 3  # a dark count
    (scan, _), said = said_of(tmp_path, counts)
    assert "a pixel that never counts is in the midst of light" in said
    assert '--bad-pixels "15,18"' in said
    assert "write intensities into model.refine" in said
    assert "1 blank pattern, in which next to nothing was counted: number 7 of the file" in said
    assert sorted(scan.numbers) == [n for n in range(SHOTS) if n != 7]
    path = tmp_path / "job.yaml"
    places = f"input: {{path: {tmp_path}/scan.zarr}}\noutput: {{path: {tmp_path}/a.cxi}}\n"
    path.write_text(f"version: 1\njob: ptychography\n{places}")
    planned = halotile.plan(path)
    assert any("never counts" in note for note in planned.notes)


def test_a_beam_stop_and_saturated_pixels_are_told(tmp_path: Path) -> None:
    stopped = np.where((np.hypot(ROWS, COLUMNS) < 3) | ((ROWS > 0) & (COLUMNS == 0)), 0, DISCS)
    said = said_of(tmp_path, stopped)[1]
    assert "pixels in the middle never count, in the midst of light, as behind a beam stop" in said
    assert "note" not in said_of(tmp_path, stopped, "--bad-pixels", "bad", bad=stopped.sum(0) == 0)[1]
    bright = np.random.default_rng(0).poisson(25 * DISC, (SHOTS, SIDE, SIDE)).astype(np.uint16)
    assert "note" not in said_of(tmp_path, bright)[1]
    _, said = said_of(tmp_path, bright.clip(max=4095))
    assert "pixels have 4,095 counts in some pattern, and none more, as saturated ones do" in said


@pytest.mark.parametrize(("flag", "kind"), [(-1, np.int32), (np.nan, np.float32)])
def test_gaps_are_told_and_left_out_as_negative(tmp_path: Path, flag: float, kind: Any) -> None:
    gap = DISCS.astype(kind)
    gap[:, 3, :] = flag
    said = said_of(tmp_path, gap, code=4)[1]
    assert "32 of the pixels are negative or NaN in 20 of 20 patterns" in said
    assert f"the first one is {flag:g} in pattern 0, row 3, column 0" in said
    assert "as gaps and bad pixels are. Leave them out: --bad-pixels negative" in said
    assert not list(tmp_path.glob(".*"))
    (scan, found), said = said_of(tmp_path, gap, "--bad-pixels", "negative")
    assert "32 pixels of the detector left out" in said
    assert (~scan.mask).sum() == (~scan.mask[3]).sum() == SIDE
    assert np.array_equal(found[:, scan.mask], DISCS[:, scan.mask])


def test_words_are_those_of_the_command(tmp_path: Path) -> None:
    said_of(tmp_path, DISCS)
    source, path = str(tmp_path / "scan.h5"), str(tmp_path / "scan.zarr")
    for words, said in (
        ([source, path], f"the path is {path}: it already exists. Write another path, or --overwrite."),
        ([f"{source}5", f"{path}2"], f"there is no file {source}5."),
        ([f"{source}.npy", f"{path}2"], f"there is no file {source}.npy."),
        ([source, f"{path}2", "--position-unit", "10 m"], "Write their unit, such as --position-unit um"),
    ):
        done = CliRunner().invoke(app, ["convert", *words[:2], *FRAMES, *SETUP, *words[2:]])
        assert done.exit_code in (2, 4)
        assert said in " ".join(done.output.split()).replace("- ", "-")


def test_a_probe_of_the_file_is_begun_with_where_it_is_named(tmp_path: Path) -> None:
    modes = np.random.default_rng(2).normal(size=(2, SIDE, SIDE)) * (1 + 1j)
    scan, _ = said_of(tmp_path, DISCS, "--probe", "light", light=modes)[0]
    assert np.array_equal(scan.probe, modes.astype(np.complex64))
    found = halotile.ptychography.open(tmp_path / "scan.zarr", modes=2).state.probe.numpy()
    assert np.allclose(found / found[0, 0, 0], modes / modes[0, 0, 0], rtol=1e-5)
    assert np.square(np.abs(found)).sum() == pytest.approx(DISCS.sum((1, 2)).mean(), rel=1e-4)
    named = ("--probe", "light")
    assert "Leave --probe out" in said_of(tmp_path, DISCS, *named, light=modes[:, 1:], code=4)[1]
    assert "--bin and --corner out" in said_of(tmp_path, DISCS, *named, "--bin", "2", light=modes, code=2)[1]


def test_patterns_that_cannot_be_and_a_result_that_is_not_there_yet_are_refused(tmp_path: Path) -> None:
    assert "has no patterns" in said_of(tmp_path, DISCS[:0], code=4)[1]
    said = said_of(tmp_path, DISCS - np.random.default_rng(0).normal(0, 1, DISCS.shape), code=4)[1]
    assert "If a dark image was subtracted, store the counts from before that" in said
    many = np.full((SHOTS, SIDE, SIDE), 2**31, np.uint32)
    assert said_of(tmp_path, many)[0][1].max() == 2**31
    said = "a pattern has 8,589,934,592 counts in a pixel"
    assert said in said_of(tmp_path, many, "--bin", "2", code=4)[1], "more than can be kept"
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
