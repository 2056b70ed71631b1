"""Detection of truncated and damaged TIFF files from their directories.

A TIFF is a chain of directories whose entries point to values, to strips and tiles of pixels, and to the
next directory. Readers silently fill pixels that are missing, or whose place is not named, with zeros, or drop pages;
here it is an error. No pixel is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData

_TYPES = {1: "u1", 2: "S1", 3: "u2", 4: "u4", 5: "u8", 6: "i1", 7: "u1", 8: "i2", 9: "i4", 10: "u8", 11: "f4"}
_TYPES |= {12: "f8", 13: "u4", 16: "u8", 17: "i8", 18: "u8"}
_SEGMENTS = ((273, 279), (324, 325))
"""Tags of the offsets and lengths of strips, and of tiles."""
_WIDTH, _LENGTH, _SAMPLES, _ROWS, _PLANAR, _TILE_WIDTH, _TILE_LENGTH = 256, 257, 277, 278, 284, 322, 323
_OLD_JPEG = 513
"""Tag of pages, mostly thumbnails, whose pixels are a JPEG file instead of strips."""
_SUB_DIRECTORIES = 330
_LAST_STANDARD_TAG = 532
_ADVICE = "Copy it again from its origin."


def check_tiff(path: str) -> None:
    """Raise when a directory, a value or a segment of pixels lies past the end of the file, or is not named.

    Raises
    ------
    DamagedData
        With the first missing part.
    """
    if Path(path).suffix.lower() == ".ndpi":
        return  # this variant stores the upper halves of its offsets elsewhere
    file = _Directories(path)
    waiting, seen = [file.first], set[int]()
    while waiting:
        offset = waiting.pop()
        if offset and offset not in seen:
            seen.add(offset)
            waiting += file.check(offset)


class _Directories:
    """The directories of one file, classic (32-bit offsets) or BigTIFF (64-bit)."""

    def __init__(self, path: str) -> None:
        # A plain ndarray view, because slices of np.memmap are several times slower.
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self.order: Literal["<", ">"] = "<" if self.data[0] == ord("I") else ">"
        big = int(self._read("u2", 2, 1)[0]) == 43
        self.word, self.count = ("u8", "u8") if big else ("u4", "u2")
        self.first = int(self._read(self.word, 8 if big else 4, 1)[0])
        self.entry = np.dtype([("tag", "u2"), ("type", "u2"), ("count", self.word), ("value", self.word)])

    def check(self, offset: int) -> list[int]:
        """Check one directory and return the offsets of the directories it points to."""
        count = int(self._read(self.count, offset, 1)[0])
        start = offset + np.dtype(self.count).itemsize
        entries = self._read(self.entry, start, count)
        values = {}
        for number, entry in enumerate(entries):
            if entry["tag"] <= _LAST_STANDARD_TAG:
                values[int(entry["tag"])] = self._value(start + number * self.entry.itemsize, entry)
        for offsets, lengths in _SEGMENTS:
            self._check_segments(values.get(offsets), values.get(lengths))
        if _WIDTH in values and _LENGTH in values and _OLD_JPEG not in values:
            _check_count(values)
        following = int(self._read(self.word, start + count * self.entry.itemsize, 1)[0])
        return [following, *(int(n) for n in values.get(_SUB_DIRECTORIES, ()))]

    def _value(self, offset: int, entry: np.void) -> NDArray[np.generic]:
        """The values of the entry at an offset: stored in the entry itself if they fit, else where it points."""
        kind = np.dtype(_TYPES.get(int(entry["type"]), "u1"))
        count, inline_bytes = int(entry["count"]), np.dtype(self.word).itemsize
        if kind.itemsize * count <= inline_bytes:
            return self._read(kind, offset + self.entry.itemsize - inline_bytes, count)
        return self._read(kind, int(entry["value"]), count)

    def _check_segments(
        self, offsets: NDArray[np.generic] | None, lengths: NDArray[np.generic] | None
    ) -> None:
        """Raise when a strip or tile ends past the end of the file."""
        if offsets is None or not len(offsets):
            return
        ends = offsets.astype(np.uint64)
        if lengths is not None and len(lengths) == len(offsets):
            ends = ends + lengths.astype(np.uint64)
            # Of a sparse image both are 0, and the pixels are.
            if lost := int(np.count_nonzero((offsets == 0) != (lengths == 0))):
                raise DamagedData(
                    f"the TIFF is damaged: the place or the length of {lost} of the {len(ends)} strips or tiles of a page is 0. {_ADVICE}"
                )
        missing = int(np.count_nonzero(ends > len(self.data)))
        if missing:
            raise DamagedData(
                f"the TIFF is cut short: it has {len(self.data)} bytes, and {missing} of the {len(ends)} strips or "
                f"tiles of a page end past that, the last at byte {int(ends.max())}. {_ADVICE}"
            )

    def _read(
        self, kind: str | np.dtype[np.void] | np.dtype[np.generic], offset: int, count: int
    ) -> NDArray[np.generic]:
        """Numbers at an offset in the file."""
        dtype = np.dtype(kind).newbyteorder(self.order)
        stop = offset + count * dtype.itemsize
        if stop > len(self.data):
            raise DamagedData(
                f"the TIFF is cut short: it has {len(self.data)} bytes, and the description of its pages extends "
                f"to byte {stop}. {_ADVICE}"
            )
        return self.data[offset:stop].view(dtype)


def _check_count(values: Mapping[int, NDArray[np.generic]]) -> None:
    """Raise when a page names fewer strips or tiles than its pixels are in."""

    def number(tag: int, default: int) -> int:
        found = values.get(tag)
        return default if found is None or not len(found) or found.dtype.kind not in "iu" else int(found[0])

    width, length = number(_WIDTH, 0), number(_LENGTH, 0)
    across, down = number(_TILE_WIDTH, width), number(_TILE_LENGTH, number(_ROWS, length))
    planes = number(_SAMPLES, 1) if number(_PLANAR, 1) == 2 else 1
    if min(width, length, across, down) <= 0:
        return  # which the reader refuses
    needed = -(-width // across) * -(-length // down) * planes
    named = max(len(values.get(offsets, ())) for offsets, _ in _SEGMENTS)
    if named < needed:
        raise DamagedData(
            f"the TIFF is damaged: a page of {width} × {length} pixels names {named} of its {needed} strips or tiles. {_ADVICE}"
        )
