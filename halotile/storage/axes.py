"""Which letter names each axis of an array.

Spatial axes are ``z``, ``y`` and ``x``; ``t`` is time, ``c`` channels; any other letter is an axis that is
looped over. What the user writes wins, then what the file says, then these defaults:

========================================  ============
axes                                      letters
========================================  ============
1                                         ``x``
2                                         ``yx``
3, uint8 and the last is 3 or 4 long      ``yxc``
3                                         ``zyx``
4, uint8 and the last is 3 or 4 long      ``zyxc``
4                                         ``czyx``
5                                         ``tczyx``
========================================  ============
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from halotile.errors import InputError

_BY_COUNT = {1: "x", 2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
_COLOUR = {3: "yxc", 4: "zyxc"}
_WORDS = {"time": "t", "frame": "t", "channel": "c", "channels": "c", "band": "c", "bands": "c"}


def choose_axes(
    requested: str | None,
    named: Sequence[str | None] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
) -> tuple[str, ...]:
    """One distinct lower-case letter for each axis.

    Parameters
    ----------
    requested : str or None
        What the user wrote, such as ``"tcyx"``.
    named : sequence of str or None
        What the file calls its axes.
    shape : tuple of int
        Shape of the array, in pixels.
    dtype : numpy dtype
        Type of one pixel.

    Raises
    ------
    InputError
        When the letters asked for do not fit, or nothing says what the axes are.

    Examples
    --------
    >>> choose_axes(None, ["time", "Y", "X"], (5, 64, 64), np.dtype("uint8"))
    ('t', 'y', 'x')
    >>> choose_axes(None, None, (64, 64, 3), np.dtype("uint8"))
    ('y', 'x', 'c')
    """
    if requested is not None:
        return _checked(requested, shape)
    from_file = letters(named) if named and len(named) == len(shape) else None
    return from_file or _default(shape, dtype)


def letters(named: Sequence[str | None]) -> tuple[str, ...] | None:
    """Letters for the names a file gives its axes; None when they do not name both y and x.

    Examples
    --------
    >>> letters(["Q", "channel", "y", "x"])
    ('q', 'c', 'y', 'x')
    >>> letters(["lat", "lon"]) is None
    True
    """
    wanted = [_letter(name) for name in named]
    if not {"y", "x"} <= set(wanted):
        return None
    spare = (letter for letter in "q" + string.ascii_lowercase if letter not in {*wanted, *"tczyx"})
    chosen: list[str] = []
    for letter in wanted:
        chosen.append(letter if letter and letter not in chosen else next(spare))
    return tuple(chosen)


def _letter(name: str | None) -> str | None:
    """The letter that a name stands for, if it is plain."""
    word = (name or "").strip().lower()
    return word if len(word) == 1 and word in string.ascii_lowercase else _WORDS.get(word)


def _checked(requested: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The letters that the user wrote, refused where they cannot be."""
    axes = tuple(requested.lower())
    if len(axes) != len(shape):
        raise InputError(
            f"axes is {requested!r}, {len(axes)} letters, but the array has {len(shape)} axes: its shape is {shape}. "
            f"Write one letter for each, such as {_BY_COUNT.get(len(shape), 'tczyx')!r}."
        )
    if len(set(axes)) != len(axes) or not all(letter in string.ascii_lowercase for letter in axes):
        raise InputError(
            f"axes is {requested!r}: every axis needs a letter of its own. Write letters a to z, each once."
        )
    if not {"y", "x"} <= set(axes):
        raise InputError(f"axes is {requested!r}: an image has the axes y and x. Name both.")
    return axes


def _default(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[str, ...]:
    """The letters of the table above."""
    colour = dtype == np.uint8 and shape[-1] in (3, 4)
    found = (_COLOUR.get(len(shape)) if colour else None) or _BY_COUNT.get(len(shape))
    if found is None:
        raise InputError(
            f"the array has {len(shape)} axes, shape {shape}, and nothing says which they are. "
            'Write axes, one letter for each, such as "atczyx".'
        )
    return tuple(found)
