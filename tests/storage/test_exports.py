"""Exports of images of any size, as tiled TIFF with levels and as PNG, in constant memory; planes of images with any axes."""

from __future__ import annotations

import errno
import itertools
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from halotile.errors import ConfigError, DamagedData, DiskRefused
from halotile.storage.arrays import open_source
from halotile.storage.formats.parts.ome_scale import Coordinates, known_sizes
from halotile.storage.grid import Grid, Region
from halotile.storage.images import planes as planes_module
from halotile.storage.images import tiff_export
from halotile.storage.images.planes import Planes, choose_planes
from halotile.storage.images.png import block_means, write_png
from halotile.storage.images.tiff_export import NextLevel, write_tiff
from halotile.storage.sharded.ome_metadata import OmeImage, order
from halotile.storage.sharded.output import Layout
from halotile.storage.spacing import SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME
from tests.cases import in_folders
from tests.storage.outputs import means, write_blocks

Pixels = NDArray[Any]


def image(shape: tuple[int, ...], dtype: str = "uint16") -> Pixels:
    return (np.random.default_rng(0).random(shape) * 200).astype(dtype)


def planes_of(folder: Path, pixels: Pixels, name: str = "a.npy", region: Any = None, **options: Any) -> Planes:
    np.save(folder / name, pixels)
    return choose_planes(open_source(folder / name, axes=options.get("axes")), options.get("at", {}), region)


def exported(folder: Path, pixels: Pixels, axes: str, **options: Any) -> Path:
    planes = planes_of(folder, pixels, axes=axes, **options)
    assert write_tiff(folder / "a.tif", planes) == (folder / "a.tif").stat().st_size
    return folder / "a.tif"


DTYPES = ["uint8", "int16", "uint16", "int32", "uint32", "float32", "float64"]


SHAPES = [
    ("yx", (300, 270)), ("yx", (1, 1)), ("yx", (600, 1)), ("zyx", (3, 77, 1)), ("qyx", (3, 77, 1)), ("yxc", (270, 1, 3)), ("zyx", (3, 40, 300)),
    ("tczyx", (2, 2, 3, 40, 30)), ("qyx", (2, 40, 30)), ("yxc", (270, 300, 3)), ("zyxc", (2, 20, 30, 4)),
]  # fmt: skip


def test_values_and_axes_come_back(tmp_path: Path) -> None:
    rows = [(*row, d) for row in SHAPES for d in ("uint16", "float32")]
    for axes, shape, dtype in rows + [(*row, d) for row in (SHAPES[0], SHAPES[8]) for d in DTYPES]:
        pixels = image(shape, dtype)
        if pixels.dtype.kind == "f":
            pixels[0, 0] = np.nan
        path = exported(tmp_path, pixels, axes)
        assert np.array_equal(tifffile.imread(path), pixels, equal_nan=dtype[0] == "f")
        back = open_source(path, axes=axes)
        assert (back.shape, "".join(back.axes), back.dtype.name) == (shape, axes, dtype)
        assert np.array_equal(back[...], pixels, equal_nan=dtype[0] == "f")
        # Without requested axes, an OME-TIFF is read in the axis order of OME-Zarr.
        ordered, places = open_source(path), order(tuple(axes))
        assert "".join(ordered.axes) == "".join(axes[place] for place in places)
        assert np.array_equal(ordered[...], pixels.transpose(places), equal_nan=dtype[0] == "f")
    for dtype, stored in {"float16": "float32", "bool": "uint8"}.items():  # which viewers do not support
        pixels = image((40, 30)) % 2 if dtype == "bool" else image((40, 30))
        found = tifffile.imread(exported(tmp_path, pixels.astype(dtype), "yx"))
        assert found.dtype == stored
        assert np.array_equal(found, pixels * (255 if dtype == "bool" else 1))
    pixels = image((2, 3, 300, 290))
    path = exported(tmp_path, pixels, "tcyx", at={"c": 2}, region=Region((10, 20), (290, 40)))
    assert np.array_equal(tifffile.imread(path), pixels[:, 2, 10:290, 20:40])
    assert "".join(open_source(path).axes) == "tyx"


def test_it_is_tiled_compressed_and_a_bigtiff_beyond_4_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_bytes in (10**3, 10**9):
        monkeypatch.setattr(tiff_export, "_CLASSIC_BYTES", limit_bytes)
        with tifffile.TiffFile(exported(tmp_path, np.zeros((600, 500), np.uint16), "yx")) as file:
            page: Any = file.pages[0]
            assert (page.tile, page.compression.name) == ((256, 256), "ADOBE_DEFLATE")
            assert file.is_bigtiff is (limit_bytes == 10**3)
    assert (tmp_path / "a.tif").stat().st_size < 10_000


