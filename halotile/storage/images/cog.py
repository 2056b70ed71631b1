"""Layout of Cloud Optimized GeoTIFFs: all directories at the start, then the pixels of the coarsest level first.

A program reads where everything is with one request, and shows the whole after a second one. TIFF writers put the pixels of an image
behind its directory, so a finished file is arranged anew here, tile by tile.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<2sHHHQ")
_NUMBER = struct.Struct("<Q")
_ENTRY = struct.Struct("<HHQ8s")
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 12: 8, 16: 8}
"""Bytes of a value of each type that is written here."""
_INTEGERS = {3: "<u2", 4: "<u4", 16: "<u8"}
_OFFSETS, _LENGTHS = 324, 325
"""Tags of the places and lengths of tiles."""


class _Entry(NamedTuple):
    """A tag in a directory."""

    tag: int
    kind: int
    length: int
    content: bytes

    def numbers(self) -> NDArray[np.int64]:
        return np.frombuffer(self.content, _INTEGERS[self.kind]).astype(np.int64)


def put_directories_first(tiff: Path, cog: Path) -> None:
    """Copy a tiled little-endian BigTIFF, whose pages are the levels of an image from the finest one, in the layout of a COG."""
    with tiff.open("rb") as source, cog.open("wb") as target:
        pages = list(_directories(source))
        starts, position = [], _HEADER.size
        for page in pages:
            starts.append(position)
            position += len(_directory(page.values(), 0, 0))
        moves = []
        for page in reversed(pages):
            offsets, lengths = page[_OFFSETS].numbers(), page[_LENGTHS].numbers()
            moves.append((offsets, lengths))
            places = (position + np.cumsum(lengths) - lengths).astype("<u8")
            page[_OFFSETS] = _Entry(_OFFSETS, 16, len(places), places.tobytes())
            position += int(lengths.sum())
        target.write(_HEADER.pack(b"II", 43, 8, 0, starts[0]))
        for page, start, following in zip(pages, starts, [*starts[1:], 0], strict=True):
            target.write(_directory(page.values(), start, following))
        for offsets, lengths in moves:
            for offset, length in zip(offsets, lengths, strict=True):
                source.seek(offset)
                target.write(source.read(length))


def _directories(file: BinaryIO) -> Iterator[dict[int, _Entry]]:
    """The tags of each page."""
    *_, offset = _HEADER.unpack(file.read(_HEADER.size))
    while offset:
        file.seek(offset)
        (count,) = _NUMBER.unpack(file.read(_NUMBER.size))
        entries = list(_ENTRY.iter_unpack(file.read(count * _ENTRY.size)))
        (offset,) = _NUMBER.unpack(file.read(_NUMBER.size))
        yield {
            tag: _Entry(tag, kind, number, _content(file, kind, number, value))
            for tag, kind, number, value in entries
        }


def _content(file: BinaryIO, kind: int, count: int, value: bytes) -> bytes:
    """The values of a tag, which are in the entry itself where they fit."""
    size = _SIZES[kind] * count
    if size <= len(value):
        return value[:size]
    file.seek(*_NUMBER.unpack(value))
    return file.read(size)


def _directory(entries: Collection[_Entry], start: int, following: int) -> bytes:
    """A directory at an offset in the file, with its values behind it."""
    table = [_NUMBER.pack(len(entries))]
    values = b""
    behind = start + 2 * _NUMBER.size + len(entries) * _ENTRY.size
    for tag, kind, count, content in entries:
        padded = content + bytes(-len(content) % 8)
        if len(padded) > 8:
            table.append(_ENTRY.pack(tag, kind, count, _NUMBER.pack(behind + len(values))))
            values += padded
        else:
            table.append(_ENTRY.pack(tag, kind, count, padded))
    return b"".join((*table, _NUMBER.pack(following), values))
