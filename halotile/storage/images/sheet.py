"""Contact sheets: cells of images under a label and above lines of text, on one PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.registry import optional
from halotile.storage.disk.durable import DISK

Drawn = NDArray[np.uint8]
"""Shape (rows, columns, 1 or 3)."""

LABEL, TEXT = 20, 16
"""Sizes of the letters in pixels."""
USUAL_WIDTH, ONE_ROW, WIDE = 400, 5, 1.6
"""Width of a cell to which smaller images are enlarged, in whole steps; cells that stand in one row; and the width of a larger sheet
relative to its height."""
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


def draw_sheet(path: Path, cells: Sequence[Cell], notes: Sequence[str] = ()) -> None:
    """Draw cells in rows, the notes in the room below the images of the first one.

    ``path``: the PNG; ``cells``: all with images of one shape; the first one may have fewer; ``notes``: paragraphs.
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
    DISK.write_file(path, [file.getvalue()])


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