def test_every_unit_of_ome_zarr_and_its_size_come_back(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", image((2, 3, 4)))
    source: Any = open_source(tmp_path / "in.npy", axes="tyx")
    for length, time in itertools.zip_longest(SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME, fillvalue="second"):
        length = "meter" if length == "second" else length
        source.scale, source.units = (0.25, 0.5, 0.125), (time, length, length)
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None))
        back = open_source(tmp_path / "a.tif")
        assert (back.scale, back.units, back.remarks) == (source.scale, source.units, ())
        assert known_sizes("tyx", Coordinates(back.scale, (), ()), back.units) == (source.scale, source.units, ())
        if per := {"nanometer": 1e7, "micrometer": 1e4, "millimeter": 10}.get(length):
            with tifffile.TiffFile(tmp_path / "a.tif") as file:
                tags = file.pages.first.tags
                found = [np.divide(*tags[f"{a}Resolution"].value) for a in "XY"]
                assert found == pytest.approx([per / 0.125, per / 0.5])
                assert tags["ResolutionUnit"].value == 3


def test_reads_are_bounded_and_progress_increases_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(900, 1000), chunks=(600, 100), dtype="u2")
    array[...] = image((900, 1000))
    monkeypatch.setattr(tiff_export, "LARGEST_TOP", 40)
    for window_bytes in (1, 256 * 256 * 2, 3 * 256 * 256 * 2, 10**9):
        monkeypatch.setattr(tiff_export, "WINDOW_BYTES", window_bytes)
        source, progress = open_source(tmp_path / "a.zarr"), list[float]()
        read = Mock(wraps=source.read)
        monkeypatch.setattr(source, "read", read)
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None), tick=progress.append)
        assert max(2 * call.args[0].size for call in read.call_args_list) <= max(window_bytes, 256 * 256 * 2)
        assert np.array_equal(tifffile.imread(tmp_path / "a.tif"), np.asarray(array))
        assert progress == sorted(progress)
        assert progress[-1] == pytest.approx(1), "of all levels"


def test_damage_or_a_full_disk_leaves_the_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(1200, 700), chunks=(600, 700), dtype="u2")
    array[...] = image((1200, 700))
    (tmp_path / "a.tif").write_bytes(b"before")
    whole = (tmp_path / "a.zarr/c/1/0").read_bytes()
    said = r"the disk ran full: .*a\.tif cannot be written .* Free some space and run again"
    for content, refused in ((b"xx", pytest.raises(DamagedData)), (whole, pytest.raises(DiskRefused, match=said))):
        (tmp_path / "a.zarr/c/1/0").write_bytes(content)
        if content is whole:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        with refused:
            write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
        assert (tmp_path / "a.tif").read_bytes() == b"before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tif", "a.zarr"]


def test_a_header_that_promises_too_much_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(image((20, 30), "uint8")).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / "a.png").write_bytes(content)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("room was reserved"))
    with pytest.raises(DamagedData):
        write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.png"), {}, None))


