"""Amounts of memory and disk as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """A size in binary units.

    Examples
    --------
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
    """A number with one digit behind the point, where that says something.

    Examples
    --------
    >>> short_number(0.44), short_number(3.0), short_number(12345.6)
    ('0.4', '3', '12,346')
    """
    return f"{number:.1f}".removesuffix(".0") if abs(number) < 99.95 else f"{number:,.0f}"
