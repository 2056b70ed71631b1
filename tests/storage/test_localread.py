"""Direct reads of chunk files agree with zarr-python bit for bit in any layout, or report the damage; none takes far more memory than its pixels."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
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
from halotile.storage.formats import npy
from halotile.storage.formats import zarr as zarr_format
from halotile.storage.grid import Region
from halotile.storage.sharded.local_reader import LocalArray, open_local
from tests.cases import in_folders

COMPRESSORS: dict[str, list[Any]] = {
    "raw": [], "crc32c": [Crc32cCodec()], "lz4": [BloscCodec(cname="lz4", shuffle="shuffle")],
    "lz4 + crc32c": [BloscCodec(cname="lz4", shuffle="bitshuffle"), Crc32cCodec()],
    "blosc zstd": [BloscCodec(cname="zstd", shuffle="noshuffle")],
    "zstd": [ZstdCodec(checksum=True)], "zstd + crc32c": [ZstdCodec(), Crc32cCodec()], "gzip": [GzipCodec(level=1)],
}  # fmt: skip


V3_CODECS = {"blosc": BloscCodec(), "zstd": ZstdCodec(), "gzip": GzipCodec()}


V2_CODECS = {
    "blosc": numcodecs.Blosc(cname="lz4", shuffle=1), "zstd": numcodecs.Zstd(), "gzip": numcodecs.GZip(level=1),
    "zlib": numcodecs.Zlib(level=1), "bz2": numcodecs.BZ2(level=1), "lz4": numcodecs.LZ4(),
    "lzma": numcodecs.LZMA(preset=0),  # others have a dictionary of megabytes
}  # fmt: skip


def _local(folder: Path) -> LocalArray:
    array = zarr.open_array(folder, mode="r")
    local = open_local(folder, array.dtype, array.fill_value)
    assert local is not None
    return local


def _written(folder: Path, seed: int, **options: Any) -> Any:
    """An array in which only one box is write_layout, so that some chunks are missing."""
    array, random = zarr.create_array(folder, **options), np.random.default_rng(seed)
    start = [int(random.integers(0, n)) for n in array.shape]
    stop = [int(random.integers(a, n)) + 1 for a, n in zip(start, array.shape, strict=True)]
    box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    array[box] = (random.random([b - a for a, b in zip(start, stop, strict=True)]) * 99).astype(array.dtype)
    return array


def same(ours: Any, theirs: Any) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype.newbyteorder("="), theirs.shape)
    assert ours.tobytes() == np.ascontiguousarray(theirs, ours.dtype).tobytes()


def shards_of(**options: Any) -> dict[str, Any]:
    """Options of an array of shards with chunks of 8 x 8."""
    return {"serializer": ShardingCodec(chunk_shape=(8, 8), **options), "compressors": None}


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A possibly empty box in an array."""
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_v2_bits_are_those_of_zarr(data: st.DataObject) -> None:
    chunk = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="chunk"))
    options: dict[str, Any] = {
        "compressors": data.draw(st.sampled_from([None, *V2_CODECS.values()])),
        "chunks": chunk,
        "dtype": data.draw(st.sampled_from(["uint8", ">u2", "<i4", ">f4", "<f8"])),
        "fill_value": data.draw(st.sampled_from([0, 3, None])),
        "chunk_key_encoding": {"name": "v2", "separator": data.draw(st.sampled_from(["/", "."]))},
        "filters": None,
        "zarr_format": 2,
    }
    options["shape"] = tuple(data.draw(st.integers(1, 3 * c)) for c in chunk)
    with tempfile.TemporaryDirectory() as name:
        array, local = _written(Path(name), data.draw(st.integers(0, 99)), **options), _local(Path(name))
        for _ in range(3):
            region = data.draw(regions(array.shape))
            same(local.read(region), np.asarray(array[region.slices]))


