"""Letters that name the axes of an array.

Spatial axes are ``z``, ``y`` and ``x``; ``t`` is time, ``c`` is channels; any other letter is an axis that is
looped over. The user's letters take precedence over those of the file. Where neither names them, the last two are
``yx`` and those before are looped over: nothing is mixed across an axis that may not be space. An axis that is last
and too short for a row of pixels holds channels.

====  ========================  ================================
axes  letters                   last short (:func:`holds_colours`)
====  ========================  ================================
1     ``x``
2     ``yx``                    ``yx``
3     ``qyx``                   ``yxc``
4     ``pqyx``                  ``qyxc``
5     ``opqyx``                 ``pqyxc``
====  ========================  ================================
"""

import math
import string
from collections.abc import Sequence

from halotile.errors import InputError

_EXAMPLES = {1: "x", 2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
_UNKNOWN = "opq"
_MOST_COLOURS = 16
_WORDS = {"time": "t", "frame": "t", "channel": "c", "channels": "c", "band": "c", "bands": "c"}
# Names of the CF conventions, where no axis is called y or x.
_ON_EARTH = {"lat": "y", "latitude": "y", "lon": "x", "longitude": "x"}


def choose_axes(requested: str | None, named: Sequence[str | None] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    """One distinct lower-case letter for each axis.

    ``requested``: user's letters, such as `"tcyx"`; ``named``: axis names in the file; ``shape``: shape of the array, in pixels.

    >>> choose_axes(None, ["time", "Y", "X"], (5, 64, 64))
    ('t', 'y', 'x')
    >>> choose_axes(None, None, (64, 64, 3))
    ('y', 'x', 'c')
    """
    if requested is not None:
        return _checked(requested, shape)
    if not named or len(named) != len(shape):
        return _default(shape)
    return letters(named) or _with_names(_default(shape), named)


def letters(named: Sequence[str | None]) -> tuple[str, ...] | None:
    """Letters for the axis names in a file; None unless both y and x are among them.

    >>> letters(["Q", "channel", "y", "x"])
    ('q', 'c', 'y', 'x')
    >>> letters(["time", "lat", "lon"])
    ('t', 'y', 'x')
    >>> letters(["row", "column"]) is None
    True
    """
    wanted = [_letter(name) for name in named]
    if not {"y", "x"} & set(wanted):
        words = ((name or "").strip().lower() for name in named)
        wanted = [_ON_EARTH.get(word, letter) for word, letter in zip(words, wanted, strict=True)]
    if not {"y", "x"} <= set(wanted):
        return None
    spare = (letter for letter in "q" + string.ascii_lowercase if letter not in {*wanted, *"tczyx"})
    chosen: list[str] = []
    for letter in wanted:
        chosen.append(letter if letter and letter not in chosen else next(spare))
    return tuple(chosen)


def _with_names(axes: tuple[str, ...], named: Sequence[str | None]) -> tuple[str, ...]:
    """The default letters, with that of time or channels for an unknown axis of such a name."""
    chosen = list(axes)
    for i, name in enumerate(named):
        if axes[i] in _UNKNOWN and (letter := _letter(name)) in ("t", "c") and letter not in chosen:
            chosen[i] = letter
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
            f"axes is {requested!r}, of length {len(axes)}, but the array has {len(shape)} axes: its shape is {shape}. "
            f"Write one letter for each, such as {_EXAMPLES.get(len(shape), 'tczyx')!r}."
        )
    if len(set(axes)) != len(axes) or not all(letter in string.ascii_lowercase for letter in axes):
        raise InputError(f"axes is {requested!r}: the axes need distinct letters. Write letters a to z, each once.")
    if not {"y", "x"} <= set(axes):
        raise InputError(f"axes is {requested!r}: an image has the axes y and x. Name both.")
    return axes


def holds_colours(shape: Sequence[int]) -> bool:
    """Return True where the last of three or more axes is short beside the two before: colours, not columns.

    >>> holds_colours((600, 800, 3)), holds_colours((8, 600, 800))
    (True, False)
    """
    last = shape[-1]
    return len(shape) > 2 and last <= _MOST_COLOURS and 4 * last <= min(shape[-3:-1])


def remarks_on_axes(axes: Sequence[str], shape: Sequence[int], named: Sequence[str | None] = ()) -> tuple[str, ...]:
    """Return what was assumed of axes that the file does not name, or not so, and what to write instead.

    ``axes``: letters; ``shape``: length of each axis; ``named``: axis names in the file.

    >>> remarks_on_axes("qyx", (8, 64, 64))[0]
    'the file does not say what axis q is: each of 8 planes is by itself. If they are a volume, write input.axes: zyx'
    >>> remarks_on_axes("tyx", (8, 64, 64), ["time", "y", "x"])
    ()
    """
    is_named = len(named) == len(axes) and letters(named) is not None
    names = ", ".join(filter(None, named))
    unknown = [i for i, letter in enumerate(axes) if letter not in "tczyx"]
    remarks = []
    if not is_named and (names or (len(axes) > 2 and not unknown)):
        why = f"names the axes {names:.50}" if names else "does not name its axes"
        number = f" for an array of {len(axes)}" if names and len(named) != len(axes) else ""
        remarks.append(
            f"the file {why}{number}: taken as {''.join(axes)}. If not, write input.axes, one letter for each"
        )
    if unknown:
        remarks.append(_remark_on_unknown(axes, shape, unknown, named if is_named else ()))
    return tuple(remarks)


def _remark_on_unknown(
    axes: Sequence[str], shape: Sequence[int], unknown: Sequence[int], named: Sequence[str | None]
) -> str:
    which = "".join(axes[i] for i in unknown)
    words = ", ".join(name for i in unknown if named and len(name := named[i] or "") > 1)
    what = f"axis {which}" if len(unknown) == 1 else f"axes {which}"
    what += (f" ({words:.50})" if words else "") + (" is" if len(unknown) == 1 else " are")
    planes = math.prod(shape[i] for i in unknown)
    volume = "one letter for each" if "z" in axes else "".join(axes).replace(axes[unknown[-1]], "z")
    return (
        f"the file does not say what {what}: each of {planes:,} planes is by itself. "
        f"If they are a volume, write input.axes: {volume}"
    )


def _default(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The default letters from the table above."""
    plane = "yxc" if holds_colours(shape) else "yx" if len(shape) > 1 else "x"
    unknown = len(shape) - len(plane)
    if len(shape) > 5:
        raise InputError(
            f"the array has {len(shape)} axes, shape {shape}, and nothing says which letters they have. "
            'Write axes, one letter for each, such as "atczyx".'
        )
    return (*_UNKNOWN[len(_UNKNOWN) - unknown :], *plane)
