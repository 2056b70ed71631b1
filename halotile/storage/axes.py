"""Letters that name the axes of an array.

Spatial axes are ``z``, ``y`` and ``x``; ``t`` is time, ``c`` is channels; any other letter is an axis that is
looped over. The user's letters take precedence over those of the file, which take precedence over these defaults:

========================================  ============
axes                                      letters
========================================  ============
1                                         ``x``
2                                         ``yx``
3, uint8, last of length 3 or 4           ``yxc``
3                                         ``zyx``
4, uint8, last of length 3 or 4           ``zyxc``
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
        The user's letters, such as ``"tcyx"``.
    named : sequence of str or None
        The axis names in the file.
    shape : tuple of int
        Shape of the array, in pixels.
    dtype : numpy dtype
        Type of one pixel.

    Raises
    ------
    InputError
        When the requested letters do not match the array, or the axes cannot be determined.

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
    """Letters for the axis names in a file; None unless both y and x are among them.

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
    """The letter for an axis name; None when it is ambiguous."""
    word = (name or "").strip().lower()
    return word if len(word) == 1 and word in string.ascii_lowercase else _WORDS.get(word)


def _checked(requested: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the user's letters after validation."""
    axes = tuple(requested.lower())
    if len(axes) != len(shape):
        raise InputError(
            f"axes is {requested!r}, {len(axes)} letters, but the array has {len(shape)} axes: its shape is {shape}. "
            f"Write one letter for each, such as {_BY_COUNT.get(len(shape), 'tczyx')!r}."
        )
    if len(set(axes)) != len(axes) or not all(letter in string.ascii_lowercase for letter in axes):
        raise InputError(
            f"axes is {requested!r}: the axes need distinct letters. Write letters a to z, each once."
        )
    if not {"y", "x"} <= set(axes):
        raise InputError(f"axes is {requested!r}: an image has the axes y and x. Name both.")
    return axes


def _default(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[str, ...]:
    """The default letters from the table above."""
    colour = dtype == np.uint8 and shape[-1] in (3, 4)
    default = (_COLOUR.get(len(shape)) if colour else None) or _BY_COUNT.get(len(shape))
    if default is None:
        raise InputError(
            f"the array has {len(shape)} axes, shape {shape}, and nothing says which letters they have. "
            'Write axes, one letter for each, such as "atczyx".'
        )
    return tuple(default)
