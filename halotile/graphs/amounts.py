"""Amounts, counts, durations, shapes and reasons in the form of one line of a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

IMAGE = "the image"
"""Name of the image where it has to be repaired."""


def bytes_text(count: float) -> str:
    """A size in binary units.

    >>> bytes_text(0), bytes_text(1536), bytes_text(3 * 2**30)
    ('0 B', '1.5 KiB', '3 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.95 or unit == "TiB":
            return f"{short_number(size)} {unit}"
        size /= 1024
    raise AssertionError


def short_number(number: float) -> str:
    """A number with one decimal place, where that is significant.

    >>> short_number(0.44), short_number(3.0), short_number(12345.6)
    ('0.4', '3', '12,346')
    """
    return f"{number:.1f}".removesuffix(".0") if abs(number) < 99.95 else f"{number:,.0f}"


def counted(count: int, word: str) -> str:
    """A count with its noun.

    >>> counted(1, "block"), counted(12345, "block"), counted(2, "retry")
    ('1 block', '12,345 blocks', '2 retries')
    """
    plural = f"{word.removesuffix('y')}ies" if word.endswith("ry") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


TRACEBACK = "Traceback (most recent call last):"
STACK = "Stack (most recent call last):"


def first_line(text: str) -> str:
    """The first line of an error's text, with the next one where the first ends with a colon, or its error where a traceback follows, or the last place of a stack.

    >>> first_line("ValueError: out of range\\n  row 3\\n  row 7"), first_line("RuntimeError: \\nno weights\\n")
    ('ValueError: out of range', 'RuntimeError: no weights')
    >>> first_line('rank 0 failed: Traceback (most recent call last):\\n  File "a.py"\\n    f()\\nValueError: out of range\\nThen ended: rank 1.')
    'rank 0 failed: ValueError: out of range'
    >>> first_line('It was here:\\nStack (most recent call last):\\n  File "a.py", line 3, in f\\n    sleep(9)\\nThe others wait.')
    'It was here: File "a.py", line 3, in f'
    """
    text, _, trace = text.partition(TRACEBACK)
    text, _, stack = text.partition(STACK)
    places = [line for line in stack.splitlines() if line.startswith('  File "')]
    _, _, after = trace.rpartition('\n  File "')
    errors = [line for line in after.splitlines()[1:] if line.strip() and not line.startswith(" ")]
    lines = [line.strip() for line in [*text.splitlines(), *places[-1:], *errors[:1]] if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def faulty_input(errors: Iterable[str]) -> str:
    """The image, or the key of the side input, to repair after blocks failed because of their input.

    >>> faulty_input(["InputError: the side input sigma holds NaN in row 3."] * 2)
    'input.sides.sigma'
    >>> faulty_input(["InputError: the input holds NaN in row 3."])
    'the image'
    """
    matches = (re.search(r"the side input (\w+) holds ", error) for error in errors)
    sides = {match[1] if match else None for match in matches}
    side = sides.pop() if len(sides) == 1 else None
    return IMAGE if side is None else f"input.sides.{side}"


def seconds_text(seconds: float | None) -> str:
    """Return a duration as text.

    >>> seconds_text(0.42), seconds_text(72), seconds_text(7384), seconds_text(200_000), seconds_text(None)
    ('0.4 s', '1 min 12 s', '2 h 03 min', '2 d 7 h', '?')
    """
    if seconds is None:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def precise_seconds_text(seconds: float) -> str:
    """Return a duration that was measured as text, with three digits.

    >>> precise_seconds_text(0.01234), precise_seconds_text(12.34), precise_seconds_text(1230)
    ('0.0123 s', '12.3 s', '20 min 30 s')
    """
    return f"{seconds:.3g} s" if seconds < 600 else seconds_text(seconds)


def rate_text(megapixels_per_second: float) -> str:
    """Return a number of pixels per second as text.

    >>> rate_text(85.21), rate_text(0.043), rate_text(2400)
    ('85.2 Mpix/s', '43 kpix/s', '2.4 Gpix/s')
    """
    if megapixels_per_second >= 1000:
        return f"{short_number(megapixels_per_second / 1000)} Gpix/s"
    if 0 < megapixels_per_second < 0.1:
        return f"{short_number(megapixels_per_second * 1000)} kpix/s"
    return f"{short_number(megapixels_per_second)} Mpix/s"


def pixel_size_text(axes: Sequence[str], scale: Sequence[float], units: Sequence[str | None]) -> str:
    """Return the sizes of pixels that are known.

    >>> pixel_size_text("cyx", (1.0, 0.1, 0.1), (None, "micrometer", None)), pixel_size_text("yx", (1.0, 1.0), (None, None))
    ('y 0.1 micrometer, x 0.1', 'not known')
    """
    sizes = [
        f"{axis} {size:g} {unit}" if unit else f"{axis} {size:g}"
        for axis, size, unit in zip(axes, scale, units, strict=True)
        if axis != "c" and (unit or size != 1.0)
    ]
    return ", ".join(sizes) or "not known"


def shape_text(shape: Sequence[int]) -> str:
    """Return the lengths along the axes as text.

    >>> shape_text([3, 70000, 70000])
    '3 × 70,000 × 70,000'
    """
    return " × ".join(f"{n:,}" for n in shape)


def size_text(shape: Sequence[int]) -> str:
    """Return the size of an image of so many rows and columns as text, width first.

    >>> size_text([600, 1500])
    '1,500 × 600 pixels (width × height)'
    """
    height, width = shape
    return f"{shape_text([width, height])} pixels (width × height)"


def percent(part: int, whole: int) -> float:
    """Return the percentage of a whole that is done; 100 for an empty whole."""
    return 100.0 * part / whole if whole else 100.0
