"""Durations, rates and shapes as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from halotile.graphs.amounts import short_number


def seconds_text(seconds: float | None) -> str:
    """Return a duration as text.

    Examples
    --------
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

    Examples
    --------
    >>> precise_seconds_text(0.01234), precise_seconds_text(12.34), precise_seconds_text(1230)
    ('0.0123 s', '12.3 s', '20 min 30 s')
    """
    return f"{seconds:.3g} s" if seconds < 600 else seconds_text(seconds)


def rate_text(megapixels_per_second: float) -> str:
    """Return a number of pixels per second as text.

    Examples
    --------
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

    Examples
    --------
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

    Examples
    --------
    >>> shape_text([3, 70000, 70000])
    '3 × 70,000 × 70,000'
    """
    return " × ".join(f"{n:,}" for n in shape)


def size_text(shape: Sequence[int]) -> str:
    """Return the size of an image of so many rows and columns as text, width first.

    Examples
    --------
    >>> size_text([600, 1500])
    '1,500 × 600 pixels (width × height)'
    """
    height, width = shape
    return f"{shape_text([width, height])} pixels (width × height)"


def percent(part: int, whole: int) -> float:
    """Return the percentage of a whole that is done; 100 for an empty whole."""
    return 100.0 * part / whole if whole else 100.0
