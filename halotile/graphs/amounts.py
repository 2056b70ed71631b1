"""Amounts, counts and reasons in the form of one line of a message."""

from __future__ import annotations

import re
from collections.abc import Iterable

IMAGE = "the image"
"""Name of the image where it has to be mended."""


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
    """A number with one decimal place, where that is significant.

    Examples
    --------
    >>> short_number(0.44), short_number(3.0), short_number(12345.6)
    ('0.4', '3', '12,346')
    """
    return f"{number:.1f}".removesuffix(".0") if abs(number) < 99.95 else f"{number:,.0f}"


def counted(count: int, word: str) -> str:
    """A count with its noun.

    Examples
    --------
    >>> counted(1, "block"), counted(12345, "block"), counted(2, "retry")
    ('1 block', '12,345 blocks', '2 retries')
    """
    plural = f"{word.removesuffix('y')}ies" if word.endswith("ry") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


TRACEBACK = "Traceback (most recent call last):"
STACK = "Stack (most recent call last):"


def first_line(text: str) -> str:
    """The first line of an error's text, with the next one where the first ends with a colon, or its error where a traceback follows, or the last place of a stack.

    Examples
    --------
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
    """The image, or the key of the side input, that has to be mended after errors of blocks for their input.

    Examples
    --------
    >>> faulty_input(["InputError: the side input sigma holds NaN in row 3."] * 2)
    'input.sides.sigma'
    >>> faulty_input(["InputError: the input holds NaN in row 3."])
    'the image'
    """
    matches = (re.search(r"the side input (\w+) holds ", error) for error in errors)
    sides = {match[1] if match else None for match in matches}
    side = sides.pop() if len(sides) == 1 else None
    return IMAGE if side is None else f"input.sides.{side}"
