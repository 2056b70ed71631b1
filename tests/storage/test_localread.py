"""Direct reads of chunk files agree with zarr-python bit for bit in any layout, or report the damage."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec

from halotile.errors import DamagedData
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.sharded.local_reader import LocalArray, open_local
from tests.cases import in_folders

COMPRESSORS: dict[str, list[Any]] = {
    "raw": [],
    "crc32c": [Crc32cCodec()],
    "lz4": [BloscCodec(cname="lz4", shuffle="shuffle")],
    "lz4 + crc32c": [BloscCodec(cname="lz4", shuffle="bitshuffle"), Crc32cCodec()],
    "blosc zstd": [BloscCodec(cname="zstd", shuffle="noshuffle")],
    "zstd": [ZstdCodec(checksum=True)],
    "zstd + crc32c": [ZstdCodec(), Crc32cCodec()],
    "gzip": [GzipCodec(level=1)],
}
V2_COMPRESSORS: list[dict[str, Any] | None] = [
    None,
    {"id": "bz2", "level": 1},
    {"id": "lz4", "acceleration": 1},
    {"id": "lzma", "format": 1, "check": -1, "preset": 0, "filters": None},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    {"id": "zstd", "level": 1},
    {"id": "gzip", "level": 1},
    {"id": "zlib", "level": 1},
]


def _local(folder: Path) -> LocalArray:
    array = zarr.open_array(folder, mode="r")
    local = open_local(folder, array.dtype, array.fill_value)
    assert local is not None
    return local


def _written(folder: Path, seed: int, **options: Any) -> Any:
    """An array in which only one box is written, so that some chunks are missing."""
    array = zarr.create_array(folder, **options)
    random = np.random.default_rng(seed)
    start = [int(random.integers(0, n)) for n in array.shape]
    stop = [int(random.integers(a, n)) + 1 for a, n in zip(start, array.shape, strict=True)]
    box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    array[box] = (random.random([b - a for a, b in zip(start, stop, strict=True)]) * 99).astype(array.dtype)
    return array


def same(ours: Any, theirs: Any) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype.newbyteorder("="), theirs.shape)
    assert ours.tobytes() == np.ascontiguousarray(theirs, ours.dtype).tobytes()


def sharded(**options: Any) -> dict[str, Any]:
    """Options of an array of shards with chunks of 8 x 8."""
    return {"serializer": ShardingCodec(chunk_shape=(8, 8), **options), "compressors": None}


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A possibly empty box in an array."""
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_v3_bits_are_those_of_zarr(data: st.DataObject) -> None:
    inner = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), label="inner chunk"))
    counts = tuple(data.draw(st.integers(1, 3)) for _ in inner)
    shard = tuple(i * c for i, c in zip(inner, counts, strict=True))
    shape = tuple(data.draw(st.integers(1, 3 * s)) for s in shard)
    options: dict[str, Any] = {
        "compressors": COMPRESSORS[data.draw(st.sampled_from(sorted(COMPRESSORS)), label="codec")] or None,
        "dtype": data.draw(st.sampled_from(["uint8", "bool", "int16", "float16", "float32", "float64", "complex64"])),
        "fill_value": data.draw(st.sampled_from([0, 1])),
        "chunk_key_encoding": {
            "name": data.draw(st.sampled_from(["default", "v2"])),
            "separator": data.draw(st.sampled_from(["/", "."])),
        },
    }
    location = data.draw(st.sampled_from([None, "start", "end"]), label="index")
    if location:
        options["serializer"] = ShardingCodec(
            chunk_shape=inner,
            codecs=[BytesCodec(), *(options.pop("compressors") or [])],
            index_codecs=[BytesCodec(), *data.draw(st.sampled_from([[], [Crc32cCodec()]]))],
            index_location=location,
        )
        options["compressors"] = None
    elif data.draw(st.booleans(), label="big-endian"):
        options["serializer"] = BytesCodec(endian="big")
    with tempfile.TemporaryDirectory() as name:
        array = _written(Path(name), data.draw(st.integers(0, 99)), shape=shape, chunks=shard, **options)
        local = _local(Path(name))
        for _ in range(3):
            region = data.draw(regions(shape))
            same(local.read(region), np.asarray(array[region.slices]))


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_v2_bits_are_those_of_zarr(data: st.DataObject) -> None:
    chunk = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="chunk"))
    shape = tuple(data.draw(st.integers(1, 3 * c)) for c in chunk)
    options: dict[str, Any] = {
        "compressors": data.draw(st.sampled_from(V2_COMPRESSORS)),
        "dtype": data.draw(st.sampled_from(["uint8", ">u2", "<i4", ">f4", "<f8"])),
        "fill_value": data.draw(st.sampled_from([0, 3, None])),
        "chunk_key_encoding": {"name": "v2", "separator": data.draw(st.sampled_from(["/", "."]))},
        "filters": None,
        "zarr_format": 2,
    }
    with tempfile.TemporaryDirectory() as name:
        array = _written(Path(name), data.draw(st.integers(0, 99)), shape=shape, chunks=chunk, **options)
        local = _local(Path(name))
        for _ in range(3):
            region = data.draw(regions(shape))
            same(local.read(region), np.asarray(array[region.slices]))


