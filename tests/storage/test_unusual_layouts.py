"""Unusual layouts of Zarr: transposed chunks, chains of compressors, nested shards. Damage is reported, not read as pixels."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from halotile.errors import DamagedData
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region

TURN = TransposeCodec(order=(1, 0))
SHARD = (8, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "transposed": {"filters": [TURN], "compressors": None},
    "transposed, zstd, crc32c": {"filters": [TURN], "compressors": [ZstdCodec(), Crc32cCodec()]},
    "transposed, lz4": {"filters": [TURN], "compressors": [BloscCodec(cname="lz4", shuffle="bitshuffle")]},
    "transposed, gzip, big-endian": {
        "filters": [TURN],
        "serializer": BytesCodec(endian="big"),
        "compressors": [GzipCodec(level=1)],
    },
    "zstd, gzip": {"compressors": [ZstdCodec(), GzipCodec(level=1)]},
    "crc32c, zstd": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "shards of transposed chunks": {
        "serializer": ShardingCodec(chunk_shape=SHARD, codecs=[TURN, BytesCodec(), ZstdCodec()]),
        "compressors": None,
    },
    "shards in shards": {
        "serializer": ShardingCodec(chunk_shape=SHARD, codecs=[ShardingCodec(chunk_shape=(4, 4))]),
        "compressors": None,
    },
    "a big-endian index": {
        "serializer": ShardingCodec(
            chunk_shape=SHARD,
            codecs=[BytesCodec(), GzipCodec(level=1)],
            index_codecs=[BytesCodec(endian="big"), Crc32cCodec()],
            index_location="start",
        ),
        "compressors": None,
    },
}
V2: dict[str, Any] = {"zarr_format": 2, "order": "F", "filters": None}
LAYOUTS |= {
    "v2, F order": V2 | {"compressors": None},
    "v2, F order, zstd": V2 | {"compressors": numcodecs.Zstd(level=1)},
    "v2, F order, lz4": V2 | {"compressors": numcodecs.Blosc(cname="lz4", shuffle=1)},
}
CHECKED = ["transposed, zstd, crc32c", "transposed, gzip, big-endian", "zstd, gzip", "a big-endian index"]

WHOLE = Region((0, 0), (40, 30))

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def create(folder: Path, layout: str, **options: Any) -> Any:
    usual = {"shape": (40, 30), "chunks": (16, 16), "dtype": "f4"}
    return zarr.create_array(folder, **usual | LAYOUTS[layout] | options)


def written(folder: Path, layout: str, **options: Any) -> Any:
    array = create(folder, layout, **options)
    pixels = np.random.default_rng(0).random(array.shape) * 99
    array[3:36, :14] = pixels.astype(array.dtype)[3:36, :14]
    return array


def same(ours: Any, theirs: Any) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype.newbyteorder("="), theirs.shape)
    assert ours.tobytes() == np.ascontiguousarray(theirs, ours.dtype).tobytes()


@layouts
def test_a_source_has_the_bits_of_zarr_and_a_truncated_chunk_is_damage(tmp_path: Path, layout: str) -> None:
    array = written(tmp_path, layout, dtype="int16", fill_value=1)
    opened = open_source(tmp_path)
    for source in (opened, pickle.loads(pickle.dumps(opened))):
        for region in (WHOLE, Region((7, 5), (33, 17)), Region((39, 29), (40, 30)), Region((5, 5), (5, 9))):
            same(source.read(region), np.asarray(array[region.slices]))
    chunk = tmp_path / ("0.0" if layout.startswith("v2") else "c/0/0")
    whole = chunk.read_bytes()
    for keep_bytes in (0, 1, 4, 16, 20, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:keep_bytes])
        with pytest.raises(DamagedData, match=f"{tmp_path.name}.* cannot be read"):
            open_source(tmp_path).read(Region((0, 0), (16, 16)))


@pytest.mark.parametrize("layout", CHECKED)
def test_every_flipped_bit_under_a_checksum_is_damage_or_harmless(tmp_path: Path, layout: str) -> None:
    array = written(tmp_path, layout)
    true = np.asarray(array[:16, :16])
    chunk = tmp_path / "c/0/0"
    whole = chunk.read_bytes()
    found = 0
    for place in range(0, len(whole), 7):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            same(open_source(tmp_path).read(Region((0, 0), (16, 16))), true)
        except DamagedData:
            found += 1
    assert found > len(whole) // 7 * 0.9


def test_a_wrong_blosc_header_does_no_harm(tmp_path: Path) -> None:
    array = written(tmp_path, "transposed, lz4")
    true = np.asarray(array[:16, :16])
    chunk = tmp_path / "c/0/0"
    whole = bytearray(chunk.read_bytes())
    for place, bit in itertools.product(range(16), range(8)):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        try:
            assert open_source(tmp_path).read(Region((0, 0), (16, 16))).shape == true.shape
        except DamagedData:
            continue


def test_an_array_that_vanished_is_not_fill_value(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", "transposed")
    source = open_source(tmp_path / "a.zarr")
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(DamagedData, match="is gone"):
        source.read(Region((0, 0), (4, 4)))


def test_fill_values_of_zarr_v2(tmp_path: Path) -> None:
    for fill in (None, 0, 7, np.nan):
        array = written(tmp_path / str(fill), "v2, F order", dtype=">f4", fill_value=fill)
        same(open_source(tmp_path / str(fill)).read(WHOLE), np.asarray(array[...]))


@pytest.mark.parametrize(
    "options",
    [
        {"filters": [numcodecs.Delta(dtype="<f4")]},
        {"compressors": numcodecs.LZMA(), "order": "F"},
        {"compressors": numcodecs.BZ2(level=1), "order": "F"},
        {"compressors": numcodecs.Zlib(level=1), "order": "F"},
        {"compressors": numcodecs.GZip(level=1), "order": "F"},
    ],
)
def test_other_filters_and_codecs(tmp_path: Path, options: dict[str, Any]) -> None:
    array = zarr.create_array(
        tmp_path, **{"shape": (40, 30), "chunks": (16, 16), "dtype": "f4", "zarr_format": 2} | options
    )
    array[...] = np.arange(1200.0).reshape(40, 30)
    assert np.array_equal(open_source(tmp_path).read(WHOLE), array[...])
