"""Decoding of the stored bytes of a Zarr chunk into pixels."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData
from halotile.storage.rim import Pixels

# Blosc's own thread pool is shared by the whole process, locked, and holds the GIL. Without it, calls are independent.
numcodecs.blosc.use_threads = False

Bytes = NDArray[np.uint8]

COMPRESSORS = ("blosc", "zstd", "gzip")
"""Supported compressors of Zarr v3."""
CHECKSUM_BYTES = 4
_ORDERS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}
_BLOSC_HEADER_BYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BYTES = 18
"""Maximum size of a zstd frame header."""


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
