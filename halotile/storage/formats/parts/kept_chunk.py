"""Reads from chunks that can only be decoded whole, of which the last one is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import numpy as np

from halotile.errors import DamagedData
from halotile.storage.formats.base import Header, file_identity, make_header
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.sharded.ome_metadata import rgb_channels

Decode = Callable[[tuple[int, ...]], Any]
"""The pixels of the chunk with this number along each axis."""


class KeptChunkReader:
    """A file whose chunks can only be decoded whole; one is decoded at a time, and kept for the next read.

    ``lengths``: lengths of the chunks along each axis.
    """

    def __init__(self, header: Header, decode: Decode, lengths: Sequence[Sequence[int]]) -> None:
        self.header = replace(header, chunks=tuple(map(max, lengths)), mapped=False, keeps_chunk=True)
        self._edges = [list(accumulate(along, initial=0)) for along in lengths]
        self._decode = decode
        self._lock = threading.Lock()
        self._kept: tuple[tuple[int, ...], Pixels] | None = None

    def read(self, region: Region) -> Pixels:
        pixels = np.empty(region.shape, self.header.dtype)
        spans = [
            [n for n in range(len(edges) - 1) if edges[n] < stop and edges[n + 1] > start]
            for edges, start, stop in zip(self._edges, region.start, region.stop, strict=True)
        ]
        for index in product(*spans):
            bounds = [edges[n : n + 2] for edges, n in zip(self._edges, index, strict=True)]
            place = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
            part = region.clip(place)
            chunk = self._chunk(index, place.shape)
            pixels[part.relative_to(region).slices] = chunk[part.relative_to(place).slices]
        return pixels

    def _chunk(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Pixels:
        """A decoded chunk: the kept one, or else the one that is kept from now on."""
        with self._lock:
            if self._kept is not None and self._kept[0] == index:
                return self._kept[1]
            self._kept = None  # which frees its memory before the next one is decoded
            pixels = np.asarray(self._decode(index))
            if pixels.shape != shape or pixels.dtype.newbyteorder("=") != self.header.dtype:
                raise DamagedData(
                    f"a chunk decodes to {pixels.dtype} pixels of shape {pixels.shape} instead of {self.header.dtype} of {shape}. "
                    "Copy the file again from its origin."
                )
            self._kept = (index, pixels)
            return pixels


def whole_image(
    path: str, shape: tuple[int, ...], dtype: Any, decode: Any, *, axes: str | None, remarks: Sequence[str]
) -> KeptChunkReader:
    """The reader of a file with one image of rows, columns and, where there are three axes, channels, which is decoded whole."""
    options: Any = {"named": "yxc"[: len(shape)], "chunks": shape, "identity": file_identity(path)}
    header = make_header(shape, dtype, requested=axes, **options)
    colours = rgb_channels(header.dtype, shape[-1]) if len(shape) == 3 else ()
    header = replace(header, remarks=(*remarks, *header.remarks), channels=colours)
    return KeptChunkReader(header, lambda _: decode(), [(n,) for n in shape])
