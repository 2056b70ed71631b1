"""Shards: encoded pixels can be decoded, and all damage is detected."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData
from halotile.storage.sharded.shards import CODECS, ShardFormat, decode_chunk, encode_shard, find_problems, read_index

DTYPES = ["uint8", "uint16", "int32", "float16", "float32", "float64"]
FORM = ShardFormat((8, 8), (4, 4), "float32", "lz4")


def noise(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return (np.random.default_rng(7).random(shape) * 100).astype(dtype)


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
@given(st.data(), st.sampled_from(CODECS), st.sampled_from(DTYPES), st.integers(1, 3))
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


def test_pixels_in_any_memory_order_are_encoded_alike() -> None:
    for codec in CODECS:
        form = ShardFormat((8, 8), (4, 4), "float32", codec)
        pixels = noise((16, 16), "float32")[::2, ::-2].T
        assert file_of(pixels, form) == file_of(np.ascontiguousarray(pixels), form)


def test_chunks_equal_to_the_fill_value_are_written_and_chunks_outside_are_not() -> None:
    form = ShardFormat((8, 8), (4, 4), "uint8", "lz4")
    table = read_index(file_of(np.zeros((8, 3), "uint8"), form), form)
    there = table[..., 0] != 2**64 - 1
    assert there.tolist() == [[True, False], [True, False]]
    assert (table[~there] == 2**64 - 1).all()
    form = ShardFormat((8, 8), (4, 4), "uint8", "none")
    assert len(file_of(noise((8, 8), "uint8"), form)) == 4 * (16 + 4) + 4 * 16 + 4, "nothing else is"


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


def test_a_missing_chunk_is_named() -> None:
    file = file_of(noise((8, 3), "float32"), FORM)
    assert list(find_problems(file, FORM, (8, 3))) == []
    expected = [f"chunk ({row}, 1) is not in the file" for row in (0, 1)]
    assert list(find_problems(file, FORM, (8, 8))) == expected


def test_a_damaged_chunk_is_named_and_the_others_still_decode() -> None:
    pixels = noise((8, 8), "float32")
    file = bytearray(file_of(pixels, FORM))
    table = read_index(bytes(file), FORM)
    file[int(table[1, 0, 0]) + 20] ^= 1
    problems = list(find_problems(bytes(file), FORM, (8, 8)))
    assert problems == ["chunk (1, 0): its crc32c checksum does not match"]
    np.testing.assert_array_equal(decode_chunk(bytes(file), table, (0, 1), FORM), pixels[:4, 4:])


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


def test_threads_encode_the_same_bytes() -> None:
    form = ShardFormat((64, 64), (16, 16), "float32", "zstd")
    shards = [noise((64, 64), "float32") + i for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: file_of(p, form), shards)) == [file_of(p, form) for p in shards]


def test_integers_fill_with_zero_and_floats_with_nan() -> None:
    assert ShardFormat((1,), (1,), "int8", "none").fill == 0
    assert math.isnan(ShardFormat((1,), (1,), "float16", "none").fill.real)
    assert np.isnan(ShardFormat((1,), (1,), "complex64", "none").fill)