def levels_of(path: Path) -> list[Pixels]:
    with tifffile.TiffFile(path) as file:
        return [level.asarray() for level in file.series[0].levels]


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of small images."""
    monkeypatch.setattr(tiff_export, "LARGEST_TOP", 40)
    monkeypatch.setattr(tiff_export, "TILE", 16)
    monkeypatch.setattr(tiff_export, "WINDOW_BYTES", 3000)


@pytest.mark.usefixtures("small_images")
def test_each_pixel_is_the_mean_of_those_it_covers(tmp_path: Path) -> None:
    rows: list[tuple[str, tuple[int, ...]]] = [("yx", (151, 90)), ("tczyx", (2, 2, 2, 90, 37)), ("yx", (120, 2))]
    dtypes = ("uint8", "uint16", "int16", "uint32", "float32", "float64")
    for folder, ((axes, shape), dtype) in in_folders(tmp_path, itertools.product(rows, dtypes)):
        pixels = image(shape, dtype)
        path = exported(folder, pixels, axes)
        assert [p.name for p in sorted(folder.iterdir())] == ["a.npy", "a.tif"], "scratch files are removed"
        found = levels_of(path)
        assert len(found) == 3
        for finer, coarse in itertools.pairwise([pixels, *found[1:]]):
            np.testing.assert_allclose(coarse, means(finer), rtol=1e-6)
        assert open_source(path, level=2).shape == found[2].shape
    pixels = image((90, 70, 3), "uint8")
    coarse = levels_of(exported(tmp_path, pixels, "yxc"))[1]
    assert np.array_equal(coarse, np.moveaxis(means(np.moveaxis(pixels, 2, 0)), 0, 2))


@pytest.mark.usefixtures("small_images")
def test_holes_are_left_out_of_every_mean(tmp_path: Path) -> None:
    rows: list[tuple[str, float | None]] = [("float32", None), ("float32", -9999), ("uint16", 0)]
    for folder, (dtype, nodata) in in_folders(tmp_path, rows):
        pixels = image((100, 90), dtype) + 1
        pixels[20:41, 30:61] = np.nan if nodata is None else nodata
        array = zarr.create_array(folder / "a.zarr", data=pixels, chunks=(32, 32))
        if nodata is not None:
            array.attrs["missing_value"] = nodata
        write_tiff(folder / "a.tif", choose_planes(open_source(folder / "a.zarr"), {}, None))
        found = levels_of(folder / "a.tif")
        for finer, coarse in itertools.pairwise(found):
            np.testing.assert_allclose(coarse, means(finer, nodata), rtol=1e-6)
        if nodata is not None:
            assert ((found[0] == nodata).sum(), open_source(folder / "a.tif").nodata) == (21 * 31, nodata)
    flags = np.random.default_rng(0).random((600, 700)) > 0.5
    zarr.create_array(tmp_path / "b.zarr", data=flags, chunks=(64, 64), attributes={"_FillValue": True})
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(tmp_path / "b.zarr"), {}, None))
    with tifffile.TiffFile(tmp_path / "b.tif") as file:  # holes of bool are written as the pixels are
        assert file.pages[0].tags[42113].value.strip("\0") == "255"
        assert file.series[0].levels[1].asarray().max() == 255


def output(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Pixels:
    """An output of a run, with levels."""
    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 100)
    monkeypatch.setattr("halotile.storage.sharded.layout.SMALLEST_SHARD", 4)
    axes, scale, units = ("c", "y", "x"), (1.0, 0.5, 0.5), (None, "micrometer", "micrometer")
    layout = Layout((2, 300, 170), "uint8", (1, 32, 32), (1, 8, 8), "lz4", axes, scale, units, True, **changes)
    layout = layout.in_levels((1, 128, 128))
    pixels = image(layout.shape, "uint8")
    write_blocks(path, layout, pixels)
    return pixels


@pytest.mark.usefixtures("small_images")
def test_levels_of_an_output_are_taken_and_further_ones_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {"start": 0.0, "end": 9.0, "min": 0.0, "max": 255.0}
    colours = {"DAPI": "0000FF", "GFP": "80FF00"}
    channels = [{"label": label, "color": colour, "window": window} for label, colour in colours.items()]
    output(tmp_path / "a.zarr", monkeypatch, omero={"channels": channels}, name="cells")
    made: list[tuple[int, int]] = []
    make = NextLevel.make

    def noted(level: NextLevel) -> None:
        made.append(level.planes.shape)
        make(level)

    monkeypatch.setattr(NextLevel, "make", noted)
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
    found, group = levels_of(tmp_path / "a.tif"), zarr.open_group(tmp_path / "a.zarr", mode="r")
    for level in range(3):
        assert np.array_equal(found[level], np.asarray(group[str(level)]))
    assert np.array_equal(found[3], means(found[2]))
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(tmp_path / "a.zarr", level=1), {"c": 1}, None))
    assert made == [(75, 43)] * 2, "of the coarsest stored level"
    assert all(np.array_equal(a[1], b) for a, b in zip(found[1:], levels_of(tmp_path / "b.tif"), strict=True))
    back = open_source(tmp_path / "a.tif")
    assert [dict(one) for one in back.channels] == [{"label": n, "color": c} for n, c in colours.items()]
    assert (back.scale, back.units) == ((1, 0.5, 0.5), (None, "micrometer", "micrometer"))
    assert [channel["label"] for channel in open_source(tmp_path / "b.tif").channels] == ["GFP"]


@pytest.mark.usefixtures("small_images")
def test_levels_of_other_programs_and_of_a_part_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = output(tmp_path / "a.zarr", monkeypatch)
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, Region((1, 0), (300, 170))))
    assert np.array_equal(levels_of(tmp_path / "a.tif")[1], means(pixels[:, 1:]))

    group = zarr.open_group(tmp_path / "b.zarr", mode="w")
    steps = [[{"type": "scale", "scale": [2.0**n, 2.0**n]}] for n in range(2)]
    for n in range(2):
        group.create_array(str(n), data=pixels[0, :: 2**n, :: 2**n])
    datasets = [{"path": str(n), "coordinateTransformations": step} for n, step in enumerate(steps)]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": ["y", "x"], "datasets": datasets}]}
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(tmp_path / "b.zarr"), {}, None))
    assert np.array_equal(levels_of(tmp_path / "b.tif")[1], means(pixels[0])), "not every second pixel"


EXPORT_WITHIN_LIMIT = """
import resource
from pathlib import Path
import numpy as np
from halotile.storage.arrays import open_source
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import write_tiff

