"""Outputs: readable by other programs, written in whole shards with checksums; and outputs that are one file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ome_zarr_models.common.omero import Omero
from ome_zarr_models.v05.image import Image

from halotile.errors import ConfigError, DamagedData, InputError, OutputRefused
from halotile.storage.grid import Region
from halotile.storage.sharded.layout import DTYPES
from halotile.storage.sharded.output import (
    FOREIGN_FILE,
    UNREADABLE,
    FileLayout,
    Layout,
    ShardWriter,
    check_block,
    create_output,
    inspect_block,
    layout_from_json,
    open_output,
    to_dtype,
)
from halotile.storage.sharded.ownership import (
    added_levels,
    find_foreign_entry,
    foreign_pixels_reason,
    metadata_problems,
    remove_added_levels,
    restore_metadata,
)
from tests.cases import in_folders
from tests.storage.outputs import OME, PLAIN, noise, written

CHANNEL = {"color": "FF0000", "label": "DAPI", "window": {"start": 0, "end": 900, "min": 0, "max": 65535}}
WORDY = replace(OME, translation=(0.0, 0.0, 0.5, -1.25), name="cells", omero={"channels": [CHANNEL] * 3})


def tensorstore_read(path: Path) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    pixels: NDArray[Any] = tensorstore.open(spec, open=True).result().read().result()
    return pixels


def test_zarr_and_tensorstore_read_what_was_written(tmp_path: Path) -> None:
    for folder, (dtype, codec) in in_folders(tmp_path, itertools.product(DTYPES, ("lz4", "zstd", "none"))):
        layout = replace(PLAIN, dtype=dtype, codec=codec)
        pixels = written(folder / "a.zarr", layout)
        array = zarr.open_array(folder / "a.zarr", mode="r")
        assert (array.shards, array.chunks, array.dtype) == ((8, 8), (4, 4), np.dtype(dtype))
        np.testing.assert_array_equal(array[:], pixels)
        np.testing.assert_array_equal(tensorstore_read(folder / "a.zarr"), pixels)


def test_unwritten_pixels_read_as_nan_or_zero(tmp_path: Path) -> None:
    for folder, dtype in in_folders(tmp_path, DTYPES):
        create_output(folder / "a.zarr", replace(PLAIN, dtype=dtype))
        expected = {"f": np.nan, "c": complex(np.nan, np.nan)}.get(np.dtype(dtype).kind, 0)
        by_zarr = zarr.open_array(folder / "a.zarr", mode="r")[:]
        for pixels in (by_zarr, tensorstore_read(folder / "a.zarr")):
            np.testing.assert_array_equal(pixels, np.full(PLAIN.shape, expected, dtype))


def test_zarr_can_write_into_the_same_array(tmp_path: Path) -> None:
    pixels = written(tmp_path / "a.zarr", PLAIN)
    array = zarr.open_array(tmp_path / "a.zarr", mode="r+")
    array[:8, :8] = 5
    pixels[:8, :8] = 5
    np.testing.assert_array_equal(array[:], pixels)
    assert check_block(tmp_path / "a.zarr", PLAIN, Region.whole(PLAIN.shape)) == []


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_layout_is_read_back_by_zarr(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 4))
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * axes))
    chunk = data.draw(st.tuples(*[st.integers(1, 4)] * axes))
    shard = tuple(c * data.draw(st.integers(1, 3)) for c in chunk)
    names, ones, none = ("a", "z", "y", "x")[-axes:], (1.0,) * axes, (None,) * axes
    layout = Layout(shape, "int16", shard, chunk, "lz4", names, ones, none, ome=False)
    path = tmp_path_factory.mktemp("any") / "a.zarr"
    pixels = written(path, layout)
    np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], pixels)
    assert check_block(path, layout, Region.whole(shape)) == []


def test_ome_metadata_is_valid_and_holds_axes_scale_and_units(tmp_path: Path) -> None:
    pixels = written(tmp_path / "a.zarr", OME)
    image = Image.from_zarr(zarr.open_group(tmp_path / "a.zarr", mode="r"))
    multiscale = image.ome_attributes.multiscales[0]
    assert [(a.name, a.type, a.unit) for a in multiscale.axes] == [
        ("t", "time", "second"),
        ("c", "channel", None),
        ("y", "space", "micrometer"),
        ("x", "space", "micrometer"),
    ]
    assert list(multiscale.datasets[0].coordinateTransformations[0].scale) == [1.5, 1.0, 0.25, 0.5]
    array = zarr.open_array(tmp_path / "a.zarr" / "0", mode="r")
    assert array.metadata.dimension_names == ("t", "c", "y", "x")
    np.testing.assert_array_equal(array[:], pixels)


def test_axes_that_ome_does_not_permit_are_refused() -> None:
    for axes in ("x", "xyt", "ctyx", "yxc", "tt", "tcmyx", "zyxc"):
        n = len(axes)
        with pytest.raises(ConfigError, match="write a plain Zarr"):
            Layout((4,) * n, "uint8", (4,) * n, (4,) * n, "lz4", tuple(axes), (1.0,) * n, (None,) * n, True)


def test_the_layout_is_read_back(tmp_path: Path) -> None:
    words: Any = {"attributes": {"units": "K", "valid_range": [0, 9]}, "nodata": 3}
    rows = [PLAIN, OME, WORDY, replace(PLAIN, codec="none", scale=(0.5, 2.0), units=("m", None))]
    rows += [replace(PLAIN, **words), replace(OME, **words)]
    for folder, layout in in_folders(tmp_path, rows):
        create_output(folder / "a.zarr", layout)
        assert open_output(folder / "a.zarr") == layout
        assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

    old = OME.to_json()
    for field in ("translation", "name", "omero"):  # which older versions lack
        del old[field]
    assert Layout.from_json(old) == OME


def test_translation_name_and_channels_are_written_as_valid_ome_metadata(tmp_path: Path) -> None:
    create_output(tmp_path / "a.zarr", WORDY)
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    multiscale = Image.from_zarr(group).ome_attributes.multiscales[0]
    scale, translation = multiscale.datasets[0].coordinateTransformations
    assert (scale.type, translation.type) == ("scale", "translation")
    assert list(translation.translation) == [0.0, 0.0, 0.5, -1.25]
    assert multiscale.name == "cells"
    omero: Any = group.attrs["ome"]
    assert Omero.model_validate(omero["omero"]).channels[2].window.end == 900
    assert omero["omero"]["channels"][0]["label"] == "DAPI"


def test_a_zarr_of_another_program_has_no_layout(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(4, 4), dtype="uint8", chunks=(2, 2))
    with pytest.raises(InputError, match="not laid out by halotile"):
        open_output(tmp_path / "a.zarr")
    with pytest.raises(InputError, match="is no Zarr"):
        open_output(tmp_path)


def test_damaged_metadata_is_detected_and_can_be_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    pixels = written(path, OME)
    (path / "zarr.json").write_bytes((path / "zarr.json").read_bytes()[:50])
    with pytest.raises(DamagedData, match=r"zarr\.json is damaged"):
        open_output(path)
    (path / "0" / "zarr.json").unlink()
    assert [line.removeprefix(f"metadata: {path}/") for line in metadata_problems(path, OME)] == [
        "zarr.json is not what the run wrote",
        "0/zarr.json is missing",
    ]
    restore_metadata(path, OME)
    assert metadata_problems(path, OME) == []
    assert open_output(path) == OME
    np.testing.assert_array_equal(zarr.open_array(path / "0", mode="r")[:], pixels)


def test_layouts_that_do_not_fit_are_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"shape": (0, 13)}, "axis without pixels"),
        ({"dtype": "complex256"}, "output.dtype is 'complex256'"),
        ({"dtype": "int64"}, "output.dtype is 'int64'"),
        ({"chunk": (3, 4)}, "multiple of the chunk"),
        ({"scale": (1.0,)}, "different numbers of axes"),
    ]
    for change, message in rows:
        with pytest.raises(ConfigError, match=message):
            replace(PLAIN, **change)


def test_a_block_that_is_not_whole_shards_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
        ((0, 0), (8, 9), "it covers 0 to 9 of axis x, and output.shard is 8 there"),
        ((4, 0), (8, 8), "it covers 4 to 8 of axis y"),
        ((16, 8), (24, 13), "not inside the output's shape"),
        ((8, 8), (8, 8), "is empty"),
    ]
    for folder, (start, stop, message) in in_folders(tmp_path, rows):
        create_output(folder / "a.zarr", PLAIN)
        region = Region(start, stop)
        with pytest.raises(ConfigError, match=message):
            ShardWriter(folder / "a.zarr", PLAIN).write(region, np.zeros(region.shape, "float32"))
        with pytest.raises(ConfigError, match=r"pixels of shape \(8, 7\) do not fill"):
            ShardWriter(folder / "a.zarr", PLAIN).write(Region((0, 0), (8, 8)), np.zeros((8, 7)))
        assert os.listdir(folder / "a.zarr") == ["zarr.json"]


def test_blocks_fill_in_their_own_shards_only(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    pixels = noise(PLAIN.shape, "float32")
    create_output(path, PLAIN)
    writer = pickle.loads(pickle.dumps(ShardWriter(path, PLAIN)))
    region = Region((8, 8), (20, 13))
    count, _ = writer.write(region, pixels[region.slices])
    files = [file for file in (path / "c").rglob("*") if file.is_file()]
    assert sorted(str(f.relative_to(path)) for f in files) == ["c/1/1", "c/2/1"]
    assert count == sum(f.stat().st_size for f in files)
    expected = np.full(PLAIN.shape, np.nan, "float32")
    expected[region.slices] = pixels[region.slices]
    np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], expected)


def test_a_writer_survives_the_recreation_of_its_output(tmp_path: Path) -> None:
    path, region = tmp_path / "a.zarr", Region((0, 0), (8, 8))
    writer = ShardWriter(path, PLAIN)
    for value in (1, 2):
        create_output(path, PLAIN, overwrite=True)
        writer.write(region, np.full((8, 8), value))
    assert (zarr.open_array(path, mode="r")[region.slices] == 2).all()


def test_a_writer_does_not_recreate_a_removed_output(tmp_path: Path) -> None:
    for folder, (begun, layout) in in_folders(tmp_path, itertools.product((False, True), (PLAIN, OME))):
        path, region = folder / "a.zarr", layout.grid.block_at(0).core
        writer = ShardWriter(path, layout)
        create_output(path, layout)
        if begun:
            writer.write(region, np.ones(region.shape))
        path.rename(folder / "elsewhere.zarr")
        with pytest.raises(FileNotFoundError):
            writer.write(region, np.ones(region.shape))
        assert not path.exists()


@pytest.mark.parametrize("codec", ["lz4", "none"])
@pytest.mark.parametrize("region", [Region((0, 0), (8, 8)), Region((0, 0), (16, 13))], ids=["shard", "block"])
def test_intact_shards_of_another_place_or_time_are_detected(tmp_path: Path, region: Region, codec: str) -> None:
    path, layout = tmp_path / "a.zarr", replace(PLAIN, codec=codec)
    create_output(path, layout)
    writer, pixels = ShardWriter(path, layout), noise(region.shape, "float32")
    writer.write(region, pixels + 1)
    old = (path / "c" / "0" / "0").read_bytes()
    digest = writer.write(region, pixels).digest

    def problems() -> list[str]:
        by_index, thorough = (check_block(path, layout, region, digest, thorough=t) for t in (False, True))
        assert thorough == by_index
        return thorough

    assert problems() == []
    (path / "c" / "0" / "0").write_bytes(old)
    (problem,) = problems()
    assert problem.startswith(f"{path}/c/0/0")
    assert problem.endswith("not what the run wrote there: a shard of another place or time")
    assert writer.write(region, pixels).digest == digest, "equal pixels have equal digests"
    if region.shape != layout.shard:
        one, other = path / "c" / "0" / "0", path / "c" / "1" / "0"
        swapped = one.read_bytes(), other.read_bytes()
        one.write_bytes(swapped[1])
        other.write_bytes(swapped[0])
        assert problems() == [problem]
    for thorough in (False, True):
        assert check_block(path, layout, region, thorough=thorough) == [], "only the digest reveals it"


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    flipped = bytes([data[0] ^ 1]) + data[1:]
    path.write_bytes({"short": data[:-5], "flipped": flipped}.get(kind, b""))
    if kind == "gone":
        path.unlink()


def test_damage_is_reported_for_its_block_only(tmp_path: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("gone", "the shard is missing"),
        ("short", "the checksum of the index does not match"),
        ("flipped", "chunk (0, 0): its crc32c checksum does not match"),
        ("empty", "it was cut short"),
    ]
    for folder, (kind, message) in in_folders(tmp_path, rows):
        path = folder / "a.zarr"
        written(path, PLAIN)
        damage(path / "c" / "1" / "0", kind)
        problems = check_block(path, PLAIN, Region((8, 0), (16, 8)))
        assert len(problems) == 1
        assert problems[0].startswith(f"{path}/c/1/0: ")
        assert message in problems[0]
        assert check_block(path, PLAIN, Region.whole(PLAIN.shape)) == problems
        assert check_block(path, PLAIN, Region((0, 0), (8, 13))) == []


def test_integers_round_half_to_even_and_all_clip() -> None:
    rows: list[tuple[NDArray[Any], str, list[Any]]] = [
        (np.array([0.5, 1.5, 2.5, -0.5]), "uint8", [0, 2, 2, 0]),
        (np.array([-1e9, 1e9, np.inf, -np.inf]), "uint8", [0, 255, 255, 0]),
        (np.array([3.5 - 1e-12], "float64"), "uint8", [3]),
        (np.array([-3e9, 3e9, 4294967295], "float32"), "int32", [-(2**31), 2**31 - 1, 2**31 - 1]),
        (np.array([-5, 5e9, 4294967040], "float32"), "uint32", [0, 2**32 - 1, 4294967040]),
        (np.array([np.inf, 65504], "float16"), "uint16", [65535, 65504]),
        (np.array([-1, 70000], "int32"), "uint16", [0, 65535]),
        (np.array([200], "uint8"), "int8", [127]),
        (np.array([-7], "int8"), "uint32", [0]),
        (np.array([2**32 - 1], "uint32"), "int32", [2**31 - 1]),
        (np.array([True, False]), "uint8", [1, 0]),
        (np.array([1.1], "float64"), "float32", [np.float32(1.1)]),
        (np.array([1e10, -1e5, 65519, 65520], "float32"), "float16", [65504, -65504, 65504, 65504]),
        (np.array([np.inf, -np.inf, 7], "float32"), "float16", [np.inf, -np.inf, 7]),
        (np.array([65535, 3], "uint16"), "float16", [65504, 3]),
        (np.array([1e300, -np.inf], "float64"), "float32", [np.finfo("float32").max, -np.inf]),
    ]
    for pixels, dtype, expected in rows:
        converted = to_dtype(pixels, dtype)
        assert converted.dtype == np.dtype(dtype)
        assert converted.tolist() == np.array(expected, dtype).tolist()


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["uint8", "uint16", "uint32", "int8", "int16", "int32"]),
    st.sampled_from(["float16", "float32", "float64"]),
    st.floats(allow_nan=False),
)
def test_a_float_becomes_the_nearest_representable_integer(dtype: str, source: str, value: float) -> None:
    with np.errstate(over="ignore"):
        pixel = np.array([value]).astype(source)
    limits = np.iinfo(dtype)
    exact = float(pixel[0])
    nearest = limits.min if exact < limits.min else limits.max if exact > limits.max else round(exact)
    assert to_dtype(pixel, dtype).tolist() == [nearest]


def test_nan_becomes_no_integer_and_complex_numbers_no_real_ones() -> None:
    with pytest.raises(InputError, match="a pixel is NaN, and the output is uint8"):
        to_dtype(np.array([1.0, np.nan]), "uint8")
    with pytest.raises(ConfigError, match="complex, and the output is float32"):
        to_dtype(np.array([1 + 2j]), "float32")
    assert to_dtype(np.array([1.5], np.float32), "complex64").tolist() == [1.5 + 0j]
    pixels = np.ones((3, 3), "float32")
    assert to_dtype(pixels, "float32") is pixels, "pixels that fit are not copied"


def test_the_writer_converts(tmp_path: Path) -> None:
    layout = replace(PLAIN, dtype="uint8")
    create_output(tmp_path / "a.zarr", layout)
    region = Region((0, 0), (8, 8))
    ShardWriter(tmp_path / "a.zarr", layout).write(region, np.full((8, 8), 300.2))
    assert (zarr.open_array(tmp_path / "a.zarr", mode="r")[region.slices] == 255).all()


def test_a_thorough_check_reads_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.zarr", PLAIN)
    whole = Region.whole(PLAIN.shape)
    by_the_index = inspect_block(tmp_path / "a.zarr", PLAIN, whole, thorough=False)
    monkeypatch.delattr(os, "pread")
    assert inspect_block(tmp_path / "a.zarr", PLAIN, whole, thorough=True) == by_the_index


LAYOUT, ALL = FileLayout(1000), Region((0,), (1,))


def test_a_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    problems = check_block(path, LAYOUT, ALL, b"1234")
    assert problems == [f"{path}: the file is missing"]
    assert foreign_pixels_reason({0: problems}, 1) == ""
    create_output(path, LAYOUT)
    assert not path.exists(), "it has its name once it is whole"
    path.touch()
    assert check_block(path, LAYOUT, ALL) == [f"{path}: the file is empty"]
    size, digest = LAYOUT.write(path, b"weights")
    assert (size, path.read_bytes()) == (7, b"weights")
    assert check_block(path, LAYOUT, ALL, digest) == []
    path.write_bytes(b"WEIGHTS")
    problems = check_block(path, LAYOUT, ALL, digest)
    assert problems == [f"{path}: {FOREIGN_FILE}"]
    assert foreign_pixels_reason({0: problems}, 1) == "the file has other contents"
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert check_block(path, LAYOUT, ALL) == [f"{path}: the file {UNREADABLE}: Input/output error"]


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"of another program")
    with pytest.raises(OutputRefused, match="something stands there"):
        create_output(path, LAYOUT)
    create_output(path, LAYOUT, overwrite=True)
    assert not path.exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    for name, said in {"folder": "a folder, and the output is a file", "link": "a symlink to"}.items():
        with pytest.raises(OutputRefused, match=said):
            create_output(tmp_path / name, LAYOUT, overwrite=True)


def test_it_has_neither_metadata_nor_levels(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    LAYOUT.write(path, b"weights")
    assert metadata_problems(path, LAYOUT) == []
    restore_metadata(path, LAYOUT)
    assert (added_levels(path, LAYOUT), remove_added_levels(path, LAYOUT)) == (0, 0)
    assert find_foreign_entry(path, LAYOUT) == ""
    assert layout_from_json(LAYOUT.to_json()) == LAYOUT
