"""Direct reading of regions from the chunk files of a Zarr array in a local directory.

zarr-python spends several times the CPU time of a memory map on every chunk. For common codecs,
this module reads the same bits without it:

====== ==========================================================================================
layout codecs
====== ==========================================================================================
v3     none or one transpose, bytes, none or one of blosc, zstd, gzip, none or crc32c; also inside sharding_indexed
v2     compressor null, blosc, zstd, gzip, zlib, bz2, lz4 or lzma; no filters; C or F order
====== ==========================================================================================

Raw chunks are memory-mapped, so that a halo touches only the rows it needs; the inner chunks of a shard
are read individually. For all other layouts :func:`open_local` returns None.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import math
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData
from halotile.storage.grid import Region
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.rim import Pixels

# Blosc's own thread pool is shared by the whole process, locked, and holds the GIL. Without it, calls are independent.
numcodecs.blosc.use_threads = False

Bytes = NDArray[np.uint8]

COMPRESSORS = ("blosc", "zstd", "gzip")  # supported compressors of Zarr v3
CHECKSUM_BYTES = 4
_ORDERS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}
_BLOSC_HEADER_BYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BYTES = 18  # maximum size of a zstd frame header


@dataclass(frozen=True)
class Chain:
    """The codecs of a chunk."""

    shape: tuple[int, ...]
    stored: np.dtype[np.generic]
    compressor: Any = None
    checked: bool = False
    order: tuple[int, ...] = ()  # axes of the chunk in the order in which they are stored; empty: as they are

    @property
    def nbytes(self) -> int:
        """Bytes of one decoded chunk."""
        return math.prod(self.shape) * self.stored.itemsize

    @property
    def raw(self) -> bool:
        """True when the stored bytes are the pixels."""
        return self.compressor is None and not self.checked

    def decode(self, data: Bytes) -> Pixels:
        """The pixels of a chunk."""
        if self.checked:
            data = verify_checksum(data)
        if self.compressor is not None:
            data = self._decompress(data)
        if len(data) != self.nbytes:
            raise DamagedData(f"it holds {len(data)} bytes of pixels instead of {self.nbytes}")
        return self.arrange(data.view(self.stored))

    def arrange(self, pixels: Pixels) -> Pixels:
        """Return the pixels of a chunk, which are in the order of storage, in its shape."""
        if not self.order:
            return pixels.reshape(self.shape)
        return pixels.reshape([self.shape[axis] for axis in self.order]).transpose(np.argsort(self.order))

    def _decompress(self, data: Bytes) -> Bytes:
        if self.compressor.codec_id == "blosc":
            self._refuse_blosc_lengths(data)
        if self.compressor.codec_id == "zstd":
            self._refuse_zstd_length(data)
        if self.compressor.codec_id == "lz4":
            self._refuse_length(int.from_bytes(data[:4].tobytes(), "little"))
        try:
            return np.frombuffer(self._decompress_bounded(data), np.uint8)
        except Exception as error:  # every codec raises different types
            raise DamagedData(f"{self.compressor.codec_id} cannot decompress it ({error})") from error

    def _decompress_bounded(self, data: Bytes) -> Any:
        """Decompress little more than one chunk at most: a few damaged bytes could expand to fill the memory."""
        if self.compressor.codec_id == "gzip":
            with gzip.GzipFile(fileobj=io.BytesIO(data.data)) as file:
                return file.read(self.nbytes + 1)
        if (stream := _stream_of(self.compressor)) is not None:
            inflated = stream.decompress(data.data, self.nbytes + 1)
            if len(inflated) <= self.nbytes and not stream.eof:
                raise ValueError("it is cut short")
            return inflated
        return self.compressor.decode(data, np.empty(self.nbytes, np.uint8))

    def _refuse_zstd_length(self, data: Bytes) -> None:
        # If the content is shorter than the buffer, numcodecs leaves the rest uninitialized.
        length = _zstd_length(data.tobytes()[:_ZSTD_HEADER_BYTES])
        if length is not None:
            self._refuse_length(length)

    def _refuse_length(self, length: int) -> None:
        if length != self.nbytes:
            raise DamagedData(f"its header names {length} bytes of pixels instead of {self.nbytes}")

    def _refuse_blosc_lengths(self, data: Bytes) -> None:
        # Blosc trusts the lengths in its header: wrong ones would make it read past the buffer.
        if len(data) < _BLOSC_HEADER_BYTES:
            raise DamagedData(f"it is cut short: {len(data)} bytes")
        pixels, _, packed = (int(n) for n in data[4:_BLOSC_HEADER_BYTES].view("<u4"))
        if (pixels, packed) != (self.nbytes, len(data)):
            raise DamagedData(
                f"its header names {packed} bytes for {pixels} of pixels, but it has {len(data)} for {self.nbytes}"
            )


def _stream_of(compressor: Any) -> Any:
    """A decompressor that stops at a length; None where the library cannot."""
    if compressor.codec_id == "zlib":
        return zlib.decompressobj()
    if compressor.codec_id == "bz2":
        return bz2.BZ2Decompressor()
    if compressor.codec_id == "lzma":
        return lzma.LZMADecompressor(compressor.format, filters=compressor.filters)
    return None


def _zstd_length(header: bytes) -> int | None:
    """The content length in the header of a zstd frame; None when it is absent.

    Source: RFC 8878, 3.1.1.1.

    >>> _zstd_length(bytes.fromhex("28b52ffd60e802")), _zstd_length(bytes.fromhex("28b52ffd0050"))
    (1000, None)
    """
    if len(header) < 5 or header[:4] != _ZSTD_MAGIC:
        raise DamagedData("it does not begin as a zstd frame does")
    flags = header[4]
    single_segment = flags >> 5 & 1  # then there is no window descriptor, and always a length
    width = (single_segment, 2, 4, 8)[flags >> 6]
    start = 6 - single_segment + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(header[start : start + width], "little") + 256 * (width == 2) if width else None


def verify_checksum(data: Bytes) -> Bytes:
    """Return the bytes before a trailing crc32c after verifying it."""
    if len(data) < CHECKSUM_BYTES:
        raise DamagedData(f"it is cut short: {len(data)} bytes")
    body, stored = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:].tobytes()
    if google_crc32c.value(body) != int.from_bytes(stored, "little"):
        raise DamagedData("its crc32c checksum does not match")
    return body


def parse_chain(
    codecs: Sequence[Mapping[str, Any]], shape: tuple[int, ...], native: np.dtype[np.generic]
) -> Chain | None:
    """The chain for v3 codecs: at most one transpose, bytes, at most one compressor, at most one crc32c; None for others."""
    codecs, axes = list(codecs), ()
    if codecs and codecs[0].get("name") == "transpose":
        axes = tuple(codecs.pop(0)["configuration"]["order"])
        if sorted(axes) != list(range(len(shape))):
            return None
    if not codecs or codecs[0].get("name") != "bytes":
        return None
    order = _ORDERS.get((codecs.pop(0).get("configuration") or {}).get("endian", "little"))
    compressor = None
    if codecs and codecs[0].get("name") in COMPRESSORS:
        compressor = numcodecs.get_codec({"id": codecs.pop(0)["name"]})
    checked = [codec.get("name") for codec in codecs] == ["crc32c"]
    if order is None or (codecs and not checked):
        return None
    return Chain(shape, native.newbyteorder(order), compressor, checked, axes)


_V2_COMPRESSORS = (*COMPRESSORS, "bz2", "lz4", "lzma", "zlib")
_ABSENT = 2**64 - 1
# Entry of halotile's own attribute of an array that a run has finished: its shape.
COMPLETE = "complete"
_ENTRY_BYTES = 16


def open_local(folder: Path, dtype: np.dtype[np.generic], fill: Any) -> LocalArray | None:
    """Open the array in ``folder`` if its layout is supported.

    ``folder``: directory with the array's `zarr.json` or `.zarray`; ``dtype``: type of a pixel; ``fill``: value of missing chunks; None: zero.

    Returns
    -------
    LocalArray or None
        None: unsupported; use another reader.
    """
    native = dtype.newbyteorder("=")
    if native.kind not in "biufc":
        return None
    fill = native.type(0) if fill is None else fill
    for name, parse in (("zarr.json", _parse_v3), (".zarray", _parse_v2)):
        if (folder / name).is_file():
            state = _state_of(folder / name)
            metadata = json.loads((folder / name).read_text("utf-8"))
            try:
                array = parse(folder / name, metadata, native, fill)
            except (AttributeError, KeyError, TypeError, ValueError):
                return None  # odd values, which zarr may take or refuse
            complete = is_complete(metadata.get("attributes"), metadata.get("shape", ()))
            return array and replace(array, state=state, complete=complete)
    return None


@dataclass(frozen=True)
class Sharding:
    """Layout of the inner chunks of a shard."""

    shape: tuple[int, ...]  # shape of a shard in pixels
    counts: tuple[int, ...]  # inner chunks along each axis
    index_checked: bool
    index_at_end: bool

    def read_index(self, file: int, size_bytes: int) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk: shape (*counts, 2)."""
        nbytes = math.prod(self.counts) * _ENTRY_BYTES + self.index_checked * CHECKSUM_BYTES
        if size_bytes < nbytes:
            raise DamagedData(f"the shard is cut short: {size_bytes} bytes, its index alone has {nbytes}")
        data = _pread(file, nbytes, size_bytes - nbytes if self.index_at_end else 0)
        try:
            data = verify_checksum(data) if self.index_checked else data
            return data.view("<u8").reshape(*self.counts, 2)
        except DamagedData as error:
            raise DamagedData(f"the shard's index: {error}") from error