def export(name):
    write_tiff(Path(name + ".tif"), choose_planes(open_source(name + ".npy"), {}, None))

np.save("small.npy", np.zeros((999, 999), "u1"))
export("small")  # imports what is needed
np.lib.format.open_memmap("large.npy", "w+", "u1", (18_000, 22_000))
used = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))
limit = int(used) * 1024 + 150 * 2**20  # threads included, for an image of 396 million bytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
export("large")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory work on Linux")
def test_an_image_far_larger_than_the_memory_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_WITHIN_LIMIT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tifffile.TiffFile(tmp_path / "large.tif") as file:
        assert [level.shape for level in file.series[0].levels][:2] == [(18_000, 22_000), (9_000, 11_000)]
        assert len(file.series[0].levels) == 7


def test_a_name_of_any_characters_leaves_ome_xml_sound(tmp_path: Path) -> None:
    for name in ("a\0b", "a\x07b", "\ud800", "\ufffe", "R&D <x>", "α\U0001f52c"):
        np.save(tmp_path / "a.npy", np.zeros((2, 3, 4), "u1"))
        source: Any = open_source(tmp_path / "a.npy", axes="cyx")
        source.ome, source.channels = OmeImage(name=name), ({"label": name}, {"label": "two"})
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None))
        back, shown = open_source(tmp_path / "a.tif"), re.sub("[\0\x07\ud800\ufffe]", "\ufffd", name)
        assert ([channel["label"] for channel in back.channels], back.remarks) == ([shown, "two"], ())


def drawn(folder: Path, *images: Pixels, edge: int | None = None, **options: Any) -> Pixels:
    planes = [planes_of(folder, pixels, f"{n}.npy") for n, pixels in enumerate(images)]
    write_png(folder / "a.png", planes, edge=edge, **options)
    return np.asarray(Image.open(folder / "a.png"))


def test_pixels_are_averaged_over_whole_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = itertools.product((1, 300, 10**6), ((5, 7), (130, 40), (64, 64), (1, 300)))
    for folder, (window_bytes, shape) in in_folders(tmp_path, rows):
        monkeypatch.setattr(planes_module, "WINDOW_BYTES", window_bytes)
        pixels = np.random.default_rng(0).integers(0, 60000, shape, "u2")
        squares = Grid(shape, (9, 9), ((0, 0), (0, 0)))
        means = np.reshape([pixels[block.core.slices].mean() for block in squares], squares.counts)
        assert block_means(planes_of(folder, pixels), 9)[..., 0] == pytest.approx(means, rel=1e-6)


