"""PNG files: previews of planes of any size, and contact sheets of images under a label and above lines of text."""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.registry import optional
from halotile.storage.disk.durable import DISK
from halotile.storage.images.planes import Component, Planes
from halotile.storage.rim import Pixels

Means = NDArray[np.floating[Any]]  # shape (rows, columns, samples); NaN where no pixel was finite
Tick = Callable[[float], None]  # called with the finished fraction, 0 to 1

MOST_PIXELS = 64 * 2**20  # limit on the pixels of a PNG, which is built in memory
TAILS = (0.1, 99.9)  # percentiles of the reduced image that are drawn black and white
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


Drawn = NDArray[np.uint8]  # shape (rows, columns, 1 or 3)

LABEL, TEXT = 20, 16  # sizes of the letters in pixels
# Width of a cell to which smaller images are enlarged, in whole steps; cells that stand in one row; and the width of a
# larger sheet relative to its height.
USUAL_WIDTH, ONE_ROW, WIDE = 400, 5, 1.6
_MARGIN, _GAP, _LINE = 16, 6, 1.3
_PAPER, _INK, _FAINT = (255, 255, 255), (20, 20, 20), (95, 95, 95)
_SUGGESTED, _WARNING = (0, 120, 70), (185, 60, 0)
_MOST_LINES = 4


@dataclass(frozen=True)
class Cell:
    """One column of images of a sheet."""

    label: str  # text above the images
    # images below one another, uint8 of shape (rows, columns, 1 or 3), all of one shape
    images: Sequence[Drawn]
    lines: Sequence[str] = ()  # text below them
    is_suggested: bool = False  # framed in green
    warning: str = ""  # further line below, in orange


def check_drawing() -> None:
    """Refuse to draw where text cannot be drawn."""
    for module in ("Image", "ImageDraw", "ImageFont"):
        optional("a sheet is drawn with Pillow", f"PIL.{module}", '"halotile[images]"')


def grey(pixels: NDArray[Any], low: float, high: float, hole: int = 0) -> Drawn:
    """Map an image of shape (channels, rows, columns) to grey or, of three channels and more, to colours; NaN becomes ``hole``.

    >>> grey(np.array([[[0.0, 1.0, np.nan]]]), 0, 1).ravel().tolist()
    [0, 255, 0]
    """
    shown = np.moveaxis(pixels[:3] if len(pixels) >= 3 else pixels[:1], 0, -1).astype(np.float64)
    level = np.clip((shown - low) / ((high - low) or 1.0), 0, 1) * 255
    drawn: Drawn = np.where(np.isnan(level), hole, level.round()).astype(np.uint8)
    return drawn


def draw_sheet(cells: Sequence[Cell], notes: Sequence[str] = ()) -> bytes:
    """Return a PNG with cells in rows, and the notes in the room below the images of the first one.

    ``cells``: all with images of one shape; the first one may have fewer; ``notes``: paragraphs.
    """
    check_drawing()
    from PIL import Image, ImageDraw

    rows, columns = cells[0].images[0].shape[:2]
    step = max(1, min(round(USUAL_WIDTH / columns), 2 * USUAL_WIDTH // rows))
    width, height = max(columns * step, USUAL_WIDTH // 2), rows * step
    most = max(len(cell.images) for cell in cells)
    head = max(len(_wrapped(cell.label, width, LABEL)) for cell in cells)
    foot = max(len(_foot(cell, width)) for cell in cells)
    tall = round((head * LABEL + foot * TEXT) * _LINE) + most * (height + _GAP) + 2 * _GAP
    across = min(len(cells), max(ONE_ROW, round(math.sqrt(len(cells) * WIDE * tall / width))))
    down = -(-len(cells) // across)
    across = -(-len(cells) // down)
    size = (across * (width + _MARGIN) + _MARGIN, down * (tall + _MARGIN) + _MARGIN)
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, cell in enumerate(cells):
        left = _MARGIN + number % across * (width + _MARGIN)
        top = _MARGIN + number // across * (tall + _MARGIN)
        if cell.is_suggested:
            half = _MARGIN // 2
            frame = (left - half, top - half, left + width + half - 1, top + tall + half - 1)
            pen.rectangle(frame, outline=_SUGGESTED, width=4)
        lines = _wrapped(cell.label, width, LABEL)
        ink = _SUGGESTED if cell.is_suggested else _INK
        _write(pen, (left, top + round((head - len(lines)) * LABEL * _LINE)), lines, LABEL, ink)
        y = top + round(head * LABEL * _LINE) + _GAP
        for image in cell.images:
            sheet.paste(Image.fromarray(_enlarged(image, step)), (left, y))
            y += height + _GAP
        for text, color in _foot(cell, width):
            _write(pen, (left, y), [text], TEXT, color)
            y += round(TEXT * _LINE)
        for note in notes if number == 0 else ():
            y += TEXT // 2
            room = round((top + tall - y) / (TEXT * _LINE)) - 1
            wrapped = _wrapped(note, width, TEXT, most=max(room, 2))
            if room > 0:
                _write(pen, (left, y), wrapped, TEXT, _FAINT)
            y += round(len(wrapped) * TEXT * _LINE)
    file = BytesIO()
    sheet.save(file, "png")
    return file.getvalue()


def _foot(cell: Cell, width: int) -> list[tuple[str, tuple[int, int, int]]]:
    """The lines below the images of a cell, with their colours."""
    lines = [(part, _INK) for line in cell.lines for part in _wrapped(line, width, TEXT)]
    return lines + [(part, _WARNING) for part in _wrapped(cell.warning, width, TEXT) if part]


def _enlarged(image: Drawn, step: int) -> Drawn:
    rgb = np.broadcast_to(image, (*image.shape[:2], 3))
    return np.ascontiguousarray(rgb.repeat(step, 0).repeat(step, 1))


def _write(pen: Any, at: tuple[int, int], lines: Sequence[str], size: int, ink: tuple[int, int, int]) -> None:
    for number, line in enumerate(lines):
        pen.text((at[0], at[1] + round(number * size * _LINE)), line, font=_font(size), fill=ink)


@cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    try:  # has more letters than that of Pillow
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _wrapped(text: str, width: int, size: int, most: int = _MOST_LINES) -> list[str]:
    """The lines of a text that fit a width; words that are longer are cut, and the middle is left out of what has too many lines."""
    fits = _font(size).getlength
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if fits(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while fits(word) > width:
            count = next(n for n in range(len(word), 0, -1) if fits(word[:n]) <= width or n == 1)
            lines[-1], word = word[:count], word[count:]
            lines.append("")
        lines[-1] = word
    if len(lines) > most:
        lines = [*lines[: most - 2], "...", lines[-1]]
    return lines