@dataclass(frozen=True)
class LocalArray:
    """A Zarr array whose chunk files can be read directly, in any process that it is sent to."""

    document: Path
    native: np.dtype[np.generic]
    fill: Any
    chain: Chain
    key: ChunkNames  # file name of a chunk or shard, by its index
    sharding: Sharding | None = None
    state: tuple[int, ...] = ()  # state of the document's file before it was read
    complete: bool = False  # then no chunk may be missing

    @property
    def is_current(self) -> bool:
        """True while the document's file is the one that was read, and was not written to."""
        try:
            return _state_of(self.document) == self.state
        except OSError:
            return False

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array."""
        pixels = np.empty(region.shape, self.native)
        self.read_into(region, pixels)
        return pixels

    def read_into(self, region: Region, pixels: Pixels) -> None:
        """Read the pixels of a region into an array of its shape."""

        def read(cell: tuple[tuple[int, ...], Region, tuple[slice, ...]]) -> None:
            index, part, target = cell
            path = self.document.parent / self.key(index)
            try:
                self._read_file(path, part, pixels[target])
            except DamagedData as error:
                raise DamagedData(f"chunk file {self.key(index)}: {error}") from error

        file_shape = self.sharding.shape if self.sharding else self.chain.shape
        IO_THREADS.run_all(read, split_region(region, file_shape))

    def _read_file(self, path: Path, part: Region, out: Pixels) -> None:
        """Fill ``out`` with part of the pixels in one file."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            refuse_lost_array(self.document)
            self._fill(out)
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
        """The pixels of a raw chunk, memory-mapped."""
        if size_bytes != self.chain.nbytes:
            raise DamagedData(f"it holds {size_bytes} bytes of pixels instead of {self.chain.nbytes}")
        mapped = mmap.mmap(file, size_bytes, access=mmap.ACCESS_READ)
        return self.chain.arrange(np.frombuffer(mapped, self.chain.stored))

    def _read_shard(self, file: int, size_bytes: int, part: Region, out: Pixels) -> None:
        assert self.sharding is not None
        index = self.sharding.read_index(file, size_bytes)
        for inner, inner_part, target in split_region(part, self.chain.shape):
            offset, nbytes = (int(n) for n in index[inner])
            try:
                if offset == _ABSENT and nbytes == _ABSENT:
                    self._fill(out[target])
                    continue
                if offset + nbytes > size_bytes:
                    raise DamagedData(f"it ends at byte {offset + nbytes} of a shard of {size_bytes} bytes")
                out[target] = self.chain.decode(_pread(file, nbytes, offset))[inner_part.slices]
            except DamagedData as error:
                raise DamagedData(f"inner chunk {inner}: {error}") from error

    def _fill(self, out: Pixels) -> None:
        """Fill ``out`` with the value of a missing chunk, where one may be missing."""
        if self.complete:
            raise lost_chunk(self.document, self.fill)
        out[...] = self.fill


