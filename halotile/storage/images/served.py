"""Images of every format as the files of a Zarr that no disk holds: made when a viewer asks for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from halotile.errors import InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.grid import Region
from halotile.storage.images.planes import MOST_CHANNELS, choose_planes
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.sharded.levels import halve
from halotile.storage.sharded.ome_metadata import transformations
from halotile.storage.spacing import converted, downsampling
from halotile.storage.views import Viewed, measured

EDGE = 256
"""Edge of a chunk in pixels."""
MOST_READ = 2**22
"""Most pixels that one chunk is the mean of: a zoom that needs more shows the coarsest level that has fewer."""
EXACT = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32")
"""Types that viewers take; others are served as float32."""
HOLE = -3.4e38
"""Value of a hole: viewers cannot compare with NaN."""
_ORDER = "tczyx"


@dataclass(frozen=True)
class ServedImage:
    """An image with its coarser levels, as the files of an OME-Zarr (version 2 of Zarr, chunks as they are).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.arange(6, dtype="uint16").reshape(2, 3))
    ...     image = ServedImage.open(f"{folder}/a.npy")
    ...     np.frombuffer(image.file("0/0/0"), "<u2").tolist(), image.file("0/1/0"), image.file("../a.npy")
    ([0, 1, 2, 3, 4, 5], None, None)
    """

    source: Source  # axes in the order t, c, z, y, x
    levels: tuple[Readable, ...]  # stored levels from the finest, with NaN in holes if they have any
    is_colour: bool  # true: the channels are red, green, blue (and opacity)
    sizes: tuple[float, ...]  # pixel size along each axis in metres; 1.0 where it is unknown, and for t and c

    @classmethod
    def open(cls, path: str, dataset: str | None = None) -> ServedImage:
        """Open all levels of an image."""
        first = open_source(path, dataset=dataset, complex_pixels=True)
        sources = [*_levels(path, dataset)]
        views = []
        for source in sources:
            mask = open_source(path, dataset=source.mask).arranged_as(source) if source.mask else None
            spatial = tuple(axis for axis, letter in enumerate(source.axes) if letter in "zyx")
            fits = mask is not None and mask.shape[-2:] == source.shape[-2:]
            views.append(measured(source, source.nodata, mask if fits else None, spatial, len(source.shape)))
        finest = sources[0]
        lengths = zip(finest.axes, finest.scale, finest.units, strict=True)
        sizes = tuple(
            (converted(size, unit, "meter") if axis in "zyx" else None) or 1.0 for axis, size, unit in lengths
        )
        return cls(finest, tuple(views), choose_planes(first, {}, None).colour, sizes)

    def minus(self, other: ServedImage) -> ServedImage:
        """The difference of two images of one shape, level by level."""
        pairs = zip(self.levels, other.levels, strict=False)
        return replace(self, levels=tuple(_Difference(a, b) for a, b in pairs if a.shape == b.shape))

    @property
    def together(self) -> int:
        """Number of channels that are drawn over one another; 1 where each is shown by itself."""
        count = self.source.shape[self.source.axes.index("c")] if "c" in self.source.axes else 1
        return count if count <= MOST_CHANNELS else 1

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the chunks, which are in little-endian byte order."""
        dtype = self.levels[0].dtype
        return np.dtype(dtype if dtype.name in EXACT else np.float32).newbyteorder("<")

    @property
    def halvings(self) -> int:
        """Number of levels that are computed from the coarsest of the file."""
        rows, columns = self.levels[-1].shape[-2:]
        needed = math.ceil(math.log2(max(rows, columns, EDGE) / EDGE))
        return max(0, min(needed, int(math.log2(MOST_READ / self.together) / 2 - math.log2(EDGE))))

    def file(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        if name == ".zgroup":
            return b'{"zarr_format": 2}'
        if name == ".zattrs":
            return json.dumps({"multiscales": [self._multiscales]}).encode()
        level, _, rest = name.partition("/")
        if not level.isdecimal() or int(level) >= len(self.levels) + self.halvings:
            return None
        if rest == ".zarray":
            return json.dumps(self._array(int(level))).encode()
        index = rest.split("/")
        if len(index) != len(self.source.axes) or not all(part.isdecimal() for part in index):
            return None
        return self._chunk(int(level), [*map(int, index)])

    def sample(self, edge: int) -> Array:
        """The middle of a level, of that edge at most, (channels that are drawn together, rows, columns); NaN in holes."""
        count = len(self.levels) + self.halvings
        level = next((n for n in range(count) if max(self.shape(n)[-2:]) <= edge), count - 1)
        read = 2 ** max(0, level - len(self.levels) + 1)
        edge = min(edge, math.isqrt(MOST_READ // self.together) // read)
        start, stop = [], []
        for axis, n in zip(self.source.axes, self.shape(level), strict=True):
            shown = self.together if axis == "c" else min(n, edge) if axis in "yx" else 1
            start.append(0 if axis == "c" else (n - shown) // 2)
            stop.append(start[-1] + shown)
        pixels = self._read(level, Region(tuple(start), tuple(stop)))
        return pixels.reshape(self.together, *pixels.shape[-2:])

    def shape(self, level: int) -> tuple[int, ...]:
        """Shape of a level in pixels."""
        stored = self.levels[min(level, len(self.levels) - 1)].shape
        part = 2 ** max(0, level - len(self.levels) + 1)
        return (*stored[:-2], *(-(-n // part) for n in stored[-2:]))

    @property
    def _multiscales(self) -> dict[str, Any]:
        kinds = {"t": "time", "c": "channel"} | dict.fromkeys("zyx", "space")
        datasets, stored = [], len(self.levels) - 1
        for level in range(len(self.levels) + self.halvings):
            pairs = zip(self.shape(0), self.shape(min(level, stored)), strict=True)
            halved = [2 ** max(0, level - stored) if axis in "yx" else 1 for axis in self.source.axes]
            covered = [downsampling(a, b) * n for (a, b), n in zip(pairs, halved, strict=True)]
            datasets.append({"path": str(level), "coordinateTransformations": transformations(self.sizes, (), covered)})
        axes = [{"name": axis, "type": kinds.get(axis, "other")} for axis in self.source.axes]
        units = [{"unit": "meter"} if size != 1.0 else {} for size in self.sizes]
        return {"version": "0.4", "axes": [a | u for a, u in zip(axes, units, strict=True)], "datasets": datasets}

    def _array(self, level: int) -> dict[str, Any]:
        given = {"zarr_format": 2, "order": "C", "compressor": None, "filters": None, "dimension_separator": "/"}
        return given | {"shape": self.shape(level), "chunks": self._chunks, "dtype": self.dtype.str, "fill_value": 0}

    @property
    def _chunks(self) -> tuple[int, ...]:
        edges = {"y": EDGE, "x": EDGE, "c": self.together}
        return tuple(min(edges.get(axis, 1), n) for axis, n in zip(self.source.axes, self.shape(0), strict=True))

    def _chunk(self, level: int, index: Sequence[int]) -> bytes | None:
        """The pixels of a chunk, which is filled up beyond the edges of the image."""
        start = [i * edge for i, edge in zip(index, self._chunks, strict=True)]
        if any(a >= n for a, n in zip(start, self.shape(level), strict=True)):
            return None
        stop = tuple(min(a + edge, n) for a, edge, n in zip(start, self._chunks, self.shape(level), strict=True))
        pixels = self._read(level, Region(tuple(start), stop))
        if self.dtype.kind == "f":
            with np.errstate(over="ignore"):
                pixels = np.nan_to_num(pixels.astype(self.dtype), nan=HOLE, posinf=HOLE, neginf=HOLE)
        else:
            pixels = np.rint(pixels)
        filled = np.zeros(self._chunks, self.dtype)
        filled[tuple(slice(n) for n in pixels.shape)] = pixels
        return filled.tobytes()

    def _read(self, level: int, region: Region) -> Array:
        """The pixels of a region of a level, with NaN in holes."""
        halvings = max(0, level - len(self.levels) + 1)
        view = self.levels[level - halvings]
        parts = [2**halvings if axis in "yx" else 1 for axis in self.source.axes]
        start, stop = (
            tuple(n * part for n, part in zip(ends, parts, strict=True)) for ends in (region.start, region.stop)
        )
        pixels: Array = view.read(Region(start, stop).clip(Region.whole(view.shape)))
        if np.iscomplexobj(pixels):
            pixels = np.abs(pixels)
        for _ in range(halvings):
            pixels = halve(pixels, [min(2, part) for part in parts], None)
        return pixels


def _levels(path: str, dataset: str | None) -> Iterator[Source]:
    """Yield the levels of an image from the finest, with their axes in the order of viewers."""
    level = 0
    while True:
        try:
            source = open_source(path, level=level, dataset=dataset, complex_pixels=True)
        except InputError:
            if not level:
                raise
            return
        places = sorted(range(len(source.axes)), key=lambda axis: _ORDER.find(source.axes[axis]))
        yield source.in_order(places)
        level += 1


@dataclass(frozen=True)
class _Difference(Viewed):
    """One image less another, of complex pixels their moduli; NaN in the holes of both."""

    other: Readable

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(np.float32)

    def read(self, region: Region) -> Pixels:
        first, second = (
            np.abs(p) if np.iscomplexobj(p) else p for p in (v.read(region) for v in (self.source, self.other))
        )
        exact = np.result_type(first.dtype, second.dtype, np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            difference: Pixels = (first.astype(exact) - second).astype(np.float32)
        return difference
