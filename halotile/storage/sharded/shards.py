"""Encoding and checking of the shard files of a Zarr v3 array, without zarr-python's overhead per chunk.

A shard contains its inner chunks one after the other, each compressed and followed by its crc32c, then an
index of (offset, length) for every chunk, then the crc32c of the index: the ``sharding_indexed`` codec.
Every chunk that overlaps the array is written, even if it equals the fill value: a missing chunk
reads as the fill value, so that it could not be distinguished from a lost one. Blosc and crc32c release
the GIL, so threads encode and decode in parallel.
"""

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
from halotile.storage.rim import Array
from halotile.storage.sharded.local_reader import Chain

# Compression level of each Blosc codec. Higher levels take more time and hardly reduce the size.
LEVELS = {"lz4": 5, "zstd": 3}
CODECS = (*LEVELS, "none")

DIGEST_BYTES = _CRC_BYTES = 4
_EMPTY = 2**64 - 1


@dataclass(frozen=True)
class ShardFormat:
    """Format of a shard of an array."""

    # shard, chunk: shape of a shard and of an inner chunk, in pixels; the first is a multiple of the second
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str  # name of the NumPy dtype of a pixel
    codec: str  # `lz4` or `zstd` (Blosc with byte shuffle), or `none`

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
        """The stored dtype: little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def fill(self) -> complex:
        """Value of unwritten pixels: NaN, or 0 for integers."""
        return {"f": math.nan, "c": complex(math.nan, math.nan)}.get(self.stored.kind, 0)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of inner chunks along each axis."""
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @cached_property
    def index_bytes(self) -> int:
        """Size of the index with its checksum."""
        return 16 * math.prod(self.counts) + _CRC_BYTES

    @cached_property
    def chain(self) -> Chain:
        """The codecs of an inner chunk."""
        compressor = None if self.codec == "none" else blosc.Blosc()
        return Chain(self.chunk, self.stored, compressor, checked=True)

    def written_counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Number of chunks along each axis that overlap the first ``shape`` pixels of a shard."""
        return tuple(-(-n // c) for n, c in zip(shape, self.chunk, strict=True))


def encode_shard(pixels: Array, form: ShardFormat) -> list[Buffer]:
    """Encode a shard as buffers to be written one after the other.

    ``pixels``: pixels of the shard, in the format's dtype; smaller than the shard at the end of the array.

    >>> form = ShardFormat((4, 4), (2, 2), "uint16", "lz4")
    >>> pixels = np.arange(12, dtype="uint16").reshape(4, 3)
    >>> file = b"".join(encode_shard(pixels, form))
    >>> decode_chunk(file, read_index(file, form), (1, 0), form).tolist() == pixels[2:, :2].tolist()
    True
    """
    buffers: list[Buffer] = []
    table = np.full((*form.counts, 2), _EMPTY, "<u8")
    offset = 0
    scratch = np.empty(form.chunk, form.stored)
    for index in np.ndindex(form.written_counts(pixels.shape)):
        part = pixels[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, form.chunk, strict=True))]
        if part.shape != form.chunk or part.dtype != form.stored or form.codec != "none":
            if part.shape != form.chunk:
                scratch[...] = form.fill
            scratch[tuple(slice(n) for n in part.shape)] = part
            part = scratch
        data = _compress(part, form)
        table[index] = offset, len(data) + _CRC_BYTES
        offset += len(data) + _CRC_BYTES
        buffers += [data, _crc(data)]
    footer = table.tobytes()
    return [*buffers, footer, _crc(footer)]


def find_problems(file: bytes, form: ShardFormat, shape: tuple[int, ...]) -> Iterator[str]:
    """Describe each problem of the file of a shard whose first ``shape`` pixels are inside the array."""
    try:
        table = read_index(file, form)
    except DamagedData as error:
        yield str(error)
        return
    end = 0
    for index in np.ndindex(form.written_counts(shape)):
        try:
            decode_chunk(file, table, index, form)
        except DamagedData as error:
            yield str(error)
        else:
            end = max(end, int(table[index].sum()))
    if end > len(file) - form.index_bytes:
        yield "the chunks reach into the index"


def digest_of(parts: Iterable[Buffer]) -> bytes:
    """The digest of a shard from its checksums in order, of a block from its shards, or of an image from its blocks."""
    return _crc(b"".join(parts))


def encoded_digest(buffers: Sequence[Buffer]) -> bytes:
    """The digest of a shard encoded by :func:`encode_shard`."""
    return digest_of(buffers[1::2])


def inspect_index(
    end: bytes,
    size: int,
    read: Callable[[int, int], bytes],
    form: ShardFormat,
    shape: tuple[int, ...],
    digest: bytes | None = None,
) -> tuple[list[str], bytes]:
    """Check a shard file of ``size`` bytes by the index at its ``end``; returns the problems, and the digest if there are none.

    Unless the ``digest`` is given, the checksums of the chunks are read, with ``read(nbytes, offset)``.

    >>> form = ShardFormat((4, 4), (2, 2), "uint16", "lz4")
    >>> buffers = encode_shard(np.ones((4, 3), "uint16"), form)
    >>> file = b"".join(buffers)
    >>> def read(nbytes, offset):
    ...     return file[offset : offset + nbytes]
    >>> inspect_index(file, len(file), read, form, (4, 3)) == ([], encoded_digest(buffers))
    True
    """
    try:
        table = read_index(end, form)
    except DamagedData as error:
        return [str(error)], b""
    chunks = table[tuple(map(slice, form.written_counts(shape)))].reshape(-1, 2).tolist()
    if any(offset == _EMPTY for offset, _ in chunks):
        return ["a chunk is not in the file"], b""
    stops = [offset + length for offset, length in chunks]
    if max(stops) != size - form.index_bytes:
        return [f"the file has {size} bytes, and its index gives another size"], b""
    if digest is not None:
        return [], digest
    checksums = [read(_CRC_BYTES, stop - _CRC_BYTES) for stop in stops]
    return [], digest_of([*checksums, end[-_CRC_BYTES:]])


def read_index(file: bytes, form: ShardFormat) -> NDArray[np.uint64]:
    """The index of a shard: offset and length of each chunk, shape (\\*counts, 2)."""
    if len(file) < form.index_bytes:
        raise DamagedData(
            f"the file has {len(file)} bytes, and its index alone takes {form.index_bytes}: it was cut short"
        )
    footer, crc = file[-form.index_bytes : -_CRC_BYTES], file[-_CRC_BYTES:]
    if _crc(footer) != crc:
        raise DamagedData("the checksum of the index does not match: the file is damaged or cut short")
    return np.frombuffer(footer, "<u8").reshape(*form.counts, 2)


def decode_chunk(file: bytes, table: NDArray[np.uint64], index: tuple[int, ...], form: ShardFormat) -> Array:
    """The complete pixels of an inner chunk."""
    offset, length = (int(n) for n in table[index])
    if offset == _EMPTY:
        raise DamagedData(f"chunk {index} is not in the file")
    if offset + length > len(file):
        raise DamagedData(f"chunk {index} is cut short: bytes {offset} to {offset + length} of {len(file)}")
    try:
        return form.chain.decode(np.frombuffer(file, np.uint8)[offset : offset + length])
    except DamagedData as error:
        raise DamagedData(f"chunk {index}: {error}") from error


def _compress(chunk: Array, form: ShardFormat) -> bytes:
    if form.codec == "none":
        return chunk.tobytes()
    packed: bytes = blosc.compress(chunk, form.codec.encode(), LEVELS[form.codec], blosc.SHUFFLE, 0, chunk.itemsize)
    return packed


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_BYTES, "little")