def test_values_are_drawn_with_a_contrast_that_ignores_outliers_units_and_what_is_not_finite(tmp_path: Path) -> None:
    random, pixels = np.random.default_rng(0), np.full((4, 8), 3.0, np.float32)
    pixels[:2, :2], pixels[0, 2], pixels[0, 4], pixels[2, 6] = np.nan, np.nan, np.inf, 5.0
    assert drawn(tmp_path, pixels, edge=4, values=(1, 3)).tolist() == [[0, 255, 255, 255], [255] * 4]
    for value, dtype in ((np.nan, np.float32), (0, np.uint8)):
        assert len(np.unique(drawn(tmp_path, np.full((4, 4), value, dtype)))) == 1, "no contrast"
    pixels = np.linspace(100, 200, 10_000).reshape(100, 100).astype(np.float32)
    pixels[50, 50], pixels[20, 20] = 1e9, -1e9
    shown = drawn(tmp_path, pixels)
    assert (shown[0, 0], shown[-1, -1]) == (0, 255)
    assert 120 < shown[50, 0] < 136
    doubles = random.random((20, 30))
    for factor in (1e-100, 1e100):
        assert np.array_equal(drawn(tmp_path, doubles * factor, edge=10), drawn(tmp_path, doubles, edge=10))
    colours = random.integers(0, 256, (20, 30, 4), np.uint8)
    assert np.array_equal(drawn(tmp_path, colours, values=(0, 255)), colours[..., :3]), "without opacity"
    both = drawn(tmp_path, np.zeros((20, 30), np.uint8), colours, values=(0, 255))  # grey beside colour
    assert np.array_equal(both[:, -30:], colours[..., :3])
    assert not both[:, :30].any()
    grey = random.integers(0, 256, (90, 70), np.uint8)
    part = planes_of(tmp_path, grey, region=Region((10, 20), (50, 41)))
    write_png(tmp_path / "a.png", [part], edge=None, values=(0, 255))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), grey[10:50, 20:41])


def test_a_part_too_large_for_a_png_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (20_000, 20_000))
    planes = choose_planes(open_source(tmp_path / "a.npy"), {}, Region((0, 0), (20_000, 20_000)))
    with pytest.raises(ConfigError, match="Write a smaller --region"):
        write_png(tmp_path / "a.png", [planes], edge=None)
    monkeypatch.setattr(planes_module, "WINDOW_BYTES", 40)
    progress: list[float] = []
    drawn(tmp_path, *[np.zeros((8, 20), np.uint8)] * 2, tick=progress.append)
    assert (progress, len(progress), progress[-1]) == (sorted(progress), 8, 1)


ROWS: list[tuple[str, tuple[int, ...], str, dict[str, int], tuple[str, ...], int]] = [
    ("yx", (5, 6), "uint16", {}, (), 1), ("xy", (6, 5), "uint16", {}, (), 1), ("zyx", (4, 5, 6), "uint16", {}, ("z",), 1),
    ("tczyx", (2, 3, 4, 5, 6), "uint16", {"t": 1}, ("c", "z"), 1), ("yxc", (5, 6, 3), "uint16", {}, (), 3), ("yxc", (5, 6, 4), "float32", {}, (), 4),
    ("yxc", (5, 6, 5), "uint8", {}, ("c",), 1), ("cyx", (3, 5, 6), "uint8", {}, (), 3), ("cyx", (3, 5, 6), "uint16", {}, ("c",), 1),
    ("yxc", (5, 6, 3), "uint8", {"c": 2}, (), 1),
]  # fmt: skip


def test_planes_are_rows_and_columns_whatever_the_order_of_the_axes(tmp_path: Path) -> None:
    for folder, (axes, shape, dtype, at, loops, samples) in in_folders(tmp_path, ROWS):
        whole = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
        planes = planes_of(folder, whole, axes=axes, at=at)
        assert (planes.loops, planes.samples) == (loops, samples)
        index = tuple(n - 1 for n in planes.counts)
        places = at | dict(zip(loops, index, strict=True))
        pixels = whole[tuple(places.get(axis, slice(None)) for axis in axes)]
        left = [axis for axis in axes if axis not in places]
        wanted = pixels.transpose([left.index(axis) for axis in "yxc" if axis in left])
        height, width = planes.shape
        assert np.array_equal(planes.read(index, Region((1, 2), (height, width))), wanted[1:, 2:])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_parts_cover_every_pixel_once_along_whole_chunks(data: st.DataObject) -> None:
    chunk = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    array = zarr.create_array(zarr.storage.MemoryStore(), shape=shape, chunks=tuple(map(min, chunk, shape)), dtype="u1")

    said: Any = {"axes": "yx", "chunks": array.chunks, "dtype": np.dtype("u1"), "shape": shape}
    source: Any = SimpleNamespace(**said, ome=None, channels=())
    planes, limit = choose_planes(source, {}, Region(start, stop)), data.draw(st.integers(1, 500))
    seen = np.zeros(planes.shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes_module, "WINDOW_BYTES", limit)
        for part in planes.parts():
            seen[part.slices] += 1
            assert part.size <= max(limit, array.chunks[0] * array.chunks[1])
            for first, a, c in zip(start, part.start, array.chunks, strict=True):
                assert a == 0 or (first + a) % c == 0
    assert (seen == 1).all()
