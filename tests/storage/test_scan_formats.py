"""Scans in PtyD files and in arrays that are named: the same values as were written; and what a user is told of odd patterns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from halotile import ptychography
from halotile.cli.main import app
from halotile.errors import ConfigError
from halotile.storage.scans.scan import open_scan, open_summary

RASTER, EDGE = (5, 7), 8


COUNT = RASTER[0] * RASTER[1]


STEP = (2e-7, 3e-7)


PATTERNS = np.random.default_rng(0).poisson(3, (COUNT, EDGE, EDGE)).astype(np.uint16)


PLACES = np.indices(RASTER).reshape(2, -1).T * STEP


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
        groups = [(file.create_group("chunks/0"), 0, 20), (part, 20, COUNT)]
        for number, (group, first, last) in enumerate(groups):
            group["data"] = PATTERNS[first:last]
            group["positions"] = PLACES[first:last]
            weights = np.broadcast_to(GOOD, (last - first, EDGE, EDGE)).astype(np.float32)
            if number:  # a pixel counts where it does in all of them
                weights = np.ones_like(weights)
                weights[3] = GOOD
            group["weights"] = weights
        file["chunks/1"] = h5py.ExternalLink(path.with_suffix(".part001").name, "/")
        said = {"energy": 12.39842, "distance": 2.0, "psize": [5e-5, 3e-5], "center": [4.0, 4.0]}
        for name, value in said.items():
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
    said = CliRunner().invoke(app, ["info", str(source)])
    assert f"{COUNT} of {EDGE} × {EDGE}, uint16" in said.output
    options = ("--energy", "6.19921 keV", "--distance", "1 m", "--pixel", "10 um")
    scan, _ = open_scan(str(convert(source, *options)))
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


@pytest.mark.parametrize(
    ("places", "options"),
    [
        (PLACES, ()),
        (1e6 * PLACES, ("--position-unit", "um")),
        (PLACES / 5e-9, ("--position-unit", "5 nm")),
        (PLACES[:, ::-1], ("--position-axes", "x,y")),
        (PLACES * [-1, 1], ("--position-axes", "-y,x")),
        (PLACES[:, ::-1] * [1, -1], ("--position-axes", "x,-y")),
        (PLACES[:, ::-1] * [1, -1], ("--rotation", "90")),
        (np.c_[np.arange(COUNT), PLACES], ("--position-axes", "z,y,x")),
        (np.c_[PLACES[:, ::-1], np.arange(COUNT)], ("--position-axes", "x,y")),
    ],
)
def test_places_have_the_unit_and_the_axes_that_are_given(tmp_path: Path, places: Any, options: Sequence[str]) -> None:
    source = write_named(tmp_path / "scan.h5", frames=PATTERNS, places=places, bad=~GOOD)
    check(convert(source, *NAMED, *GEOMETRY, "--bad-pixels", "raw/bad", *options))


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
    own = (path / "patterns", path, "--step", "1 um", *GEOMETRY)
    for words in ((source, source), (source, tmp_path), own):
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
