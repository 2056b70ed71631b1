"""One shard file of a Zarr v3 array, encoded and decoded without zarr-python's machinery per chunk.

A shard holds its inner chunks one after the other, each compressed and followed by its crc32c, then an
index of (offset, length) for every chunk, then the crc32c of the index: the ``sharding_indexed`` codec.
Every chunk that overlaps the array is written, also one that equals the fill value: a missing chunk
would read as fill value, and nobody could tell it from a lost one. Blosc and crc32c let go of the
interpreter's lock, so threads encode and decode side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData
from halotile.storage.disk.durable import Buffer

# Blosc's own thread pool is one for the whole process, behind a lock. Without it each call stands alone.
blosc.use_threads = False

LEVELS = {"lz4": 5, "zstd": 3}
"""Compression level of each Blosc codec. Past these, time grows and files hardly shrink."""
CODECS = (*LEVELS, "none")

DIGEST_BYTES = _CRC_BYTES = 4
_EMPTY = 2**64 - 1

Pixels = NDArray[Any]


@dataclass(frozen=True)
class ShardFormat:
    """How one shard of an array is laid out.

    Parameters
    ----------
    shard, chunk : tuple of int
        Shape of a shard and of an inner chunk, in pixels; the one is a multiple of the other.
    dtype : str
        Name of the NumPy dtype of a pixel.
    codec : str
        ``lz4`` or ``zstd`` (Blosc with byte shuffle), or ``none``.
    """

    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    codec: str

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f"codec is {self.codec!r}: write one of {', '.join(CODECS)}.")
        if len(self.shard) != len(self.chunk) or any(
            c < 1 or s < 1 or s % c for s, c in zip(self.shard, self.chunk, strict=False)
        ):
            raise ConfigError(
                f"shard is {self.shard} and chunk is {self.chunk}: a shard holds whole chunks. "
                "Write a shard that is a multiple of the chunk on each axis."
            )

    @cached_property
    def stored(self) -> np.dtype[Any]:
        """The dtype as it is stored: little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def fill(self) -> float | int:
        """Value of pixels that nobody wrote: NaN, or 0 for integers."""
        return float("nan") if self.stored.kind == "f" else 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of inner chunks along each axis."""
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @cached_property
    def index_bytes(self) -> int:
        """Size of the index with its checksum."""
        return 16 * math.prod(self.counts) + _CRC_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Size of one decoded chunk."""
        return math.prod(self.chunk) * self.stored.itemsize

    def place(self, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where a chunk lies in a shard of which only ``shape`` is inside the array."""
        return tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, self.chunk, shape, strict=True)
        )

    def holds(self, index: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a chunk overlaps that part."""
        return all(i * c < n for i, c, n in zip(index, self.chunk, shape, strict=True))

    def held(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The chunks that do, as a part of the index."""
        return tuple(slice(-(-n // c)) for n, c in zip(shape, self.chunk, strict=True))


def encode_shard(pixels: Pixels, form: ShardFormat) -> list[Buffer]:
    """The file of one shard, as buffers to be written one after the other.

    Parameters
    ----------
    pixels : ndarray
        The pixels of the shard, in the format's dtype; smaller than the shard at the end of the array.
    form : ShardFormat
        How the shard is laid out.

    Examples
    --------
    >>> form = ShardFormat((4, 4), (2, 2), "uint16", "lz4")
    >>> pixels = np.arange(12, dtype="uint16").reshape(4, 3)
    >>> file = b"".join(encode_shard(pixels, form))
    >>> decode_shard(file, form)[:4, :3].tolist() == pixels.tolist()
    True
    """
    buffers: list[Buffer] = []
    table = np.full((*form.counts, 2), _EMPTY, "<u8")
    offset = 0
    scratch = np.empty(form.chunk, form.stored)
    for index in np.ndindex(form.counts):
        if not form.holds(index, pixels.shape):
            continue
        part = pixels[form.place(index, pixels.shape)]
        if part.shape != form.chunk or part.dtype != form.stored or form.codec != "none":
            _fill_chunk(scratch, part, form)
            part = scratch
        data = _compress(part, form)
        table[index] = offset, len(data) + _CRC_BYTES
        offset += len(data) + _CRC_BYTES
        buffers += [data, _crc(data)]
    footer = table.tobytes()
    return [*buffers, footer, _crc(footer)]


def decode_shard(file: bytes, form: ShardFormat) -> Pixels:
    """All pixels of a shard, those past the end of the array as fill value.

    Raises
    ------
    DamagedData
        When the file is cut short, or a checksum does not match.
    """
    pixels = np.full(form.shard, form.fill, form.stored)
    table = read_index(file, form)
    for index in np.ndindex(form.counts):
        if int(table[(*index, 0)]) != _EMPTY:
            pixels[form.place(index, form.shard)] = decode_chunk(file, table, index, form)
    return pixels


def find_problems(file: bytes, form: ShardFormat, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with the file of a shard of which ``shape`` is inside the array: one line each."""
    try:
        table = read_index(file, form)
    except DamagedData as error:
        yield str(error)
        return
    end = 0
    for index in np.ndindex(form.counts):
        if not form.holds(index, shape):
            continue
        try:
            decode_chunk(file, table, index, form)
        except DamagedData as error:
            yield str(error)
        else:
            end = max(end, int(table[index].sum()))
    if end > len(file) - form.index_bytes:
        yield "the chunks reach into the index"


def digest_of(parts: Iterable[Buffer]) -> bytes:
    """The digest of a shard, of its checksums in their order; of a block, of its shards; of an image, of its blocks."""
    return _crc(b"".join(parts))


def encoded_digest(buffers: Sequence[Buffer]) -> bytes:
    """The digest of a shard that :func:`encode_shard` made."""
    return digest_of(buffers[1::2])


def inspect_index(
    end: bytes, size: int, read: Callable[[int, int], bytes], form: ShardFormat, shape: tuple[int, ...]
) -> tuple[list[str], bytes]:
    """What the index at the ``end`` of a shard file of ``size`` bytes tells of it: the problems, and where there are none its digest.

    Of the chunks no more is read than their checksums: other bytes of the file are ``read(size, place)``.

    Examples
    --------
    >>> form = ShardFormat((4, 4), (2, 2), "uint16", "lz4")
    >>> buffers = encode_shard(np.ones((4, 3), "uint16"), form)
    >>> file = b"".join(buffers)
    >>> def read(size, place):
    ...     return file[place : place + size]
    >>> inspect_index(file, len(file), read, form, (4, 3)) == ([], encoded_digest(buffers))
    True
    """
    try:
        table = read_index(end, form)
    except DamagedData as error:
        return [str(error)], b""
    chunks = table[form.held(shape)].reshape(-1, 2).tolist()
    if any(offset == _EMPTY for offset, _ in chunks):
        return ["a chunk is not in the file"], b""
    stops = [offset + length for offset, length in chunks]
    if max(stops) != size - form.index_bytes:
        return [f"the file has {size} bytes, and its index tells of another size"], b""
    checksums = [read(_CRC_BYTES, stop - _CRC_BYTES) for stop in stops]
    return [], digest_of([*checksums, end[-_CRC_BYTES:]])


def read_index(file: bytes, form: ShardFormat) -> NDArray[np.uint64]:
    """The index of a shard: offset and length of each chunk, shape (\\*counts, 2).

    Raises
    ------
    DamagedData
        When the file is too short for it, or its checksum does not match.
    """
    if len(file) < form.index_bytes:
        raise DamagedData(
            f"the file has {len(file)} bytes, and its index alone takes {form.index_bytes}: it was cut short"
        )
    footer, crc = file[-form.index_bytes : -_CRC_BYTES], file[-_CRC_BYTES:]
    if _crc(footer) != crc:
        raise DamagedData("the checksum of the index does not match: the file is damaged or cut short")
    return np.frombuffer(footer, "<u8").reshape(*form.counts, 2)


def decode_chunk(file: bytes, table: NDArray[np.uint64], index: tuple[int, ...], form: ShardFormat) -> Pixels:
    """One inner chunk, whole.

    Raises
    ------
    DamagedData
        When it is not there, cut short, or its checksum does not match.
    """
    offset, length = (int(n) for n in table[index])
    if offset == _EMPTY:
        raise DamagedData(f"chunk {index} is not in the file")
    if length < _CRC_BYTES or offset + length > len(file):
        raise DamagedData(f"chunk {index} is cut short: bytes {offset} to {offset + length} of {len(file)}")
    data = file[offset : offset + length - _CRC_BYTES]
    if _crc(data) != file[offset + length - _CRC_BYTES : offset + length]:
        raise DamagedData(f"the checksum of chunk {index} does not match")
    raw = _decompress(data, index, form)
    if len(raw) != form.chunk_bytes:
        raise DamagedData(f"chunk {index} decodes to {len(raw)} bytes, not {form.chunk_bytes}")
    return np.frombuffer(raw, form.stored).reshape(form.chunk)


def _fill_chunk(chunk: Pixels, part: Pixels, form: ShardFormat) -> None:
    """Lay pixels into a chunk, with fill value around them at the end of the array."""
    if part.shape != form.chunk:
        chunk[...] = form.fill
    chunk[tuple(slice(n) for n in part.shape)] = part


def _compress(chunk: Pixels, form: ShardFormat) -> bytes:
    if form.codec == "none":
        return chunk.tobytes()
    packed: bytes = blosc.compress(
        chunk, form.codec.encode(), LEVELS[form.codec], blosc.SHUFFLE, 0, chunk.itemsize
    )
    return packed


def _decompress(data: bytes, index: tuple[int, ...], form: ShardFormat) -> bytes:
    if form.codec == "none":
        return data
    try:
        raw: bytes = blosc.decompress(data)
    except (RuntimeError, ValueError) as error:
        raise DamagedData(f"chunk {index} does not decompress: {error}") from error
    return raw


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_BYTES, "little")
