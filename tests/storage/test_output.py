"""Outputs: shards that are decoded bit for bit or found damaged, levels whatever the blocks are, metadata, and outputs that are one file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
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
from halotile.storage.sharded import layout as layouts
from halotile.storage.sharded import output, ownership
from halotile.storage.sharded.layout import DTYPES, halve
from halotile.storage.sharded.shards import CODECS, ShardFormat, decode_chunk, encode_shard, find_problems, read_index
from tests.cases import in_folders, thorough
from tests.storage.outputs import OME, PLAIN, means, noise, stored_levels, write_blocks, written
from tests.support import noisy_image

CHANNEL = {"color": "FF0000", "label": "DAPI", "window": {"start": 0, "end": 900, "min": 0, "max": 65535}}


WORDY = replace(OME, translation=(0.0, 0.0, 0.5, -1.25), name="cells", omero={"channels": [CHANNEL] * 3})


def tensorstore_read(path: Path) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    pixels: NDArray[Any] = tensorstore.open(spec, open=True).result().read().result()
    return pixels


def test_zarr_and_tensorstore_read_what_was_written_and_nan_or_zero_elsewhere(tmp_path: Path) -> None:
    for folder, (dtype, codec) in in_folders(tmp_path, itertools.product(DTYPES, ("lz4", "zstd", "none"))):
        layout, path = replace(PLAIN, dtype=dtype, codec=codec), folder / "a.zarr"
        output.create_output(path, layout)
        pixels = np.full(PLAIN.shape, {"f": np.nan, "c": complex(np.nan, np.nan)}.get(np.dtype(dtype).kind, 0), dtype)
        for whole in (False, True):
            if whole:
                pixels = noise(PLAIN.shape, dtype)
                output.ShardWriter(path, layout).write(Region.whole(PLAIN.shape), pixels)
            array = zarr.open_array(path, mode="r")
            assert (array.shards, array.chunks, array.dtype) == ((8, 8), (4, 4), np.dtype(dtype))
            np.testing.assert_array_equal(array[:], pixels)
            np.testing.assert_array_equal(tensorstore_read(path), pixels)
    zarr.open_array(path, mode="r+")[:8, :8] = 5  # zarr can write into the same array
    assert output.check_block(path, layout, Region.whole(PLAIN.shape)) == []


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_layout_is_read_back_by_zarr(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 4))
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * axes))
    chunk = data.draw(st.tuples(*[st.integers(1, 4)] * axes))
    shard = tuple(c * data.draw(st.integers(1, 3)) for c in chunk)
    names, ones, none = ("a", "z", "y", "x")[-axes:], (1.0,) * axes, (None,) * axes
    layout = output.Layout(shape, "int16", shard, chunk, "lz4", names, ones, none, ome=False)
    path = tmp_path_factory.mktemp("any") / "a.zarr"
    pixels = written(path, layout)
    np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], pixels)
    assert output.check_block(path, layout, Region.whole(shape)) == []


def test_ome_metadata_is_valid_and_holds_axes_scale_units_and_channels(tmp_path: Path) -> None:
    pixels, group = written(tmp_path / "a.zarr", WORDY), zarr.open_group(tmp_path / "a.zarr", mode="r")
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
        output.create_output(folder / "a.zarr", layout)
        assert output.open_output(folder / "a.zarr") == layout
        assert output.Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

    old = OME.to_json()
    for field in ("translation", "name", "omero"):  # which older versions lack
        del old[field]
    assert output.Layout.from_json(old) == OME


def test_damaged_metadata_are_detected_and_can_be_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    with pytest.raises(InputError, match="is no Zarr"):
        output.open_output(tmp_path)
    zarr.create_array(tmp_path / "b.zarr", shape=(4, 4), dtype="uint8", chunks=(2, 2))
    with pytest.raises(InputError, match="not laid out by halotile"):
        output.open_output(tmp_path / "b.zarr")
    pixels = written(path, OME)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        for ask in (output.open_output, lambda root: ownership.metadata_problems(root, OME)):
            with pytest.raises(InputUnreadable, match=r"zarr\.json: it cannot be read: .*Input/output error"):
                ask(path)
    (path / "0").rename(path / "away")
    (path / "0").touch()  # a file in place of the folder of an array
    with pytest.raises(InputError, match=r"0/zarr\.json is not there"):
        output.open_output(path)
    (path / "0").unlink()
    (path / "away").rename(path / "0")
    (path / "zarr.json").write_bytes((path / "zarr.json").read_bytes()[:50])
    with pytest.raises(DamagedData, match=r"zarr\.json is damaged"):
        output.open_output(path)
    (path / "0" / "zarr.json").unlink()
    found = [line.removeprefix(f"metadata: {path}/") for line in ownership.metadata_problems(path, OME)]
    assert found == ["zarr.json is not what the run wrote", "0/zarr.json is missing"]
    ownership.restore_metadata(path, OME)
    assert (ownership.metadata_problems(path, OME), output.open_output(path)) == ([], OME)
    np.testing.assert_array_equal(zarr.open_array(path / "0", mode="r")[:], pixels)


def test_layouts_that_do_not_fit_are_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"shape": (0, 13)}, "axis without pixels"),
        ({"dtype": "complex256"}, "output.dtype is 'complex256'"),
        ({"dtype": "int64"}, "output.dtype is 'int64'"),
        ({"chunk": (3, 4)}, "multiple of the chunk"),
        ({"codec": "gzip"}, "write one of lz4, zstd, none"),
        ({"scale": (1.0,)}, "different numbers of axes"),
    ]
    for change, message in rows:
        with pytest.raises(ConfigError, match=message):
            replace(PLAIN, **change)
    for axes in ("x", "xyt", "ctyx", "yxc", "tt", "tcmyx", "zyxc"):  # which OME does not permit
        n = len(axes)
        with pytest.raises(ConfigError, match=r"write output\.format: zarr"):
            output.Layout((4,) * n, "uint8", (4,) * n, (4,) * n, "lz4", tuple(axes), (1.0,) * n, (None,) * n, True)


def test_a_block_that_is_not_whole_shards_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
        ((0, 0), (8, 9), "it covers 0 to 9 of axis x, and output.shard is 8 there"),
        ((4, 0), (8, 8), "it covers 4 to 8 of axis y"),
        ((16, 8), (24, 13), "not inside the output's shape"),
        ((8, 8), (8, 8), "is empty"),
    ]
    for folder, (start, stop, message) in in_folders(tmp_path, rows):
        output.create_output(folder / "a.zarr", PLAIN)
        region = Region(start, stop)
        with pytest.raises(ConfigError, match=message):
            output.ShardWriter(folder / "a.zarr", PLAIN).write(region, np.zeros(region.shape, "float32"))
        with pytest.raises(ConfigError, match=r"pixels of shape \(8, 7\) do not fill"):
            output.ShardWriter(folder / "a.zarr", PLAIN).write(Region((0, 0), (8, 8)), np.zeros((8, 7)))
        assert os.listdir(folder / "a.zarr") == ["zarr.json"]


def test_blocks_fill_in_their_own_shards_only_converted(tmp_path: Path) -> None:
    path, region = tmp_path / "a.zarr", Region((8, 8), (20, 13))
    pixels = 300 * noise(PLAIN.shape, "float32")
    for dtype in ("float32", "uint8"):
        layout = replace(PLAIN, dtype=dtype)
        writer = pickle.loads(pickle.dumps(output.ShardWriter(path, layout)))
        for _ in range(2):  # it survives the recreation of its output
            output.create_output(path, layout, overwrite=True)
            count, _ = writer.write(region, pixels[region.slices])
        files = [file for file in (path / "c").rglob("*") if file.is_file()]
        assert sorted(str(f.relative_to(path)) for f in files) == ["c/1/1", "c/2/1"]
        assert count == sum(f.stat().st_size for f in files)
        expected = np.full(PLAIN.shape, np.nan if dtype == "float32" else 0, dtype)
        expected[region.slices] = output.to_dtype(pixels[region.slices], dtype)
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], expected)


def test_a_writer_does_not_recreate_a_removed_output(tmp_path: Path) -> None:
    for folder, (begun, layout) in in_folders(tmp_path, itertools.product((False, True), (PLAIN, OME))):
        path, region = folder / "a.zarr", layout.grid.block_at(0).core
        writer = output.ShardWriter(path, layout)
        output.create_output(path, layout)
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
    by_the_index = output.inspect_block(path, PLAIN, everything, thorough=False)
    monkeypatch.delattr(os, "pread")
    assert output.inspect_block(path, PLAIN, everything, thorough=True) == by_the_index
    rows: dict[bytes | None, str] = {
        whole[:-5]: "the checksum of the index does not match",
        bytes([whole[0] ^ 1]) + whole[1:]: "chunk (0, 0): its crc32c checksum does not match",
        b"": "it was cut short",
        None: "the shard is missing",
    }
    for content, message in rows.items():
        shard.unlink() if content is None else shard.write_bytes(content)
        problems = output.check_block(path, PLAIN, Region((8, 0), (16, 8)))
        assert len(problems) == 1
        assert problems[0].startswith(f"{shard}: ")
        assert message in problems[0]
        assert output.check_block(path, PLAIN, everything) == problems
        assert output.check_block(path, PLAIN, Region((0, 0), (8, 13))) == []


def test_integers_round_half_to_even_and_all_clip() -> None:
    rows: list[tuple[NDArray[Any], str, list[Any]]] = [
        (np.array([0.5, 1.5, 2.5, -0.5]), "uint8", [0, 2, 2, 0]),
        (np.array([-1e9, 1e9, np.inf, -np.inf]), "uint8", [0, 255, 255, 0]),
        (np.array([3.5 - 1e-12], "float64"), "uint8", [3]),
        (np.array([-3e9, 3e9, 4294967295], "float32"), "int32", [-(2**31), 2**31 - 1, 2**31 - 1]),
        (np.array([-5, 5e9, 4294967040], "float32"), "uint32", [0, 2**32 - 1, 4294967040]),
        (np.array([np.inf, 65504], "float16"), "uint16", [65535, 65504]),
        (np.array([-1, 70000], "int32"), "uint16", [0, 65535]), (np.array([200], "uint8"), "int8", [127]),
        (np.array([-7], "int8"), "uint32", [0]), (np.array([2**32 - 1], "uint32"), "int32", [2**31 - 1]),
        (np.array([True, False]), "uint8", [1, 0]), (np.array([1.1], "float64"), "float32", [np.float32(1.1)]),
        (np.array([1e10, -1e5, 65519, 65520], "float32"), "float16", [65504, -65504, 65504, 65504]),
        (np.array([np.inf, -np.inf, 7], "float32"), "float16", [np.inf, -np.inf, 7]),
        (np.array([65535, 3], "uint16"), "float16", [65504, 3]),
        (np.array([1e300, -np.inf], "float64"), "float32", [np.finfo("float32").max, -np.inf]),
    ]  # fmt: skip
    for pixels, dtype, expected in rows:
        converted = output.to_dtype(pixels, dtype)
        assert (converted.dtype, converted.tolist()) == (np.dtype(dtype), np.array(expected, dtype).tolist())


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["uint8", "uint16", "uint32", "int8", "int16", "int32"]),
    st.sampled_from(["float16", "float32", "float64"]),
    st.floats(allow_nan=False),
)
def test_a_float_becomes_the_nearest_representable_integer(dtype: str, source: str, value: float) -> None:
    with np.errstate(over="ignore"):
        pixel = np.array([value]).astype(source)
    limits, exact = np.iinfo(dtype), float(pixel[0])
    nearest = limits.min if exact < limits.min else limits.max if exact > limits.max else round(exact)
    assert output.to_dtype(pixel, dtype).tolist() == [nearest]


def test_nan_becomes_no_integer_and_complex_numbers_no_real_ones() -> None:
    with pytest.raises(InputError, match="a pixel is NaN, and the output is uint8"):
        output.to_dtype(np.array([1.0, np.nan]), "uint8")
    with pytest.raises(ConfigError, match="complex, and the output is float32"):
        output.to_dtype(np.array([1 + 2j]), "float32")
    assert output.to_dtype(np.array([1.5], np.float32), "complex64").tolist() == [1.5 + 0j]
    pixels = np.ones((3, 3), "float32")
    assert output.to_dtype(pixels, "float32") is pixels, "pixels that fit are not copied"


LAYOUT, ALL = output.FileLayout(1000), Region((0,), (1,))


def test_a_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    problems = output.check_block(path, LAYOUT, ALL, b"1234")
    assert problems == [f"{path}: the file is missing"]
    assert ownership.foreign_pixels_reason({0: problems}, 1) == ""
    output.create_output(path, LAYOUT)
    assert not path.exists(), "it has its name once it is whole"
    path.touch()
    assert output.check_block(path, LAYOUT, ALL) == [f"{path}: the file is empty"]
    size, digest = LAYOUT.write(path, b"weights")
    assert (size, path.read_bytes(), output.check_block(path, LAYOUT, ALL, digest)) == (7, b"weights", [])
    path.write_bytes(b"WEIGHTS")
    problems = output.check_block(path, LAYOUT, ALL, digest)
    assert problems == [f"{path}: {output.FOREIGN_FILE}"]
    assert ownership.foreign_pixels_reason({0: problems}, 1) == "the file has other contents"
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert output.check_block(path, LAYOUT, ALL) == [f"{path}: the file {output.UNREADABLE}: Input/output error"]


def test_a_file_replaces_nothing_unasked_and_has_neither_metadata_nor_levels(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"of another program")
    with pytest.raises(OutputRefused, match="it already exists"):
        output.create_output(path, LAYOUT)
    output.create_output(path, LAYOUT, overwrite=True)
    assert not path.exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    for name, said in {"folder": "a folder, and the output is a file", "link": "a symlink to"}.items():
        with pytest.raises(OutputRefused, match=said):
            output.create_output(tmp_path / name, LAYOUT, overwrite=True)
    LAYOUT.write(path, b"weights")
    ownership.restore_metadata(path, LAYOUT)
    assert (ownership.metadata_problems(path, LAYOUT), ownership.find_foreign_entry(path, LAYOUT)) == ([], "")
    assert (ownership.added_levels(path, LAYOUT), ownership.remove_added_levels(path, LAYOUT)) == (0, 0)
    assert output.layout_from_json(LAYOUT.to_json()) == LAYOUT


FORM = ShardFormat((8, 8), (4, 4), "float32", "lz4")


def file_of(pixels: NDArray[Any], form: ShardFormat) -> bytes:
    return b"".join(encode_shard(pixels, form))


def decode_shard(file: bytes, form: ShardFormat) -> NDArray[Any]:
    """All pixels of a shard; those past the end of the array have the fill value."""
    pixels, table = np.full(form.shard, form.fill, form.stored), read_index(file, form)
    for index in np.ndindex(form.counts):
        if int(table[(*index, 0)]) != 2**64 - 1:
            target = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, form.chunk, strict=True))
            pixels[target] = decode_chunk(file, table, index, form)
    return pixels


def test_chunks_equal_to_the_fill_value_are_written_and_a_missing_or_damaged_one_is_named() -> None:
    form = ShardFormat((8, 8), (4, 4), "uint8", "lz4")
    table = read_index(file_of(np.zeros((8, 3), "uint8"), form), form)
    there = table[..., 0] != 2**64 - 1
    assert there.tolist() == [[True, False], [True, False]]
    assert (table[~there] == 2**64 - 1).all()
    bare = ShardFormat((8, 8), (4, 4), "uint8", "none")
    assert len(file_of(noise((8, 8), "uint8"), bare)) == 4 * (16 + 4) + 4 * 16 + 4, "nothing else is"
    file = file_of(noise((8, 3), "float32"), FORM)
    assert list(find_problems(file, FORM, (8, 3))) == []
    assert list(find_problems(file, FORM, (8, 8))) == [f"chunk ({row}, 1) is not in the file" for row in (0, 1)]
    pixels = noise((8, 8), "float32")
    damaged = bytearray(file_of(pixels, FORM))
    table = read_index(bytes(damaged), FORM)
    damaged[int(table[1, 0, 0]) + 20] ^= 1
    assert list(find_problems(bytes(damaged), FORM, (8, 8))) == ["chunk (1, 0): its crc32c checksum does not match"]
    np.testing.assert_array_equal(decode_chunk(bytes(damaged), table, (0, 1), FORM), pixels[:4, 4:])


def test_every_flipped_bit_and_every_truncation_is_detected() -> None:
    for codec in CODECS:
        form = ShardFormat((4, 4), (2, 4), "uint16", codec)
        good = file_of(noise((4, 4), "uint16"), form)
        assert list(find_problems(good, form, (4, 4))) == []
        for bit in range(8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            assert list(find_problems(bytes(bad), form, (4, 4))), f"bit {bit}"
            with pytest.raises(DamagedData):
                decode_shard(bytes(bad), form)
        for length in range(len(good)):
            assert list(find_problems(good[:length], form, (4, 4)))
    small = file_of(noise((4, 4), "float32"), ShardFormat((4, 4), (2, 2), "float32", "lz4"))
    with pytest.raises(DamagedData, match=r"chunk \(0, 0\): its header names .* for 16 of pixels"):
        decode_shard(small, FORM)  # of another size, despite a correct checksum


def test_threads_and_any_memory_order_encode_the_same_bytes() -> None:
    form = ShardFormat((64, 64), (16, 16), "float32", "zstd")
    shards = [noise((64, 64), "float32") + i for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: file_of(p, form), shards)) == [file_of(p, form) for p in shards]
    for codec in CODECS:
        form = ShardFormat((8, 8), (4, 4), "float32", codec)
        pixels = noise((16, 16), "float32")[::2, ::-2].T
        assert file_of(pixels, form) == file_of(np.ascontiguousarray(pixels), form)


SHAPE = (150, 213)


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LARGEST_TOP", 20)
    monkeypatch.setattr(layouts, "SMALLEST_SHARD", 4)


def layout_of(dtype: str = "float32", **changes: Any) -> output.Layout:
    units = ("micrometer", "micrometer")
    return replace(
        output.Layout(SHAPE, dtype, (32, 32), (8, 8), "lz4", ("y", "x"), (0.5, 0.5), units, ome=True), **changes
    )


def test_a_level_holds_the_means_of_the_one_before_with_the_size_and_the_centre_of_its_pixels(tmp_path: Path) -> None:
    for folder, dtype in in_folders(tmp_path, ("uint8", "int16", "uint32", "float16", "float32", "float64")):
        pixels, path = noisy_image(SHAPE, dtype), folder / "a.zarr"
        layout = write_blocks(path, layout_of(dtype, translation=(10.0, 0.0)).in_levels((64, 64)), pixels)
        stored = stored_levels(path)
        assert [level.shape for level in stored] == [(150, 213), (75, 107), (38, 54), (19, 27), (10, 14)]
        np.testing.assert_array_equal(stored[0], pixels)
        for finer, level in itertools.pairwise(stored):
            np.testing.assert_allclose(level, means(finer), rtol={"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-12))
            assert level.dtype == pixels.dtype
        assert output.open_output(path) == layout == output.Layout.from_json(layout.to_json())
        image = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"][0]
        scale, shift = image["datasets"][2]["coordinateTransformations"]
        assert (scale["scale"], shift["translation"]) == ([2.0, 2.0], [10.75, 0.75])
    assert layout_of(ome=False).in_levels((64, 64)).levels == 1
    assert layout_of(shape=(20, 20)).in_levels((32, 32)).levels == 1
    assert layout_of().in_levels((64, 64), 2).levels == 2


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("block", [(32, 32), thorough((96, 64)), (160, 224)])
def test_levels_do_not_depend_on_the_blocks(tmp_path: Path, dtype: str, block: tuple[int, int]) -> None:
    pixels = noisy_image(SHAPE, dtype)
    if dtype == "float32":
        pixels[20:61, 30:77] = np.nan
        pixels[100, ::3] = np.nan
        pixels[140:, 200:] = 3e38  # a sum of two is beyond the type
    write_blocks(tmp_path / "a.zarr", layout_of(dtype).in_levels(block), pixels)
    write_blocks(tmp_path / "b.zarr", layout_of(dtype).in_levels(SHAPE), pixels)
    found, whole = stored_levels(tmp_path / "a.zarr"), stored_levels(tmp_path / "b.zarr")
    for level, expected in zip(found, whole, strict=False):
        np.testing.assert_array_equal(level, expected)
    assert len(found) >= 4


def test_holes_are_left_out_and_a_mean_that_is_none_does_not_get_the_value_of_one() -> None:
    pixels = np.array([[1, -9, -9, -9], [3, 5, -9, -9]], "int16")
    np.testing.assert_array_equal(halve(pixels, (2, 2), -9), [[3, np.nan]])
    floats = np.where(pixels == -9, np.nan, pixels).astype("float32")
    np.testing.assert_array_equal(halve(floats, (2, 2), None), [[3, np.nan]])
    np.testing.assert_array_equal(halve(np.full((2, 2), 3e38, "float32"), (2, 2), None), [[np.float32(3e38)]])
    pixels = np.array([[-3, 3, 0, 0, -1, 0], [3, -3, 0, 0, 0, 1]], "int16")
    assert output.halve_to(pixels, (2, 2), "int16", 0).tolist() == [[1, 0, 1]]
    assert output.halve_to(np.array([[254, 255]], "uint8"), (1, 2), "uint8", 255).tolist() == [[254]]
    floats = output.halve_to(np.array([[-1.0, 1.0, 0.0, np.nan]], "float32"), (1, 2), "float32", 0)
    assert floats[0, 0] > 0
    assert floats[0, 1] == 0


def test_z_is_halved_where_voxels_are_cubes(tmp_path: Path) -> None:
    shape, um = (40, 40, 48), ("micrometer",) * 3
    cubes = output.Layout(shape, "uint8", (8, 16, 16), (8, 8, 8), "none", tuple("zyx"), (0.2,) * 3, um, True)
    flat, pixels = replace(cubes, scale=(0.5, 0.2, 0.2)), noisy_image((40, 40, 48), "uint8")
    write_blocks(tmp_path / "a.zarr", cubes.in_levels((16, 16, 16)), pixels)
    write_blocks(tmp_path / "b.zarr", flat.in_levels((16, 16, 16)), pixels)
    assert [level.shape for level in stored_levels(tmp_path / "a.zarr")][:2] == [(40, 40, 48), (20, 20, 24)]
    assert [level.shape for level in stored_levels(tmp_path / "b.zarr")][:2] == [(40, 40, 48), (40, 20, 24)]
    eighths = pixels.reshape(20, 2, 20, 2, 24, 2).mean((1, 3, 5))
    np.testing.assert_array_equal(stored_levels(tmp_path / "a.zarr")[1], np.rint(eighths))


def test_a_lost_or_foreign_shard_of_a_level_is_found(tmp_path: Path) -> None:
    pixels, layout = noisy_image(SHAPE), layout_of().in_levels((64, 64))
    output.create_output(tmp_path / "a.zarr", layout)
    writer, grid = output.ShardWriter(tmp_path / "a.zarr", layout), layout.grid
    written = {part.number: writer.write(part.core, pixels[part.core.slices]) for part in grid}
    assert sum(1 for _ in (tmp_path / "a.zarr").rglob("c/*/*")) == layout.files
    assert not ownership.find_foreign_entry(tmp_path / "a.zarr", layout)
    for part in grid:
        assert not output.check_block(tmp_path / "a.zarr", layout, part.core, written[part.number].digest)
    one, other = (tmp_path / "a.zarr" / "2" / "c" / "0" / n for n in "01")
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    (problem,) = output.check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core, written[0].digest)
    assert "a shard of another place or time" in problem
    one.unlink()
    assert output.check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core) == [f"{one}: the shard is missing"]
    with pytest.raises(ConfigError, match="not a whole number of shards"):
        writer.write(Region((32, 0), (64, 64)), np.zeros((32, 64), "float32"))
