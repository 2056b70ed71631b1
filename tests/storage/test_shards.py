"""Shards: encoded pixels can be decoded, and all damage is detected; levels that blocks write are means, the same whatever the blocks are."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded import layout as layouts
from halotile.storage.sharded.layout import halve
from halotile.storage.sharded.output import Layout, ShardWriter, check_block, create_output, halve_to, open_output
from halotile.storage.sharded.ownership import find_foreign_entry, metadata_problems
from halotile.storage.sharded.shards import CODECS, ShardFormat, decode_chunk, encode_shard, find_problems, read_index
from tests.cases import in_folders, thorough
from tests.storage.outputs import noise
from tests.support import noisy_image

FORM = ShardFormat((8, 8), (4, 4), "float32", "lz4")


def file_of(pixels: NDArray[Any], form: ShardFormat) -> bytes:
    return b"".join(encode_shard(pixels, form))


def decode_shard(file: bytes, form: ShardFormat) -> NDArray[Any]:
    """All pixels of a shard; those past the end of the array have the fill value."""
    pixels = np.full(form.shard, form.fill, form.stored)
    table = read_index(file, form)
    for index in np.ndindex(form.counts):
        if int(table[(*index, 0)]) != 2**64 - 1:
            target = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, form.chunk, strict=True))
            pixels[target] = decode_chunk(file, table, index, form)
    return pixels


@settings(deadline=None, max_examples=150)
@given(
    st.data(),
    st.sampled_from(CODECS),
    st.sampled_from(["uint8", "uint16", "int32", "float16", "float32", "float64", "complex64"]),
    st.integers(1, 3),
)
def test_pixels_come_back_bit_for_bit(data: st.DataObject, codec: str, dtype: str, axes: int) -> None:
    chunk = data.draw(st.tuples(*[st.integers(1, 5)] * axes))
    shard = tuple(c * data.draw(st.integers(1, 3)) for c in chunk)
    shape = tuple(data.draw(st.integers(1, s)) for s in shard)
    form = ShardFormat(shard, chunk, dtype, codec)
    pixels = noise(shape, dtype)
    decoded = decode_shard(file_of(pixels, form), form)
    inside = tuple(slice(n) for n in shape)
    assert decoded.shape == shard
    assert decoded[inside].tobytes() == pixels.tobytes()
    outside = np.ones(shard, bool)
    outside[inside] = False
    np.testing.assert_array_equal(decoded[outside], form.fill)


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
    problems = list(find_problems(bytes(damaged), FORM, (8, 8)))
    assert problems == ["chunk (1, 0): its crc32c checksum does not match"]
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


def test_a_chunk_of_another_size_is_detected_despite_a_correct_checksum() -> None:
    small = ShardFormat((4, 4), (2, 2), "float32", "lz4")
    file = file_of(noise((4, 4), "float32"), small)
    with pytest.raises(DamagedData, match=r"chunk \(0, 0\): its header names .* for 16 of pixels"):
        decode_shard(file, FORM)


def test_formats_that_do_not_fit_are_refused() -> None:
    rows: list[tuple[tuple[int, ...], tuple[int, ...], str, str]] = [
        ((8, 8), (3, 4), "lz4", "multiple of the chunk"),
        ((8,), (4, 4), "lz4", "multiple of the chunk"),
        ((0, 8), (4, 4), "lz4", "multiple of the chunk"),
        ((8, 8), (4, 4), "gzip", "write one of lz4, zstd, none"),
    ]
    for shard, chunk, codec, message in rows:
        with pytest.raises(ConfigError, match=message):
            ShardFormat(shard, chunk, "uint8", codec)


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


def layout_of(dtype: str = "float32", **changes: Any) -> Layout:
    units = ("micrometer", "micrometer")
    plain = Layout(SHAPE, dtype, (32, 32), (8, 8), "lz4", ("y", "x"), (0.5, 0.5), units, ome=True)
    return replace(plain, **changes)


def write_in_blocks(path: Path, layout: Layout, pixels: NDArray[Any], block: tuple[int, ...]) -> Layout:
    """Write an image block by block, and return its layout with levels."""
    layout = layout.in_levels(block)
    create_output(path, layout)
    writer = ShardWriter(path, layout)
    for part in Grid(layout.shape, block, ((0, 0),) * len(block)):
        writer.write(part.core, pixels[part.core.slices])
    return layout


def stored_levels(path: Path) -> list[NDArray[Any]]:
    group = zarr.open_group(path, mode="r")
    return [group[str(n)][...] for n in range(len(list(group.array_keys())))]


def slow_halves(pixels: NDArray[Any]) -> NDArray[Any]:
    """Means window by window, in double precision."""
    rows, columns = (-(-n // 2) for n in pixels.shape)
    result = np.full((rows, columns), np.nan)
    for y, x in np.ndindex(rows, columns):
        window = pixels[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float)
        if np.isfinite(window).any():
            result[y, x] = window[np.isfinite(window)].mean()
    return result


def test_a_level_holds_the_means_of_the_one_before_with_the_size_and_the_centre_of_its_pixels(tmp_path: Path) -> None:
    for folder, dtype in in_folders(tmp_path, ("uint8", "int16", "uint32", "float16", "float32", "float64")):
        pixels, path = noisy_image(SHAPE, dtype), folder / "a.zarr"
        layout = write_in_blocks(path, layout_of(dtype, translation=(10.0, 0.0)), pixels, (64, 64))
        stored = stored_levels(path)
        assert [level.shape for level in stored] == [(150, 213), (75, 107), (38, 54), (19, 27), (10, 14)]
        np.testing.assert_array_equal(stored[0], pixels)
        for finer, level in itertools.pairwise(stored):
            means = slow_halves(finer)
            wanted = np.rint(means) if pixels.dtype.kind in "iu" else means
            tolerance = {"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-12)
            np.testing.assert_allclose(level, wanted, rtol=tolerance)
            assert level.dtype == pixels.dtype
        assert open_output(path) == layout == Layout.from_json(layout.to_json())
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
    write_in_blocks(tmp_path / "a.zarr", layout_of(dtype), pixels, block)
    write_in_blocks(tmp_path / "b.zarr", layout_of(dtype), pixels, SHAPE)
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
    assert halve_to(pixels, (2, 2), "int16", 0).tolist() == [[1, 0, 1]]
    assert halve_to(np.array([[254, 255]], "uint8"), (1, 2), "uint8", 255).tolist() == [[254]]
    floats = halve_to(np.array([[-1.0, 1.0, 0.0, np.nan]], "float32"), (1, 2), "float32", 0)
    assert floats[0, 0] > 0
    assert floats[0, 1] == 0


def test_z_is_halved_where_voxels_are_cubes(tmp_path: Path) -> None:
    shape, um = (40, 40, 48), ("micrometer",) * 3
    cubes = Layout(shape, "uint8", (8, 16, 16), (8, 8, 8), "none", tuple("zyx"), (0.2,) * 3, um, True)
    flat = replace(cubes, scale=(0.5, 0.2, 0.2))
    pixels = noisy_image((40, 40, 48), "uint8")
    write_in_blocks(tmp_path / "a.zarr", cubes, pixels, (16, 16, 16))
    write_in_blocks(tmp_path / "b.zarr", flat, pixels, (16, 16, 16))
    assert [level.shape for level in stored_levels(tmp_path / "a.zarr")][:2] == [(40, 40, 48), (20, 20, 24)]
    assert [level.shape for level in stored_levels(tmp_path / "b.zarr")][:2] == [(40, 40, 48), (40, 20, 24)]
    eighths = pixels.reshape(20, 2, 20, 2, 24, 2).mean((1, 3, 5))
    np.testing.assert_array_equal(stored_levels(tmp_path / "a.zarr")[1], np.rint(eighths))


def test_a_lost_or_foreign_shard_of_a_level_is_found(tmp_path: Path) -> None:
    pixels = noisy_image(SHAPE)
    layout = layout_of().in_levels((64, 64))
    create_output(tmp_path / "a.zarr", layout)
    writer, grid = ShardWriter(tmp_path / "a.zarr", layout), layout.grid
    written = {part.number: writer.write(part.core, pixels[part.core.slices]) for part in grid}
    assert sum(1 for _ in (tmp_path / "a.zarr").rglob("c/*/*")) == layout.files
    assert not find_foreign_entry(tmp_path / "a.zarr", layout)
    for part in grid:
        assert not check_block(tmp_path / "a.zarr", layout, part.core, written[part.number].digest)
    one, other = (tmp_path / "a.zarr" / "2" / "c" / "0" / n for n in "01")
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    (problem,) = check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core, written[0].digest)
    assert "a shard of another place or time" in problem
    one.unlink()
    assert check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core) == [f"{one}: the shard is missing"]
    (tmp_path / "a.zarr" / "1" / "zarr.json").unlink()
    problems = list(metadata_problems(tmp_path / "a.zarr", layout, lambda: True))
    assert problems == [f"metadata: {tmp_path}/a.zarr/1/zarr.json is missing"]
    with pytest.raises(ConfigError, match="not a whole number of shards"):
        writer.write(Region((32, 0), (64, 64)), np.zeros((32, 64), "float32"))
