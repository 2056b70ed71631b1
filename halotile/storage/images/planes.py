"""Two-dimensional planes, grey or in colour, of an image with any number of axes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.arrays import Source
from halotile.storage.formats.base import listed
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.sharded.ome_metadata import Channels, are_colours, shown_colours

WINDOW_BYTES = 32 * 2**20
"""Maximum size of one read, unless a single chunk is larger."""


MOST_CHANNELS = 8
"""Most channels that are examined one by one, or drawn in their colours."""
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
            "Write a part of it, as first row:last row,first column:last column, excluding the last ones."
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
