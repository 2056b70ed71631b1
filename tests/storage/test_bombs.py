"""Damaged or malicious inputs that claim far more memory than their pixels are refused before it is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from halotile.errors import DamagedData
from halotile.storage.formats import npy
from halotile.storage.formats import zarr as zarr_format
from halotile.storage.grid import Region
from tests.cases import in_folders

SIDE = 64
BOMB_BYTES = 64 * 2**20
ROOM_BYTES = 8 * 2**20

V3 = {"blosc": BloscCodec(), "zstd": ZstdCodec(), "gzip": GzipCodec()}
V2 = {
    "blosc": numcodecs.Blosc(),
    "zstd": numcodecs.Zstd(),
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "bz2": numcodecs.BZ2(),
    "lz4": numcodecs.LZ4(),
    "lzma": numcodecs.LZMA(preset=0),  # others have a dictionary of megabytes
}


CASES = [(3, codec) for codec in V3] + [(2, codec) for codec in V2]


def zstd_frame(nbytes: int, named: int | None = None, block: int = 2**17) -> bytes:
    """A zstd frame of zeros whose header contains this length, or none."""
    count = nbytes // block
    header = b"\x00\x50" if named is None else b"\xc0\x50" + struct.pack("<Q", named)
    # A run-length block: the count, the block type (1), and the flag of the last block.
    heads = [struct.pack("<I", block << 3 | 1 << 1 | (number == count - 1))[:3] for number in range(count)]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(head + b"\0" for head in heads)


def source_of(folder: Path, version: int, codec: str, data: bytes) -> Any:
    """A Zarr array with a single chunk of these bytes."""
    options: Any = {"zarr_format": version, "compressors": (V3 if version == 3 else V2)[codec]}
    zarr.create_array(folder / "in.zarr", data=np.ones((SIDE, SIDE), "u1"), chunks=(SIDE, SIDE), **options)
    (folder / "in.zarr" / ("c/0/0" if version == 3 else "0.0")).write_bytes(data)
    return zarr_format.open(str(folder / "in.zarr"))


@contextmanager
def little_taken() -> Iterator[None]:
    """Assert that memory use in the context is far below the claim of the input."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ROOM_BYTES
    finally:
        tracemalloc.stop()


def check_damaged(source: Any) -> None:
    """Assert that reading the pixels fails."""
    with pytest.raises(DamagedData, match="chunk file"):
        source.read(Region.whole(source.shape))


@pytest.mark.parametrize(("version", "codec"), CASES)
def test_a_chunk_that_inflates_beyond_its_pixels_or_is_short_is_damaged(
    tmp_path: Path, version: int, codec: str
) -> None:
    """Uninitialized memory must not be returned as pixels."""
    source = source_of(tmp_path, version, codec, V2[codec].encode(np.zeros(BOMB_BYTES, "u1")))
    with little_taken():
        check_damaged(source)
    noise = bytes(V2[codec].encode(np.random.default_rng(0).integers(0, 255, (SIDE, SIDE), "u1")))
    for data in (V2[codec].encode(np.zeros(SIDE * SIDE - 1, "u1")), noise[:-1], noise[:-5], noise[:-20]):
        (tmp_path / "in.zarr" / ("c/0/0" if version == 3 else "0.0")).write_bytes(data)
        check_damaged(source)


def test_a_chunk_that_names_no_length_or_a_wrong_one_is_damaged(tmp_path: Path) -> None:
    for folder, named in in_folders(tmp_path, (None, 100 * 2**30)):
        source = source_of(folder, 3, "zstd", zstd_frame(BOMB_BYTES, named))
        with little_taken():
            check_damaged(source)


def test_a_zstd_frame_without_its_length_is_read(tmp_path: Path) -> None:
    """Streaming writers omit the length."""
    source = source_of(tmp_path, 3, "zstd", zstd_frame(SIDE * SIDE, block=SIDE))
    assert (source.read(Region.whole(source.shape)) == 0).all()


def test_a_header_of_a_npy_file_that_names_gigabytes_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**28))
        file.truncate(2**29)
    with little_taken(), pytest.raises(DamagedData, match="header cannot be read"):
        npy.open(str(path))