def test_other_layouts_are_left_to_zarr(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"compressors": [Crc32cCodec(), ZstdCodec()]},
        {"compressors": [ZstdCodec(), GzipCodec()]},
        sharded(codecs=[ShardingCodec(chunk_shape=(4, 4))]),
        sharded(index_codecs=[BytesCodec(endian="big"), Crc32cCodec()]),
        {"zarr_format": 2, "compressors": numcodecs.Base64()},
        {"zarr_format": 2, "filters": [numcodecs.Delta(dtype="<f4")]},
    ]
    for folder, options in in_folders(tmp_path, rows):
        array = zarr.create_array(folder, **({"shape": (16, 16), "chunks": (16, 16), "dtype": "f4"} | options))
        assert open_local(folder, array.dtype, array.fill_value) is None


def test_odd_or_missing_metadata_are_left_to_zarr(tmp_path: Path) -> None:
    assert open_local(tmp_path, np.dtype("f4"), 0) is None
    array = zarr.create_array(tmp_path, shape=(16, 16), chunks=(16, 16), dtype="f4")
    document = tmp_path / "zarr.json"
    whole = document.read_text()
    odd: list[Any] = [True, None, 3, "ab", [None, 16]]
    for shape in odd:
        metadata = json.loads(whole)
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = shape
        document.write_text(json.dumps(metadata))
        assert open_local(tmp_path, array.dtype, array.fill_value) is None, shape
    document.write_text(json.dumps(json.loads(whole) | {"chunk_key_encoding": {"name": "fanout"}}))
    assert open_local(tmp_path, array.dtype, array.fill_value) is None


def test_a_halo_read_fetches_only_the_inner_chunks_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"chunks": (16, 16), "shards": (32, 32), "dtype": "f4", "compressors": None}
    zarr.create_array(tmp_path, shape=(64, 64), **options)[...] = np.random.default_rng(0).random((64, 64))
    fetched: list[int] = []
    pread = os.pread

    def counted(file: int, nbytes: int, offset: int) -> bytes:
        fetched.append(nbytes)
        return pread(file, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    _local(tmp_path).read(Region((30, 30), (34, 34)))
    assert sorted(fetched) == [4 * 16 + 4] * 4 + [16 * 16 * 4] * 4


def test_raw_chunks_are_mapped_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = zarr.create_array(tmp_path, shape=(64, 64), chunks=(32, 32), dtype="f4", compressors=None)
    array[...] = 5
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("a raw chunk was read instead of mapped"))
    assert (_local(tmp_path).read(Region((30, 30), (34, 34))) == 5).all()


@pytest.mark.parametrize("codec", COMPRESSORS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_chunk_and_every_flipped_bit_under_a_checksum_are_detected(
    tmp_path: Path, codec: str, sharded: bool
) -> None:
    layout: dict[str, Any] = {"chunks": (8, 8), "shards": (16, 16)} if sharded else {"chunks": (16, 16)}
    array = zarr.create_array(tmp_path, shape=(16, 16), dtype="u2", compressors=COMPRESSORS[codec] or None, **layout)
    array[...] = np.random.default_rng(0).integers(0, 60000, (16, 16))
    chunk = tmp_path / "c" / "0" / "0"
    whole = chunk.read_bytes()
    for keep_bytes in (0, 1, 3, 4, 8, 15, 16, 20, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:keep_bytes])
        with pytest.raises(DamagedData):
            _local(tmp_path).read(Region((0, 0), (16, 16)))
    for place in range(0, len(whole), 3) if "crc32c" in codec else ():
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        with pytest.raises(DamagedData, match="chunk file c/0/0"):
            _local(tmp_path).read(Region((0, 0), (16, 16)))


