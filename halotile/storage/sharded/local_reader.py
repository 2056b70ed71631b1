"""Reads regions of a Zarr array in a local directory straight from its chunk files.

zarr-python spends several times the CPU time of a memory map on every chunk. Where the codecs
are the plain ones, this module reads the same bits without it:

====== ==========================================================================================
layout codecs
====== ==========================================================================================
v3     bytes, then none or one of blosc, zstd, gzip, then none or crc32c; the same inside sharding_indexed
v2     compressor null, blosc, zstd, gzip or zlib; no filters; C order
====== ==========================================================================================

Raw chunks are memory-mapped, so a halo touches only the rows it needs; the inner chunks of a shard
are fetched one by one. For everything else :func:`open_local` returns None.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData
from halotile.storage.grid import Region
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.rim import Pixels
from halotile.storage.sharded.codec_chain import (
    CHECKSUM_BYTES,
    COMPRESSORS,
    Bytes,
    Chain,
    checked_bytes,
    parse_chain,
)

_V2_COMPRESSORS = (*COMPRESSORS, "zlib")
_ABSENT = 2**64 - 1
_ENTRY_BYTES = 16


def open_local(folder: Path, dtype: np.dtype[np.generic], fill: Any) -> LocalArray | None:
    """The array in ``folder``, where its layout is simple enough to be read directly.

    Parameters
    ----------
    folder : Path
        Directory with the array's ``zarr.json`` or ``.zarray``.
    dtype : numpy dtype
        Type of a pixel.
    fill : scalar or None
        What a missing chunk reads as; None: zero.

    Returns
    -------
    LocalArray or None
        None: leave it to zarr-python.
    """
    native = dtype.newbyteorder("=")
    if native.kind not in "biuf":
        return None
    fill = native.type(0) if fill is None else fill
    for name, parse in (("zarr.json", _parse_v3), (".zarray", _parse_v2)):
        if (folder / name).is_file():
            return parse(folder / name, json.loads((folder / name).read_text()), native, fill)
    return None


@dataclass(frozen=True)
class Sharding:
    """How the inner chunks lie in a shard."""

    shape: tuple[int, ...]
    """Shape of a shard in pixels."""
    counts: tuple[int, ...]
    """Inner chunks along each axis."""
    index_checked: bool
    index_at_end: bool

    def read_index(self, file: int, size_bytes: int) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk: shape (*counts, 2)."""
        nbytes = math.prod(self.counts) * _ENTRY_BYTES + self.index_checked * CHECKSUM_BYTES
        if size_bytes < nbytes:
            raise DamagedData(f"the shard is cut short: {size_bytes} bytes, its index alone has {nbytes}")
        data = _pread(file, nbytes, size_bytes - nbytes if self.index_at_end else 0)
        try:
            return (checked_bytes(data) if self.index_checked else data).view("<u8").reshape(*self.counts, 2)
        except DamagedData as error:
            raise DamagedData(f"the shard's index: {error}") from error


