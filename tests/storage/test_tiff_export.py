"""Export of images of any size as tiled TIFF with the same values, in constant memory."""

from __future__ import annotations

import errno
import itertools
import os
import struct
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
from halotile.storage.grid import Region
from halotile.storage.images import tiff_export
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import write_tiff
from halotile.storage.sharded.ome_metadata import order
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


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("yx", (300, 270)), ("yx", (1, 1)), ("yx", (600, 1)), ("zyx", (3, 77, 1)), ("qyx", (3, 77, 1)), ("yxc", (270, 1, 3)),
        ("zyx", (3, 40, 300)), ("tczyx", (2, 2, 3, 40, 30)), ("qyx", (2, 40, 30)), ("yxc", (270, 300, 3)), ("zyxc", (2, 20, 30, 4)),
    ],
)  # fmt: skip
def test_values_and_axes_come_back(tmp_path: Path, axes: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES if shape in ((300, 270), (2, 40, 30)) else ("uint16", "float32"):
        pixels = image(shape, dtype)
        path = exported(tmp_path, pixels, axes)
        assert np.array_equal(tifffile.imread(path), pixels)
        back = open_source(path, axes=axes)
        assert (back.shape, "".join(back.axes), back.dtype.name) == (shape, axes, dtype)
        assert np.array_equal(back.read(Region.whole(shape)), pixels)
        # Without requested axes, an OME-TIFF is read in the axis order of OME-Zarr.
        ordered = open_source(path)
        places = order(tuple(axes))
        assert "".join(ordered.axes) == "".join(axes[place] for place in places)
        assert np.array_equal(ordered[...], pixels.transpose(places))


def test_types_that_viewers_do_not_support_are_converted_and_nan_is_preserved(tmp_path: Path) -> None:
    for dtype, stored in {"float16": "float32", "bool": "uint8"}.items():
        pixels = image((40, 30)) % 2 if dtype == "bool" else image((40, 30))
        back = tifffile.imread(exported(tmp_path, pixels.astype(dtype), "yx"))
        assert back.dtype == stored
        assert np.array_equal(back, pixels * (255 if dtype == "bool" else 1))
    pixels = image((40, 30), "float32")
    pixels[3, 4] = np.nan
    assert np.array_equal(tifffile.imread(exported(tmp_path, pixels, "yx")), pixels, equal_nan=True)


def test_a_plane_and_a_part_can_be_chosen(tmp_path: Path) -> None:
    pixels = image((2, 3, 300, 290))
    path = exported(tmp_path, pixels, "tcyx", at={"c": 2}, region=Region((10, 20), (290, 40)))
    assert np.array_equal(tifffile.imread(path), pixels[:, 2, 10:290, 20:40])
    assert "".join(open_source(path).axes) == "tyx"


def test_levels_a_pixel_wide_are_means(tmp_path: Path) -> None:
    pixels = image((1200, 2))
    with tifffile.TiffFile(exported(tmp_path, pixels, "yx")) as file:
        level = file.series[0].levels[1].asarray()
    assert np.array_equal(level, np.rint(pixels.reshape(600, 4).mean(1, keepdims=True)))


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


def test_it_is_tiled_and_compressed(tmp_path: Path) -> None:
    with tifffile.TiffFile(exported(tmp_path, np.zeros((600, 500), np.uint16), "yx")) as file:
        page = file.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        assert (page.tile, page.compression.name) == ((256, 256), "ADOBE_DEFLATE")
    assert (tmp_path / "a.tif").stat().st_size < 10_000


def test_a_file_beyond_four_gigabytes_is_a_bigtiff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, limit_bytes in in_folders(tmp_path, (10**3, 10**9)):
        monkeypatch.setattr(tiff_export, "_CLASSIC_BYTES", limit_bytes)
        with tifffile.TiffFile(exported(folder, image((40, 30)), "yx")) as file:
            assert file.is_bigtiff is (limit_bytes == 10**3)


def test_the_physical_size_of_a_pixel_is_preserved(tmp_path: Path) -> None:
    for unit in ("nanometer", "micrometer", "millimeter"):
        sizes = {f"PhysicalSize{a}": s for a, s in zip("ZYX", (2.5, 0.5, 0.25), strict=True)}
        symbol = {"nanometer": "nm", "micrometer": "µm", "millimeter": "mm"}[unit]
        units = {f"PhysicalSize{a}Unit": symbol for a in "ZYX"}
        words: Any = {"axes": "ZYX", **sizes, **units}
        tifffile.imwrite(tmp_path / "in.ome.tif", image((3, 40, 30)), metadata=words)
        source = open_source(tmp_path / "in.ome.tif")
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None))
        back = open_source(tmp_path / "a.tif")
        assert (back.scale, back.units) == ((2.5, 0.5, 0.25), (unit,) * 3)
        with tifffile.TiffFile(tmp_path / "a.tif") as file:
            tags = file.pages.first.tags
            per = {"nanometer": 1e7, "micrometer": 1e4, "millimeter": 10}[unit]
            found = [np.divide(*tags[f"{a}Resolution"].value) for a in "XY"]
            assert found == pytest.approx([per / 0.25, per / 0.5])
            assert tags["ResolutionUnit"].value == 3