def is_complete(attributes: Any, shape: Sequence[int]) -> bool:
    """Return True for the attributes of an array that halotile wrote completely, and nobody has resized since.

    >>> is_complete({"halotile": {"complete": [4, 5]}}, (4, 5)), is_complete({}, (4, 5))
    (True, False)
    """
    own = attributes.get("halotile") if isinstance(attributes, Mapping) else None
    return isinstance(own, Mapping) and own.get(COMPLETE) == list(shape)


def lost_chunk(document: object, fill: Any) -> DamagedData:
    """The error for a chunk that was written and is not there any more."""
    return DamagedData(
        f"it is missing, although the run wrote every chunk. If another program dropped it because all its pixels are {fill}, remove "
        f'"{COMPLETE}" from "halotile" in the attributes of {document}'
    )


def lost_by_name(path: Path) -> str:
    """Describe the first chunk file that a complete array of a Zarr on a disk or in a zip lacks; empty where each is listed."""
    root = zipfile.Path(path) if path.is_file() and zipfile.is_zipfile(path) else path
    if not (root / "zarr.json").is_file():  # only version 3 marks a complete array
        return ""
    for folder in (root, *root.iterdir()):
        with suppress(AttributeError, KeyError, OSError, TypeError, ValueError):  # no array, or an odd one
            document = json.loads((folder / "zarr.json").read_text("utf-8"))
            shape, keys = document["shape"], document["chunk_key_encoding"]
            key = _key_of(keys["name"], keys["configuration"]["separator"])
            edges = document["chunk_grid"]["configuration"]["chunk_shape"]
            counts = [-(-n // edge) for n, edge in zip(shape, edges, strict=True)]
            indices = np.ndindex(*counts) if key and is_complete(document["attributes"], shape) else ()
            for file in (folder / key(index) for index in indices if key):
                if not file.exists():
                    return f"{file}: {lost_chunk(folder / 'zarr.json', document['fill_value'])}"
    return ""


def _state_of(file: Path) -> tuple[int, ...]:
    """Modification time, size and number of a file."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def refuse_lost_array(document: Path) -> None:
    """Raise when the metadata file is gone: a missing chunk stands for the fill value only while the array exists."""
    if not document.exists():
        raise DamagedData(f"{document} is gone, so a missing chunk file does not stand for fill values")


def split_region(region: Region, cell: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Region, tuple[slice, ...]]]:
    """Split a region by a regular grid into (cell index, part relative to the cell, slices of the region).

    >>> for part in split_region(Region((3,), (9,)), (4,)):
    ...     print(*part)
    (0,) Region(start=(3,), stop=(4,)) (slice(0, 1, None),)
    (1,) Region(start=(0,), stop=(4,)) (slice(1, 5, None),)
    (2,) Region(start=(0,), stop=(1,)) (slice(5, 6, None),)
    """
    axes = [_split_axis(*axis) for axis in zip(region.start, region.stop, cell, strict=True)]
    for parts in itertools.product(*axes):
        index, starts, stops, targets = zip(*parts, strict=True) if parts else ((), (), (), ())
        yield index, Region(starts, stops), targets


def _split_axis(start: int, stop: int, cell: int) -> list[tuple[int, int, int, slice]]:
    """Split one axis: for each cell its index, start and stop relative to the cell, and the slice of the region."""
    if start == stop:
        return []
    bounds = [start, *range((start // cell + 1) * cell, stop, cell), stop]
    pairs = itertools.pairwise(bounds)
    return [(a // cell, a % cell, a % cell + b - a, slice(a - start, b - start)) for a, b in pairs]


def _pread(file: int, nbytes: int, offset: int) -> Bytes:
    """Bytes of a file; repeated calls are needed because one may return fewer, and never more than 2 GiB."""
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
    """The array described by a zarr.json; None when it is not supported."""
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


def _parse_sharding(layout: Mapping[str, Any], shard: tuple[int, ...], inner: tuple[int, ...]) -> Sharding | None:
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
    """The array described by a .zarray; None when it is not supported."""
    compressor = metadata.get("compressor")
    order = metadata.get("order")
    if metadata.get("filters") or order not in ("C", "F"):
        return None
    if compressor is not None and compressor.get("id") not in _V2_COMPRESSORS:
        return None
    codec = None if compressor is None else numcodecs.get_codec(dict(compressor))
    shape = tuple(map(int, metadata["chunks"]))
    axes = tuple(reversed(range(len(shape)))) if order == "F" else ()
    chain = Chain(shape, np.dtype(metadata["dtype"]), codec, order=axes)
    key = _key_of("v2", metadata.get("dimension_separator"))
    return LocalArray(document, native, fill, chain, key) if key else None


@dataclass(frozen=True)
class ChunkNames:
    """Names of chunk files: the numbers of a chunk with a separator in between.

    >>> ChunkNames("c/", "/")((0, 1))
    'c/0/1'
    """

    start: str
    separator: str

    def __call__(self, index: tuple[int, ...]) -> str:
        return self.start + self.separator.join(map(str, index))


def _key_of(encoding: str, separator: str | None) -> ChunkNames | None:
    """The naming of chunk files, by default ``c/0/1`` in v3 and ``0.1`` in v2; None when it is unknown."""
    if encoding not in ("default", "v2"):
        return None
    joint = separator or ("/" if encoding == "default" else ".")
    return ChunkNames(f"c{joint}" if encoding == "default" else "", joint)
