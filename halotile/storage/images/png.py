"""PNG previews of planes of any size."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.disk.durable import DISK
from halotile.storage.images.planes import Component, Planes
from halotile.storage.rim import Pixels

Means = NDArray[np.floating[Any]]
"""Shape (rows, columns, samples); NaN where no pixel was finite."""
Tick = Callable[[float], None]
"""Called with the finished fraction, 0 to 1."""

MOST_PIXELS = 64 * 2**20
"""Limit on the pixels of a PNG, which is built in memory."""
TAILS = (0.1, 99.9)
"""Percentiles of the reduced image that are drawn black and white."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2
_UP = 2
_GAP_PIXELS = 8


@dataclass(frozen=True)
class Drawing:
    """Properties of a written PNG."""

    shape: tuple[int, int]  # height and width of the PNG in pixels
    step: int  # edge in pixels of the squares that were averaged
    low: float  # value drawn as black
    high: float  # value drawn as white


def write_png(
    path: Path,  # the PNG, 8-bit grey or RGB
    planes: Sequence[Planes],  # images, of the same shape
    *,
    edge: int | None,  # longest side of each image in the PNG, in pixels; None: full resolution
    # values drawn as black and white; by default the darkest and brightest 0.1 % are clipped
    values: tuple[float, float] | None = None,
    tick: Tick = lambda _: None,  # progress callback
) -> Drawing:
    """Draw the first plane of one or more images side by side, all with the same contrast; phases from -π to π.

    Means ignore pixels that are not finite, and those of the value that the file names for no measurement; squares without any other
    pixels are black.
    """
    step = 1 if edge is None else -(-max(planes[0].shape) // edge)
    shape = tuple(-(-n // step) for n in planes[0].shape)
    if shape[0] * shape[1] * len(planes) > MOST_PIXELS:
        raise ConfigError(
            f"{path}: {shape[0]} × {shape[1]} pixels, {len(planes)} side by side, exceed the limit for a PNG "
            f"({MOST_PIXELS:,}). Write a smaller --region or --size, or a name that ends in .tif."
        )
    means = []
    for n, image in enumerate(planes):
        is_phase = image.component == "phase"
        averaged = (_phase_means if is_phase else block_means)(image, step, _share(tick, n, len(planes)))
        means.append((averaged, is_phase))
    if blend := planes[0].blend:
        means = blends([mean for mean, _ in means], blend, [values or own for own in planes[0].contrasts])
        values = (0.0, 1.0)
    low, high = values or contrast([mean for mean, is_phase in means if not is_phase])
    limits = {True: (-math.pi, math.pi), False: (low, high)}
    drawn = side_by_side([_to_bytes(mean, *limits[is_phase]) for mean, is_phase in means])
    DISK.write_file(path, encode_png(drawn))
    return Drawing((drawn.shape[0], drawn.shape[1]), step, low, high)


def _share(tick: Tick, number: int, count: int) -> Tick:
    """Progress callback for one of several images."""
    return lambda done: tick((number + done) / count)


def _phase_means(planes: Planes, step: int, tick: Tick) -> Means:
    """Phases of the mean complex numbers over squares: angles do not average across ±π."""
    parts: tuple[Component, Component] = ("real", "imag")
    views = [replace(planes, component=part) for part in parts]
    real, imag = (block_means(view, step, _share(tick, n, 2)) for n, view in enumerate(views))
    phases: Means = np.arctan2(imag, real)
    return phases


def block_means(planes: Planes, step: int, tick: Tick = lambda _: None) -> Means:
    """Means of the first plane over squares of ``step`` pixels, which are smaller at the far edges."""
    height, width = planes.shape
    samples = planes.samples if planes.blend else min(planes.samples, 3)
    sums = np.zeros((-(-height // step), -(-width // step), samples))
    counts = np.zeros_like(sums)
    first = (0,) * len(planes.counts)
    for part in planes.parts():
        pixels = planes.read(first, part).reshape(*part.shape, -1)[..., :samples]
        if (hole := planes.source.nodata) is not None:
            pixels = np.where(pixels == pixels.dtype.type(hole), np.nan, pixels)
        rows, columns = (_squares(a, b, step) for a, b in zip(part.start, part.stop, strict=True))
        total, count = _sum_finite(pixels, rows, columns)
        sums[rows.covered, columns.covered] += total
        counts[rows.covered, columns.covered] += count
        tick(part.stop[0] / height)
    with np.errstate(invalid="ignore"):
        means: Means = sums / counts
    return means if planes.source.dtype in (np.float64, np.complex128) else means.astype(np.float32)


class _Squares(NamedTuple):
    """The squares that a span of rows or columns covers."""

    covered: slice
    starts: NDArray[np.intp]  # start of each square, relative to the span
    sizes: NDArray[np.intp]


def _squares(start: int, stop: int, step: int) -> _Squares:
    first, last = start // step, -(-stop // step)
    starts = np.maximum(np.arange(first, last) * step - start, 0)
    return _Squares(slice(first, last), starts, np.diff(starts, append=stop - start))


def _sum_finite(pixels: Pixels, rows: _Squares, columns: _Squares) -> tuple[Means, NDArray[Any]]:
    total = _sum(pixels, rows, columns)
    if np.isfinite(total).all():
        return total, np.multiply.outer(rows.sizes, columns.sizes)[..., None]
    finite = np.isfinite(pixels)
    return _sum(np.where(finite, pixels, 0), rows, columns), _sum(finite, rows, columns)


def _sum(pixels: Pixels, rows: _Squares, columns: _Squares) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", over="ignore"):
        down = np.add.reduceat(pixels, rows.starts, axis=0, dtype=np.float64)
        across: NDArray[np.float64] = np.add.reduceat(down, columns.starts, axis=1)
    return across


def blends(
    images: Sequence[Means], colours: Sequence[str], windows: Sequence[tuple[float, float] | None]
) -> list[tuple[Means, bool]]:
    """Images with the channels over one another in their colours, black as 0 and white as 1, each with False: it has no phases.

    Windows are the values that are black and white of each channel; None: as :func:`contrast` finds them in all images.
    """
    drawn = [np.zeros((*image.shape[:2], 3)) for image in images]
    for number, (colour, window) in enumerate(zip(colours, windows, strict=True)):
        low, high = window or contrast([image[..., number] for image in images])
        for image, result in zip(images, drawn, strict=True):
            fraction = np.clip(
                np.nan_to_num((image[..., number].astype(np.float64) - low) / ((high - low) or 1.0)), 0, 1
            )
            result += fraction[..., None] * (np.frombuffer(bytes.fromhex(colour), np.uint8) / 255)
    return [(result, False) for result in drawn]


def contrast(images: Sequence[Means]) -> tuple[float, float]:
    """The values drawn as black and white: percentiles of all images together, so that none of them is cut off more than the other."""
    finite = np.concatenate([image[np.isfinite(image)] for image in images])
    low, high = (float(v) for v in np.percentile(finite, TAILS)) if finite.size else (0.0, 1.0)
    return low, high


def _to_bytes(image: Means, low: float, high: float) -> NDArray[np.uint8]:
    """Map ``low`` to ``high`` to 0 to 255; a constant image becomes grey."""
    with np.errstate(invalid="ignore", over="ignore"):
        fraction = (image.astype(np.float64) - low) / (high - low) if high > low else image * 0.0 + 0.5
    level = np.nan_to_num(np.clip(fraction, 0, 1), nan=0.0) * 255
    return level.round().astype(np.uint8)


def side_by_side(images: Sequence[NDArray[np.uint8]], gap_pixels: int = _GAP_PIXELS) -> NDArray[np.uint8]:
    """Put images of shape (rows, columns, 1 or 3) into one row, separated by white."""
    samples = max(p.shape[-1] for p in images)
    height, width = images[0].shape[:2]
    gap = np.full((height, gap_pixels, samples), 255, np.uint8)
    row: list[NDArray[np.uint8]] = []
    for image in images:
        row += [gap, np.broadcast_to(image, (height, width, samples))]
    return np.concatenate(row[1:], axis=1)


def encode_png(pixels: NDArray[np.uint8]) -> list[bytes]:
    """Encode pixels of shape (rows, columns, 1 or 3) as a PNG file, as a list of buffers.

    Source: Portable Network Graphics specification, third edition, W3C 2025.

    >>> b"".join(encode_png(np.zeros((2, 3, 1), np.uint8)))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, samples = pixels.shape
    lines = np.empty((height, 1 + width * samples), np.uint8)
    lines[:, 0] = _UP
    flat = pixels.reshape(height, -1)
    lines[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB if samples == 3 else _GREY, 0, 0, 0)
    data = zlib.compress(lines.data, 6)
    return [_SIGNATURE, *_chunk(b"IHDR", header), *_chunk(b"IDAT", data), *_chunk(b"IEND", b"")]


def _chunk(kind: bytes, data: bytes) -> list[bytes]:
    return [struct.pack(">I", len(data)), kind, data, struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))]
