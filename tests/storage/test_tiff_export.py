"""Export of images of any size as tiled TIFF in constant memory: the same values, and levels that are means of two by two pixels."""

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
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image

from halotile.errors import DamagedData, DiskRefused
from halotile.storage.arrays import open_source
from halotile.storage.formats.parts.ome_scale import Coordinates, known_sizes
from halotile.storage.grid import Grid, Region
from halotile.storage.images import tiff_export
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import NextLevel, write_tiff
from halotile.storage.sharded.ome_metadata import OmeImage, order
from halotile.storage.sharded.output import Layout, ShardWriter, create_output
from halotile.storage.spacing import SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME
from tests.cases import in_folders

Pixels = NDArray[Any]


def image(shape: tuple[int, ...], dtype: str = "uint16") -> Pixels:
    return (np.random.default_rng(0).random(shape) * 200).astype(dtype)


def exported(folder: Path, pixels: Pixels, axes: str, **options: Any) -> Path:
    np.save(folder / "a.npy", pixels)
    source = open_source(folder / "a.npy", axes=axes)
    planes = choose_planes(source, options.get("at", {}), options.get("region"))
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


def test_a_mean_is_no_hole(tmp_path: Path) -> None:
    heights = np.full((600, 600), -3, "int16")
    heights[:, ::2] = 3
    heights[:20] = 0
    tags = [(42113, "s", 0, "0", True)]
    tifffile.imwrite(tmp_path / "in.tif", heights, extratags=tags)
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "in.tif"), {}, None))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        level = file.series[0].levels[1].asarray()
    assert (level[:10] == 0).all()
    assert (level[10:] == 1).all()


def test_every_unit_of_ome_zarr_and_its_size_come_back(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", image((2, 3, 4)))
    source: Any = open_source(tmp_path / "in.npy", axes="tyx")
    for length, time in itertools.zip_longest(SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME, fillvalue="second"):
        length = "meter" if length == "second" else length
        source.scale, source.units = (0.25, 0.5, 0.125), (time, length, length)
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None))
        back = open_source(tmp_path / "a.tif")
        assert (back.scale, back.units, back.remarks) == (source.scale, source.units, ())
        known = known_sizes("tyx", Coordinates(back.scale, (), ()), back.units)
        assert known == (source.scale, source.units, ())
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


LIMIT_BYTES = 150 * 2**20
"""Memory, threads included, for an image of 396 million bytes."""


def means(pixels: Pixels, nodata: float | None = None) -> Pixels:
    """Means of two by two pixels in double precision, without those that are holes, by the axes y and x at the end."""
    height, width = pixels.shape[-2:]
    values = pixels.astype(float)
    if nodata is not None:
        values[pixels == nodata] = np.nan
    edges = [(0, 0)] * (pixels.ndim - 2) + [(0, height % 2), (0, width % 2)]
    values = np.pad(values, edges, constant_values=np.nan)
    cells = values.reshape(*pixels.shape[:-2], -(-height // 2), 2, -(-width // 2), 2)
    valid = np.isfinite(cells)
    total, count = np.where(valid, cells, 0).sum((-3, -1)), valid.sum((-3, -1))
    empty = np.nan if nodata is None else nodata
    found = np.where(count > 0, total / np.maximum(count, 1), empty)
    return (np.rint(found) if pixels.dtype.kind in "iu" else found).astype(pixels.dtype)


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
            assert (found[0] == nodata).sum() == 21 * 31
            assert open_source(folder / "a.tif").nodata == nodata
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
    create_output(path, layout)
    for block in Grid(layout.shape, layout.block, ((0, 0),) * 3):
        ShardWriter(path, layout).write(block.core, pixels[block.core.slices])
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
    coarser = choose_planes(open_source(tmp_path / "a.zarr", level=1), {"c": 1}, None)
    write_tiff(tmp_path / "b.tif", coarser)
    assert made == [(75, 43)] * 2, "of the coarsest stored level"
    assert all(np.array_equal(a[1], b) for a, b in zip(found[1:], levels_of(tmp_path / "b.tif"), strict=True))
    back = open_source(tmp_path / "a.tif")
    assert [dict(one) for one in back.channels] == [{"label": n, "color": c} for n, c in colours.items()]
    assert (back.scale, back.units) == ((1, 0.5, 0.5), (None, "micrometer", "micrometer"))
    assert [channel["label"] for channel in open_source(tmp_path / "b.tif").channels] == ["GFP"]


@pytest.mark.usefixtures("small_images")
def test_levels_of_other_programs_and_of_a_part_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = output(tmp_path / "a.zarr", monkeypatch)
    part = choose_planes(open_source(tmp_path / "a.zarr"), {}, Region((1, 0), (300, 170)))
    write_tiff(tmp_path / "a.tif", part)
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
limit = int(used) * 1024 + MORE_BYTES
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
export("large")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory work on Linux")
def test_an_image_far_larger_than_the_memory_is_written(tmp_path: Path) -> None:
    code = EXPORT_WITHIN_LIMIT.replace("MORE_BYTES", str(LIMIT_BYTES))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
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
        back = open_source(tmp_path / "a.tif")
        shown = re.sub("[\0\x07\ud800\ufffe]", "\ufffd", name)
        assert [channel["label"] for channel in back.channels] == [shown, "two"]
        assert back.remarks == ()
