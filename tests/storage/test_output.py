"""Outputs: whole shards with checksums, read by other programs, with levels that do not depend on the blocks; and outputs that are one file."""

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

from halotile.errors import ConfigError, DamagedData, InputError, InputUnreadable, OutputRefused
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


def test_zarr_and_tensorstore_read_what_was_written_and_nan_or_zero_elsewhere(tmp_path: Path) -> None:
    for folder, (dtype, codec) in in_folders(tmp_path, itertools.product(DTYPES, ("lz4", "zstd", "none"))):
        layout, path = replace(PLAIN, dtype=dtype, codec=codec), folder / "a.zarr"
        create_output(path, layout)
        unwritten = {"f": np.nan, "c": complex(np.nan, np.nan)}.get(np.dtype(dtype).kind, 0)
        pixels = np.full(PLAIN.shape, unwritten, dtype)
        for whole in (False, True):
            if whole:
                pixels = noise(PLAIN.shape, dtype)
                ShardWriter(path, layout).write(Region.whole(PLAIN.shape), pixels)
            array = zarr.open_array(path, mode="r")
            assert (array.shards, array.chunks, array.dtype) == ((8, 8), (4, 4), np.dtype(dtype))
            np.testing.assert_array_equal(array[:], pixels)
            np.testing.assert_array_equal(tensorstore_read(path), pixels)
    zarr.open_array(path, mode="r+")[:8, :8] = 5  # zarr can write into the same array
    assert check_block(path, layout, Region.whole(PLAIN.shape)) == []


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


def test_ome_metadata_is_valid_and_holds_axes_scale_units_and_channels(tmp_path: Path) -> None:
    pixels = written(tmp_path / "a.zarr", WORDY)
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    multiscale = Image.from_zarr(group).ome_attributes.multiscales[0]
    time, channel, um = ("t", "time", "second"), ("c", "channel", None), ("space", "micrometer")
    assert [(a.name, a.type, a.unit) for a in multiscale.axes] == [time, channel, ("y", *um), ("x", *um)]
    scale, translation = multiscale.datasets[0].coordinateTransformations
    assert (scale.type, list(scale.scale)) == ("scale", [1.5, 1.0, 0.25, 0.5])
    assert (translation.type, list(translation.translation)) == ("translation", [0.0, 0.0, 0.5, -1.25])
    assert multiscale.name == "cells"
    attributes: Any = group.attrs["ome"]
    channels = Omero.model_validate(attributes["omero"]).channels
    assert (channels[2].window.end, channels[0].label) == (900, "DAPI")
    array = zarr.open_array(tmp_path / "a.zarr" / "0", mode="r")
    assert array.metadata.dimension_names == ("t", "c", "y", "x")
    np.testing.assert_array_equal(array[:], pixels)


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


def test_damaged_metadata_are_detected_and_can_be_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    with pytest.raises(InputError, match="is no Zarr"):
        open_output(tmp_path)
    zarr.create_array(tmp_path / "b.zarr", shape=(4, 4), dtype="uint8", chunks=(2, 2))
    with pytest.raises(InputError, match="not laid out by halotile"):
        open_output(tmp_path / "b.zarr")
    pixels = written(path, OME)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        for ask in (open_output, lambda root: metadata_problems(root, OME)):
            with pytest.raises(InputUnreadable, match=r"zarr\.json: it cannot be read: .*Input/output error"):
                ask(path)
    (path / "0").rename(path / "away")
    (path / "0").touch()  # a file in place of the folder of an array
    with pytest.raises(InputError, match=r"0/zarr\.json is not there"):
        open_output(path)
    (path / "0").unlink()
    (path / "away").rename(path / "0")
    (path / "zarr.json").write_bytes((path / "zarr.json").read_bytes()[:50])
    with pytest.raises(DamagedData, match=r"zarr\.json is damaged"):
        open_output(path)
    (path / "0" / "zarr.json").unlink()
    found = [line.removeprefix(f"metadata: {path}/") for line in metadata_problems(path, OME)]
    assert found == ["zarr.json is not what the run wrote", "0/zarr.json is missing"]
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
    for axes in ("x", "xyt", "ctyx", "yxc", "tt", "tcmyx", "zyxc"):  # which OME does not permit
        n = len(axes)
        with pytest.raises(ConfigError, match=r"write output\.format: zarr"):
            Layout((4,) * n, "uint8", (4,) * n, (4,) * n, "lz4", tuple(axes), (1.0,) * n, (None,) * n, True)


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


def test_blocks_fill_in_their_own_shards_only_converted(tmp_path: Path) -> None:
    path, region = tmp_path / "a.zarr", Region((8, 8), (20, 13))
    pixels = 300 * noise(PLAIN.shape, "float32")
    for dtype in ("float32", "uint8"):
        layout = replace(PLAIN, dtype=dtype)
        writer = pickle.loads(pickle.dumps(ShardWriter(path, layout)))
        for _ in range(2):  # it survives the recreation of its output
            create_output(path, layout, overwrite=True)
            count, _ = writer.write(region, pixels[region.slices])
        files = [file for file in (path / "c").rglob("*") if file.is_file()]
        assert sorted(str(f.relative_to(path)) for f in files) == ["c/1/1", "c/2/1"]
        assert count == sum(f.stat().st_size for f in files)
        expected = np.full(PLAIN.shape, np.nan if dtype == "float32" else 0, dtype)
        expected[region.slices] = to_dtype(pixels[region.slices], dtype)
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], expected)


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


def test_damage_is_reported_for_its_block_only_by_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shard = tmp_path / "a.zarr", tmp_path / "a.zarr/c/1/0"
    written(path, PLAIN)
    whole, everything = shard.read_bytes(), Region.whole(PLAIN.shape)
    by_the_index = inspect_block(path, PLAIN, everything, thorough=False)
    monkeypatch.delattr(os, "pread")
    assert inspect_block(path, PLAIN, everything, thorough=True) == by_the_index
    rows: dict[bytes | None, str] = {
        whole[:-5]: "the checksum of the index does not match",
        bytes([whole[0] ^ 1]) + whole[1:]: "chunk (0, 0): its crc32c checksum does not match",
        b"": "it was cut short",
        None: "the shard is missing",
    }
    for content, message in rows.items():
        shard.unlink() if content is None else shard.write_bytes(content)
        problems = check_block(path, PLAIN, Region((8, 0), (16, 8)))
        assert len(problems) == 1
        assert problems[0].startswith(f"{shard}: ")
        assert message in problems[0]
        assert check_block(path, PLAIN, everything) == problems
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


def test_a_file_replaces_nothing_unasked_and_has_neither_metadata_nor_levels(tmp_path: Path) -> None:
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
    LAYOUT.write(path, b"weights")
    restore_metadata(path, LAYOUT)
    assert (metadata_problems(path, LAYOUT), find_foreign_entry(path, LAYOUT)) == ([], "")
    assert (added_levels(path, LAYOUT), remove_added_levels(path, LAYOUT)) == (0, 0)
    assert layout_from_json(LAYOUT.to_json()) == LAYOUT