def test_a_halo_read_fetches_only_inner_chunks_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"shape": (64, 64), "dtype": "f4", "compressors": None}
    pixels = np.random.default_rng(0).random((64, 64)).astype("f4")
    for name, layout in {"shards": {"chunks": (16, 16), "shards": (32, 32)}, "raw": {"chunks": (32, 32)}}.items():
        zarr.create_array(tmp_path / name, **options, **layout)[...] = pixels
    fetched: list[int] = []
    pread = os.pread

    def counted(file: int, nbytes: int, offset: int) -> bytes:
        fetched.append(nbytes)
        return pread(file, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    for name, sizes in {"raw": [], "shards": [4 * 16 + 4] * 4 + [16 * 16 * 4] * 4}.items():
        same(_local(tmp_path / name).read(Region((30, 30), (34, 34))), pixels[30:34, 30:34])
        assert sorted(fetched) == sizes


def test_wrong_lengths_in_a_header_or_an_index_are_detected(tmp_path: Path) -> None:
    blosc: dict[str, Any] = {"compressors": COMPRESSORS["lz4"]}
    bare = ShardingCodec(chunk_shape=(8, 8), codecs=[BytesCodec()], index_codecs=[BytesCodec()])
    for folder, options in in_folders(tmp_path, (blosc, {"serializer": bare, "compressors": None})):
        zarr.create_array(folder, shape=(16, 16), chunks=(16, 16), dtype="u2", **options)[...] = 3
        chunk = folder / "c" / "0" / "0"
        whole = chunk.read_bytes()
        far = whole[:-64] + (1 << 40).to_bytes(8, "little") + whole[-56:]
        damaged = [(far, r"inner chunk \(0, 0\): it ends at byte")]
        if options is blosc:
            places = (4, 5, 6, 7, 12, 13, 14, 15)
            damaged = [(whole[:n] + bytes([whole[n] ^ 0x40]) + whole[n + 1 :], "its header names") for n in places]
        for content, words in damaged:
            chunk.write_bytes(content)
            with pytest.raises(DamagedData, match=words):
                _local(folder).read(Region((0, 0), (16, 16)))


TURN = TransposeCodec(order=(1, 0))


LAYOUTS: dict[str, dict[str, Any]] = {
    "transposed": {"filters": [TURN], "compressors": None},
    "transposed, zstd, crc32c": {"filters": [TURN], "compressors": [ZstdCodec(), Crc32cCodec()]},
    "transposed, lz4": {"filters": [TURN], "compressors": [BloscCodec(cname="lz4", shuffle="bitshuffle")]},
    "transposed, gzip, big-endian": {"filters": [TURN], "serializer": BytesCodec(endian="big"), "compressors": [GzipCodec(level=1)]},
    "zstd, gzip": {"compressors": [ZstdCodec(), GzipCodec(level=1)]},
    "crc32c, zstd": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "shards of transposed chunks": shards_of(codecs=[TURN, BytesCodec(), ZstdCodec()]),
    "shards in shards": shards_of(codecs=[ShardingCodec(chunk_shape=(4, 4))]),
    "a big-endian index": shards_of(
        codecs=[BytesCodec(), GzipCodec(level=1)], index_codecs=[BytesCodec(endian="big"), Crc32cCodec()], index_location="start",
    ),
}  # fmt: skip


V2: dict[str, Any] = {"zarr_format": 2, "order": "F", "filters": None}
LAYOUTS |= {f"v2, F order, {name}": V2 | {"compressors": codec} for name, codec in V2_CODECS.items()}
LAYOUTS["v2, F order"] = V2 | {"compressors": None}
LAYOUTS["v2, delta"] = V2 | {"order": "C", "filters": [numcodecs.Delta(dtype="<i2")]}


CHECKED = ["transposed, zstd, crc32c", "transposed, gzip, big-endian", "zstd, gzip", "a big-endian index"]
for name, codec in COMPRESSORS.items():
    LAYOUTS[name] = {"compressors": codec or None}
    LAYOUTS[f"{name}, shards"] = LAYOUTS[name] | {"chunks": (8, 8), "shards": (16, 16)}
    CHECKED += [name, f"{name}, shards"] if "crc32c" in name else []


WHOLE = Region((0, 0), (40, 30))


def write_layout(folder: Path, layout: str, **options: Any) -> Any:
    usual = {"shape": (40, 30), "chunks": (16, 16), "dtype": "f4"}
    array = zarr.create_array(folder, **usual | LAYOUTS[layout] | options)
    array[3:36, :14] = (np.random.default_rng(0).random(array.shape) * 99).astype(array.dtype)[3:36, :14]
    return array


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_has_the_bits_of_zarr_and_a_truncated_chunk_is_damage(tmp_path: Path, layout: str) -> None:
    array, opened = write_layout(tmp_path, layout, dtype="int16", fill_value=1), open_source(tmp_path)
    for source in (opened, pickle.loads(pickle.dumps(opened))):
        for region in (WHOLE, Region((7, 5), (33, 17)), Region((39, 29), (40, 30)), Region((5, 5), (5, 9))):
            same(source.read(region), np.asarray(array[region.slices]))
    chunk = tmp_path / ("0.0" if layout.startswith("v2") else "c/0/0")
    whole = chunk.read_bytes()
    for keep_bytes in (0, 1, 4, 16, 20, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:keep_bytes])
        said = rf"{tmp_path.name}: the pixels from \(1, 1\) to \(16, 16\).* cannot be read"
        with pytest.raises(DamagedData, match=said):
            open_source(tmp_path).read(Region((1, 1), (16, 16)))