@dataclass(frozen=True)
class LocalArray:
    """A Zarr array whose chunk files can be read directly."""

    document: Path
    native: np.dtype[np.generic]
    fill: Any
    chain: Chain
    key: Callable[[tuple[int, ...]], str]
    """Name of the file of a chunk or shard, by its index."""
    sharding: Sharding | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of what one file holds, in pixels."""
        return self.sharding.shape if self.sharding else self.chain.shape

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array.

        Raises
        ------
        DamagedData
            With the file, when what it holds cannot be right.
        """
        pixels = np.empty(region.shape, self.native)

        def read(piece: tuple[tuple[int, ...], Region, tuple[slice, ...]]) -> None:
            index, part, target = piece
            path = self.document.parent / self.key(index)
            try:
                self._read_file(path, part, pixels[target])
            except DamagedData as error:
                raise DamagedData(f"chunk file {self.key(index)}: {error}") from error

        IO_THREADS.all(read, pieces(region, self.file_shape))
        return pixels

    def _read_file(self, path: Path, part: Region, out: Pixels) -> None:
        """Fill ``out`` with a part of what one file holds."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            refuse_lost_array(self.document)
            out[...] = self.fill
            return
        try:
            size_bytes = os.fstat(file).st_size
            if self.sharding is not None:
                self._read_shard(file, size_bytes, part, out)
            elif self.chain.raw:
                out[...] = self._mapped(file, size_bytes)[part.slices]
            else:
                out[...] = self.chain.decode(_pread(file, size_bytes, 0))[part.slices]
        finally:
            os.close(file)

    def _mapped(self, file: int, size_bytes: int) -> Pixels:
        """The pixels of a raw chunk; only those that are used will be read."""
        if size_bytes != self.chain.nbytes:
            raise DamagedData(f"it holds {size_bytes} bytes of pixels instead of {self.chain.nbytes}")
        mapped = mmap.mmap(file, size_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, self.chain.stored).reshape(self.chain.shape)

    def _read_shard(self, file: int, size_bytes: int, part: Region, out: Pixels) -> None:
        assert self.sharding is not None
        index = self.sharding.read_index(file, size_bytes)
        for inner, inner_part, target in pieces(part, self.chain.shape):
            offset, nbytes = (int(n) for n in index[inner])
            if offset == _ABSENT and nbytes == _ABSENT:
                out[target] = self.fill
                continue
            try:
                if offset + nbytes > size_bytes:
                    raise DamagedData(f"it ends at byte {offset + nbytes} of a shard of {size_bytes} bytes")
                out[target] = self.chain.decode(_pread(file, nbytes, offset))[inner_part.slices]
            except DamagedData as error:
                raise DamagedData(f"inner chunk {inner}: {error}") from error


def refuse_lost_array(document: Path) -> None:
    """Raise where the metadata are gone: a missing chunk is fill value, but a disk that went away is no image of it.

    Raises
    ------
    DamagedData
        Naming the metadata.
    """
    if not document.exists():
        raise DamagedData(f"{document} is gone, so a missing file means nothing")


def pieces(
    region: Region, cell: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Region, tuple[slice, ...]]]:
    """A region cut by a regular grid: cell index, part in the cell's coordinates, place in the region.

    Examples
    --------
    >>> for piece in pieces(Region((3,), (9,)), (4,)):
    ...     print(*piece)
    (0,) Region(start=(3,), stop=(4,)) (slice(0, 1, None),)
    (1,) Region(start=(0,), stop=(4,)) (slice(1, 5, None),)
    (2,) Region(start=(0,), stop=(1,)) (slice(5, 6, None),)
    """
    axes = [_along(*axis) for axis in zip(region.start, region.stop, cell, strict=True)]
    for places in itertools.product(*axes):
        index, starts, stops, targets = zip(*places, strict=True) if places else ((), (), (), ())
        yield index, Region(starts, stops), targets


def _along(start: int, stop: int, cell: int) -> list[tuple[int, int, int, slice]]:
    """The same along one axis: for each cell its index, where the part starts and stops in it, and its place."""
    if start == stop:
        return []
    bounds = [start, *range((start // cell + 1) * cell, stop, cell), stop]
    return [
        (a // cell, a % cell, a % cell + b - a, slice(a - start, b - start))
        for a, b in itertools.pairwise(bounds)
    ]


def _pread(file: int, nbytes: int, offset: int) -> Bytes:
    """Bytes of a file; one call may return fewer than asked for, and never more than 2 GiB."""
    data = os.pread(file, nbytes, offset)
    while len(data) < nbytes:
        more = os.pread(file, nbytes - len(data), offset + len(data))
        if not more:
            raise DamagedData(f"it is cut short: {len(data)} bytes of {nbytes}")
        data += more
    return np.frombuffer(data, np.uint8)


def _parse_v3(
    document: Path, metadata: Mapping[str, Any], native: np.dtype[np.generic], fill: Any
) -> LocalArray | None:
    """An array from zarr.json."""
    grid, keys = metadata.get("chunk_grid", {}), metadata.get("chunk_key_encoding", {})
    if grid.get("name") != "regular" or metadata.get("storage_transformers"):
        return None
    key = _key_of(keys.get("name", ""), (keys.get("configuration") or {}).get("separator"))
    shape = tuple(map(int, grid["configuration"]["chunk_shape"]))
    codecs: Sequence[Mapping[str, Any]] = metadata.get("codecs", ())
    sharding = None
    if len(codecs) == 1 and codecs[0].get("name") == "sharding_indexed":
        layout = codecs[0].get("configuration", {})
        inner = tuple(map(int, layout["chunk_shape"]))
        sharding = _parse_sharding(layout, shape, inner)
        shape, codecs = inner, layout.get("codecs", ())
        if sharding is None:
            return None
    chain = parse_chain(codecs, shape, native)
    return LocalArray(document, native, fill, chain, key, sharding) if chain and key else None


def _parse_sharding(
    layout: Mapping[str, Any], shard: tuple[int, ...], inner: tuple[int, ...]
) -> Sharding | None:
    """The index layout of sharding_indexed: little-endian, with or without crc32c."""
    codecs: Sequence[Mapping[str, Any]] = layout.get("index_codecs", ())
    if [codec.get("name") for codec in codecs] not in (["bytes"], ["bytes", "crc32c"]):
        return None
    if (codecs[0].get("configuration") or {}).get("endian") != "little":
        return None
    counts = tuple(s // c for s, c in zip(shard, inner, strict=True))
    return Sharding(shard, counts, len(codecs) == 2, layout.get("index_location", "end") == "end")


def _parse_v2(
    document: Path, metadata: Mapping[str, Any], native: np.dtype[np.generic], fill: Any
) -> LocalArray | None:
    """An array from .zarray."""
    compressor = metadata.get("compressor")
    if metadata.get("filters") or metadata.get("order") != "C":
        return None
    if compressor is not None and compressor.get("id") not in _V2_COMPRESSORS:
        return None
    codec = None if compressor is None else numcodecs.get_codec({"id": compressor["id"]})
    chain = Chain(tuple(map(int, metadata["chunks"])), np.dtype(metadata["dtype"]), codec)
    key = _key_of("v2", metadata.get("dimension_separator"))
    return LocalArray(document, native, fill, chain, key) if key else None


def _key_of(encoding: str, separator: str | None) -> Callable[[tuple[int, ...]], str] | None:
    """How chunk files are named: ``c/0/1`` in v3, ``0.1`` in v2, by default."""
    prefix = {"default": "c", "v2": ""}.get(encoding)
    if prefix is None:
        return None
    between = separator or ("/" if prefix else ".")
    start = prefix + between if prefix else ""
    return lambda index: start + between.join(map(str, index))