def test_every_unit_of_ome_zarr_comes_back(tmp_path: Path) -> None:
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


def test_the_size_of_a_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, window_bytes in in_folders(tmp_path, (1, 256 * 256 * 2, 3 * 256 * 256 * 2, 10**9)):
        monkeypatch.setattr(tiff_export, "WINDOW_BYTES", window_bytes)
        array = zarr.create_array(folder / "a.zarr", shape=(900, 1000), chunks=(600, 100), dtype="u2")
        array[...] = image((900, 1000))
        source = open_source(folder / "a.zarr")
        read = Mock(wraps=source.read)
        monkeypatch.setattr(source, "read", read)
        write_tiff(folder / "a.tif", choose_planes(source, {}, None))
        sizes = [2 * call.args[0].size for call in read.call_args_list]
        assert max(sizes) <= max(window_bytes, 256 * 256 * 2)
        assert np.array_equal(tifffile.imread(folder / "a.tif"), np.asarray(array))


def test_damage_during_export_leaves_the_old_file_only(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(600, 100), chunks=(300, 100), dtype="u2")
    array[...] = image((600, 100))
    (tmp_path / "a.zarr/c/1/0").write_bytes(b"xx")
    (tmp_path / "a.tif").write_bytes(b"before")
    with pytest.raises(DamagedData):
        write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
    assert (tmp_path / "a.tif").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tif", "a.zarr"]


def test_a_disk_without_room_for_the_scratch_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", image((1200, 700)))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    said = r"the disk ran full: .*a\.tif cannot be written .* Free some space and run again"
    with pytest.raises(DiskRefused, match=said):
        write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.npy"), {}, None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy"]


def test_a_header_that_promises_too_much_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(image((20, 30), "uint8")).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / "a.png").write_bytes(content)
    reserve = Mock()
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(DamagedData):
        write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.png"), {}, None))
    reserve.assert_not_called()


def test_progress_increases_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiff_export, "WINDOW_BYTES", 1)
    np.save(tmp_path / "a.npy", image((2, 300, 300)))
    progress: list[float] = []
    planes = choose_planes(open_source(tmp_path / "a.npy"), {}, None)
    write_tiff(tmp_path / "a.tif", planes, tick=progress.append)
    assert progress == sorted(progress)
    assert (len(progress), progress[-1]) == (8, 1)
    monkeypatch.setattr(tiff_export, "LARGEST_TOP", 40)
    write_tiff(tmp_path / "a.tif", planes, tick=progress.append)
    assert progress[8:] == sorted(progress[8:])
    assert progress[-1] == pytest.approx(1), "of all levels"