@pytest.mark.parametrize("layout", [*CHECKED, "transposed, lz4"])
def test_every_flipped_bit_under_a_checksum_is_damage_or_harmless(tmp_path: Path, layout: str) -> None:
    true, chunk = np.asarray(write_layout(tmp_path, layout)[:16, :16]), tmp_path / "c/0/0"
    whole = chunk.read_bytes()
    flips = [(place, place % 8) for place in range(0, len(whole), 7)]
    if layout not in CHECKED:  # only the header, which is wrong, then, but does no harm
        flips = list(itertools.product(range(16), range(8)))
    found = 0
    for place, bit in flips:
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        try:
            pixels = open_source(tmp_path).read(Region((0, 0), (16, 16)))
        except DamagedData:
            found += 1
        else:
            assert pixels.shape == true.shape
            same(pixels, true if layout in CHECKED else pixels)
    assert layout not in CHECKED or found > len(flips) * 0.9


def test_an_array_that_vanished_is_not_fill_value(tmp_path: Path) -> None:
    for folder, layout in in_folders(tmp_path, ("transposed", "shards in shards")):
        write_layout(folder, layout)
        source = open_source(folder)
        shutil.rmtree(folder / "c")
        assert (source.read(Region((0, 0), (4, 4))) == 0).all()
        shutil.rmtree(folder)
        with pytest.raises(DamagedData, match="is gone"):
            source.read(Region((0, 0), (4, 4)))


SIDE = 64


BOMB_BYTES = 64 * 2**20


def zstd_frame(nbytes: int, named: int | None = None, block: int = 2**17) -> bytes:
    """A zstd frame of zeros whose header contains this length, or none."""
    count = nbytes // block
    header = b"\x00\x50" if named is None else b"\xc0\x50" + struct.pack("<Q", named)
    # A run-length block: the count, the block type (1), and the flag of the last block.
    heads = [struct.pack("<I", block << 3 | 1 << 1 | (number == count - 1))[:3] for number in range(count)]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(head + b"\0" for head in heads)


def source_of(folder: Path, version: int, codec: str, data: bytes) -> Any:
    """A Zarr array with a single chunk of these bytes."""
    options: Any = {"zarr_format": version, "compressors": (V3_CODECS if version == 3 else V2_CODECS)[codec]}
    zarr.create_array(folder / "in.zarr", data=np.ones((SIDE, SIDE), "u1"), chunks=(SIDE, SIDE), **options)
    (folder / "in.zarr" / ("c/0/0" if version == 3 else "0.0")).write_bytes(data)
    return zarr_format.open(str(folder / "in.zarr"))


@contextmanager
def little_taken() -> Iterator[None]:
    """Assert that memory use in the context is far below the claim of the input."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < (8 * 2**20)
    finally:
        tracemalloc.stop()


def check_damaged(source: Any) -> None:
    """Assert that reading the pixels fails."""
    with pytest.raises(DamagedData, match="chunk file"):
        source.read(Region.whole(source.shape))


@pytest.mark.parametrize(
    ("version", "codec"), [(v, codec) for v, kinds in ((3, V3_CODECS), (2, V2_CODECS)) for codec in kinds]
)
def test_a_chunk_that_inflates_too_far_or_is_short_is_damaged(tmp_path: Path, version: int, codec: str) -> None:
    """Uninitialized memory must not be returned as pixels."""
    source = source_of(tmp_path, version, codec, V2_CODECS[codec].encode(np.zeros(BOMB_BYTES, "u1")))
    with little_taken():
        check_damaged(source)
    noise = bytes(V2_CODECS[codec].encode(np.random.default_rng(0).integers(0, 255, (SIDE, SIDE), "u1")))
    for data in (V2_CODECS[codec].encode(np.zeros(SIDE * SIDE - 1, "u1")), noise[:-1], noise[:-5], noise[:-20]):
        (tmp_path / "in.zarr" / ("c/0/0" if version == 3 else "0.0")).write_bytes(data)
        check_damaged(source)


def test_a_zstd_frame_without_its_length_is_read_and_a_bomb_with_a_wrong_one_is_not(tmp_path: Path) -> None:
    """Streaming writers omit the length."""
    rows = ((SIDE * SIDE, None), (BOMB_BYTES, None), (BOMB_BYTES, 100 * 2**30))
    for folder, (nbytes, named) in in_folders(tmp_path, rows):
        source = source_of(folder, 3, "zstd", zstd_frame(nbytes, named, block=SIDE if nbytes < BOMB_BYTES else 2**17))
        if nbytes == SIDE * SIDE:
            assert (source.read(Region.whole(source.shape)) == 0).all()
            continue
        with little_taken():
            check_damaged(source)


def test_a_header_of_a_npy_file_that_names_gigabytes_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**28))
        file.truncate(2**29)
    with little_taken(), pytest.raises(DamagedData, match="header cannot be read"):
        npy.open(str(path))