def test_wrong_lengths_in_a_blosc_header_are_detected(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path, shape=(16, 16), chunks=(16, 16), dtype="u2", compressors=COMPRESSORS["lz4"])
    array[...] = 3
    chunk = tmp_path / "c" / "0" / "0"
    whole = chunk.read_bytes()
    for place in (4, 5, 6, 7, 12, 13, 14, 15):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(DamagedData, match="its header names"):
            _local(tmp_path).read(Region((0, 0), (16, 16)))


def test_an_index_that_points_outside_the_shard_is_detected(tmp_path: Path) -> None:
    index = [BytesCodec()]
    serializer = ShardingCodec(chunk_shape=(8, 8), codecs=[BytesCodec()], index_codecs=index)
    array = zarr.create_array(
        tmp_path, shape=(16, 16), chunks=(16, 16), dtype="u1", serializer=serializer, compressors=None
    )
    array[...] = 3
    chunk = tmp_path / "c" / "0" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-64] + (1 << 40).to_bytes(8, "little") + whole[-56:])
    with pytest.raises(DamagedData, match=r"inner chunk \(0, 0\): it ends at byte"):
        _local(tmp_path).read(Region((0, 0), (16, 16)))


TURN = TransposeCodec(order=(1, 0))
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
    "shards of transposed chunks": sharded(codecs=[TURN, BytesCodec(), ZstdCodec()]),
    "shards in shards": sharded(codecs=[ShardingCodec(chunk_shape=(4, 4))]),
    "a big-endian index": sharded(
        codecs=[BytesCodec(), GzipCodec(level=1)],
        index_codecs=[BytesCodec(endian="big"), Crc32cCodec()],
        index_location="start",
    ),
}
V2: dict[str, Any] = {"zarr_format": 2, "order": "F", "filters": None}
LAYOUTS |= {
    "v2, F order": V2 | {"compressors": None},
    "v2, F order, zstd": V2 | {"compressors": numcodecs.Zstd(level=1)},
    "v2, F order, lz4": V2 | {"compressors": numcodecs.Blosc(cname="lz4", shuffle=1)},
    "v2, F order, lzma": V2 | {"compressors": numcodecs.LZMA()},
    "v2, F order, bz2": V2 | {"compressors": numcodecs.BZ2(level=1)},
    "v2, F order, zlib": V2 | {"compressors": numcodecs.Zlib(level=1)},
    "v2, F order, gzip": V2 | {"compressors": numcodecs.GZip(level=1)},
    "v2, delta": V2 | {"order": "C", "filters": [numcodecs.Delta(dtype="<i2")]},
}
CHECKED = ["transposed, zstd, crc32c", "transposed, gzip, big-endian", "zstd, gzip", "a big-endian index"]

WHOLE = Region((0, 0), (40, 30))

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def written(folder: Path, layout: str, **options: Any) -> Any:
    usual = {"shape": (40, 30), "chunks": (16, 16), "dtype": "f4"}
    array = zarr.create_array(folder, **usual | LAYOUTS[layout] | options)
    pixels = np.random.default_rng(0).random(array.shape) * 99
    array[3:36, :14] = pixels.astype(array.dtype)[3:36, :14]
    return array


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
    for folder, layout in in_folders(tmp_path, ("transposed", "shards in shards")):
        written(folder, layout)
        source = open_source(folder)
        shutil.rmtree(folder / "c")
        assert (source.read(Region((0, 0), (4, 4))) == 0).all()
        shutil.rmtree(folder)
        with pytest.raises(DamagedData, match="is gone"):
            source.read(Region((0, 0), (4, 4)))


def test_fill_values(tmp_path: Path) -> None:
    rows = [*itertools.product(("v2, F order",), (None, 0, 7, np.nan))]
    rows += itertools.product(("zstd, gzip", "transposed"), (math.nan, math.inf, -0.0))
    for folder, (layout, fill) in in_folders(tmp_path, rows):
        array = written(folder, layout, dtype=">f4" if layout.startswith("v2") else "f4", fill_value=fill)
        same(open_source(folder).read(WHOLE), np.asarray(array[...]))
