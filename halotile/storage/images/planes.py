"""Two-dimensional planes of an image with any number of axes, and images as the files of a Zarr that no disk holds, made when a viewer asks for them."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.formats.base import listed
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.sharded.layout import halve
from halotile.storage.sharded.ome_metadata import Channels, are_colours, shown_colours, transformations
from halotile.storage.spacing import converted, downsampling
from halotile.storage.views import Viewed, measured

WINDOW_BYTES = 32 * 2**20  # maximum size of one read, unless a single chunk is larger


MOST_CHANNELS = 8  # most channels that are examined one by one, or drawn in their colours
Component = Literal["modulus", "phase", "real", "imag"]
_PARTS: Mapping[Component, Any] = {"modulus": np.abs, "phase": np.angle, "real": np.real, "imag": np.imag}


@dataclass(frozen=True)
class Planes:
    """The planes of an image, or of a part of it.

    >>> import tempfile
    >>> from halotile.storage.arrays import open_source
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.arange(24, dtype="uint16").reshape(2, 3, 4))
    ...     planes = choose_planes(open_source(f"{folder}/a.npy"), {"q": 1}, None)
    ...     planes.shape, planes.read((), Region((0, 0), (1, 4))).tolist()
    ((3, 4), [[12, 13, 14, 15]])
    """

    source: Source
    at: Mapping[str, int]  # the index along each axis that is fixed
    window: Region  # the rows and columns of the part
    # true: the channels are red, green, blue (and opacity). False: each channel is a plane of its own
    colour: bool
    # the part of complex pixels that is read; None: the pixels as they are
    component: Component | None = None
    # colours in which all channels are drawn over one another, six hexadecimal digits each; empty: as they are
    blend: tuple[str, ...] = ()

    @property
    def loops(self) -> tuple[str, ...]:
        """The axes that are looped over."""
        others = {"y", "x", *self.at} | ({"c"} if self.colour else set())
        return tuple(axis for axis in self.source.axes if axis not in others)

    @property
    def counts(self) -> tuple[int, ...]:
        """Length of each axis that is looped over."""
        return tuple(_along(self.source, axis) for axis in self.loops)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a plane, in pixels."""
        height, width = self.window.shape
        return height, width

    @property
    def samples(self) -> int:
        """Values per pixel: 1 for grey, 3 or 4 in colour."""
        return _along(self.source, "c") if self.colour else 1

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one pixel, in memory."""
        return self.source.dtype.itemsize * self.samples

    def read(self, index: tuple[int, ...], part: Region) -> Pixels:
        """Pixels of one plane: shape (rows, columns), or (rows, columns, samples) in colour.

        ``index``: plane: an index along each of `loops`; ``part``: rows and columns, relative to the start of `window`.
        """
        axes = self.source.axes
        indices = {**self.at, **dict(zip(self.loops, index, strict=True))}
        spans = {axis: (position, position + 1) for axis, position in indices.items()}
        shown = part.shift(self.window.start)
        spans |= dict(zip("yx", zip(shown.start, shown.stop, strict=True), strict=True))
        spans |= {"c": (0, self.samples)} if self.colour else {}
        start, stop = zip(*(spans[axis] for axis in axes), strict=True)
        last = ("y", "x", "c") if self.colour else ("y", "x")
        order = [axes.index(axis) for axis in axes if axis not in last] + [axes.index(axis) for axis in last]
        pixels = self.source.read(Region(start, stop)).transpose(order)
        if self.component is not None:
            pixels = _PARTS[self.component](pixels)
        return pixels.reshape(*part.shape, self.samples) if self.colour else pixels.reshape(part.shape)

    def blended(self) -> Planes:
        """The same planes with several channels, not of colours and none of them chosen, over one another in their colours."""
        if "c" not in self.loops or not 2 <= _along(self.source, "c") <= MOST_CHANNELS:
            return self
        known = known_channels(self.source)
        known = known if len(known) == _along(self.source, "c") else ({},) * _along(self.source, "c")
        colours = zip(known, shown_colours(known), strict=True)
        shown = tuple(colour if channel.get("active", True) else "000000" for channel, colour in colours)
        return replace(self, colour=True, blend=shown)

    @property
    def contrasts(self) -> list[tuple[float, float] | None]:
        """The values that the file has for black and white of each channel, None where it has none."""
        windows = [channel.get("window") for channel in known_channels(self.source)]
        ends = [(w["start"], w["end"]) if isinstance(w, Mapping) else w for w in windows]
        return ends if len(ends) == len(self.blend) else [None] * len(self.blend)

    def parts(self) -> Iterator[Region]:
        """Divide the plane into parts of whole chunks of the image, row by row, each of a bounded size."""
        height, width = self.shape
        (top, left), (rows, columns) = self.window.start, self.chunk()
        limit = max(1, WINDOW_BYTES // self.pixel_bytes)
        across = columns * max(1, limit // (rows * columns))
        down = rows * max(1, limit // (rows * min(across, width)))
        for y0, y1 in _cuts(top, height, down):
            for x0, x1 in _cuts(left, width, across):
                yield Region((y0, x0), (y1, x1))

    def chunk(self) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        sizes = dict(zip(self.source.axes, self.source.chunks, strict=True))
        return min(sizes["y"], _along(self.source, "y")), min(sizes["x"], _along(self.source, "x"))


def choose_planes(source: Source, at: Mapping[str, int | str], region: Region | None) -> Planes:
    """The planes of an image, or of a part of it.

    ``source``: image; ``at``: index along axes other than y and x, such as `{"t": 0, "c": 1}`, that of a channel also as its name; ``region``: rows and columns of the part; None: all.
    """
    loops = [axis for axis in source.axes if axis not in ("y", "x")]
    found: dict[str, int] = {}
    for axis, index in at.items():
        if axis not in loops:
            raise ConfigError(
                f"plane {axis}={index}: the image's axes are {''.join(source.axes)}. "
                f"Write axes of {', '.join(loops) or 'an image that has more than y and x'}."
            )
        named = isinstance(index, str) or (axis == "c" and index >= _along(source, axis))
        found[axis] = channel_number(source, index, f"plane {axis}={index}") if named else int(index)
        if not 0 <= found[axis] < _along(source, axis):
            raise ConfigError(
                f"plane {axis}={index}: the image has {_along(source, axis)} along {axis}. "
                f"Write 0 to {_along(source, axis) - 1}."
            )
    whole = Region.whole((_along(source, "y"), _along(source, "x")))
    if region is not None and (not region.inside(whole) or not region.size):
        (y0, x0), (y1, x1) = region.start, region.stop
        raise ConfigError(
            f"region {y0}:{y1},{x0}:{x1}: the image has {whole.shape[0]} rows and {whole.shape[1]} columns. "
            "Write a part of it as first row:end row,first column:end column, excluding the end row and column."
        )
    return Planes(source, found, region or whole, "c" not in at and _is_colour(source))


def known_channels(source: Source) -> Channels:
    """The channels as the file describes them; none where it does not."""
    omero = source.ome.omero if source.ome else None
    return source.channels or tuple(omero["channels"] if omero else ())


def channel_names(source: Source) -> list[str]:
    """The names of the channels, or their numbers where the file has no name for each."""
    names = [str(channel.get("label", number)) for number, channel in enumerate(known_channels(source))]
    count = _along(source, "c") if "c" in source.axes else 1
    return names if len(set(names)) == len(names) == count else [str(number) for number in range(count)]


def channel_titles(source: Source) -> list[str]:
    """The names of the channels as sentences have them: with a letter before a number."""
    return [f"c={name}" if name.isdecimal() else name for name in channel_names(source)]


def channel_number(source: Source, channel: str | int, key: str) -> int:
    """The number of a channel that ``key`` has by its name, or by its number."""
    if "c" not in source.axes:
        raise ConfigError(
            f"{key}: the image has no channels, its axes are {''.join(source.axes)}. Leave it out, or name them with input.axes."
        )
    names, count = channel_names(source), _along(source, "c")
    is_number = str(channel).isdecimal() and int(channel) < count
    if str(channel) in names and not (is_number and isinstance(channel, int)):
        return names.index(str(channel))
    if is_number:
        return int(channel)
    known = listed([name if name == str(n) else f"{name} ({n})" for n, name in enumerate(names)])
    near = difflib.get_close_matches(str(channel), names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Write a name as it is here, or a number."
    raise ConfigError(f"{key}: the image has no channel {channel}, but {known}. {hint}")


def _is_colour(source: Source) -> bool:
    """Return True when the channels are red, green and blue (and opacity), or look so: three or four that are interleaved, or bytes; and unnamed."""
    if "c" not in source.axes or _along(source, "c") not in (3, 4):
        return False
    if any(channels := known_channels(source)):
        return are_colours(channels)
    return source.axes[-1] == "c" or source.dtype == np.uint8


def _along(source: Source, axis: str) -> int:
    return source.shape[source.axes.index(axis)]


def _cuts(first: int, length: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut a span that starts at ``first`` at multiples of ``step``; the parts are relative to its start.

    >>> list(_cuts(5, 10, 4))
    [(0, 3), (3, 7), (7, 10)]
    """
    borders = [max(0, n * step - first) for n in range(first // step, math.ceil((first + length) / step))]
    yield from zip(borders, [*borders[1:], length], strict=True)


EDGE = 256  # edge of a chunk in pixels
# Most pixels that one chunk is the mean of: a zoom that needs more shows the coarsest level that has fewer.
MOST_READ = 2**22
# Types that viewers take; others are served as float32.
EXACT = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32")
HOLE = -3.4e38  # value of a hole: viewers cannot compare with NaN
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
