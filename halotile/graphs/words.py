"""Text: values and types as a job file writes them; amounts, counts, durations, shapes and reasons in one line of a message."""

import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from halotile.errors import redacted
from halotile.tasks.options import OwnPath, ReadPath

IMAGE = "the image"  # name of the image where it has to be repaired


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


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and texts as a table for a notebook.

    >>> html_table([("output", "a <b>.zarr")])
    '<table><tr><td>output</td><td>a &lt;b&gt;.zarr</td></tr></table>'
    """
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


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


_WORDS: Mapping[Any, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    ReadPath: "a path", OwnPath: "a path", Path: "a path",
}  # fmt: skip
# Words that users write, with the accepted words of the same meaning.
ALIKE = {
    "gpu": ("cuda", "local-cuda"),
    "gpus": ("cuda", "local-cuda"),
    "rate": ("lr",),
    "learning_rate": ("lr",),
    "rates": ("lr_factors",),
    "batch_size": ("batch",),
}
KeyPath = tuple[str | int, ...]  # place of a value in a job, such as `("tile", "size")`
_PLURALS: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", ReadPath: "paths"}


def shown(value: Any) -> str:
    """Return a value as YAML would have it, shortened where it is long.

    >>> shown("NO"), shown((256, True)), shown(None), shown({1}.union)[:9]
    ('"NO"', '[256, true]', 'null', '<built-in')
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:  # a script may pass any object
        text = repr(value)
    text = redacted(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flow(value: Any) -> str:
    """Return a value as YAML on one line, with quotes only where they are needed.

    >>> flow({"name": "tv", "strength": {"DAPI": 1.0, "Alexa 488": 0.5}, "sizes": [1, 2]}), flow("1e3")
    ('{name: tv, strength: {DAPI: 1.0, "Alexa 488": 0.5}, sizes: [1, 2]}', '"1e3"')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(key))}: {flow(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    is_plain = re.fullmatch(r"(\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./~-]*", value)
    return (
        value if is_plain and value.lower() not in ("null", "true", "false") else json.dumps(value, ensure_ascii=False)
    )


def dotted(path: Iterable[str | int]) -> str:
    """Return a place in a job as it is written on the command line.

    >>> dotted(("tile", "size", 1)), dotted(("operators", 1, "kernel"))
    ('tile.size[1]', 'operators[1].kernel')
    """
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def nearest(word: str, words: Iterable[str], *, likeness: float = 0.7) -> str | None:
    """Return the word that was probably meant, if one is similar enough.

    >>> nearest("gpu", ["auto", "cpu", "cuda"]), nearest("GPU", ["local", "local-cuda"])
    ('cuda', 'local-cuda')
    >>> nearest("learning_rate", ["solver", "lr"])
    'lr'
    >>> nearest("siez", ["size", "depth"]), nearest("Size", ["size"]), nearest("colour", ["size"])
    ('size', 'size', None)
    """
    by_lower = {known.lower(): known for known in words}
    if alike := next((known for known in ALIKE.get(word.lower(), ()) if known in by_lower), None):
        return by_lower[alike]
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[matches[0]] if matches else None


def parts(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows.

    >>> parts(int | str | None)
    [<class 'int'>, <class 'str'>, <class 'NoneType'>]
    """
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in parts(part)]
    return [annotation]


def choices(annotation: Any) -> list[str]:
    """Return the fixed words that a type allows."""
    literals = (part for part in parts(annotation) if get_origin(part) is Literal)
    return [str(word) for part in literals for word in get_args(part)]


def expected(annotation: Any) -> str:
    """Describe a type in words.

    >>> expected(int | tuple[int, ...] | Literal["auto"])
    'auto, a whole number or a list of whole numbers'
    >>> expected(Literal["lz4", "zstd"]), expected(tuple[float, float]), expected(str | None)
    ('lz4 or zstd', 'a list of 2 numbers', 'text')
    >>> expected(tuple[Literal["object", "probe"], ...])
    'a list of object or probe'
    """
    phrases = choices(annotation)
    for part in parts(annotation):
        if part is not type(None) and get_origin(part) is not Literal:
            phrases.append(_phrase(part))
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]])) if phrases else "null"


def _phrase(part: Any) -> str:
    if (kinds := entry_types(part, 1)) is not None:
        plurals = " or ".join(_PLURALS.get(each, "values") for each in parts(kinds[0]))
        entries = expected(kinds[0]) if get_origin(kinds[0]) is Literal else plurals
        return f"a list of {entries}" if len(kinds) == 1 else f"a list of {len(kinds)} {entries}"
    if (kind := value_type(part)) is not None:
        return f"a mapping of names to {_PLURALS[kind]}" if kind in _PLURALS else "a mapping"
    return _WORDS[part] if part in _WORDS else getattr(part, "__name__", str(part))


def entry_types(part: Any, count: int) -> tuple[Any, ...] | None:
    """Return the types of the entries of a list with so many, unless it has another number of them; None for other types.

    >>> entry_types(tuple[int, ...], 3), entry_types(tuple[int, str], 3), entry_types(str, 3)
    ((<class 'int'>, <class 'int'>, <class 'int'>), (<class 'int'>, <class 'str'>), None)
    """
    origin, arguments = get_origin(part) or part, get_args(part)
    if not isinstance(origin, type) or not issubclass(origin, Sequence) or origin is str:
        return None
    is_fixed = origin is tuple and arguments and Ellipsis not in arguments
    return arguments if is_fixed else (arguments or (Any,))[:1] * count


def value_type(part: Any) -> Any | None:
    """Return the type of the values of a mapping; None for other types."""
    origin = get_origin(part) or part
    if not isinstance(origin, type) or not issubclass(origin, Mapping):
        return None
    return (get_args(part) or (str, Any))[1]


def fits(value: Any, annotation: Any) -> bool:
    """Return True where a value is of a type. Nothing is converted, but a list is accepted for a tuple, and text for a path.

    >>> fits(2, int), fits("2", int), fits(True, int), fits([1, 2], tuple[int, ...]), fits(None, str | None)
    (True, False, False, True, True)
    """
    return any(_fits(value, part) for part in parts(annotation))


def _fits(value: Any, part: Any) -> bool:
    if get_origin(part) is Literal:
        return isinstance(value, str) and value in get_args(part)
    if get_origin(part) is Annotated:
        return fits(value, get_args(part)[0])
    if (kinds := entry_types(part, len(value) if isinstance(value, tuple | list) else -1)) is not None:
        return isinstance(value, tuple | list) and len(kinds) == len(value) and all(map(fits, value, kinds))
    if (kind := value_type(part)) is not None:
        named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return named and all(fits(entry, kind) for entry in value.values())
    if part in (int, float):
        return isinstance(value, int if part is int else int | float) and not isinstance(value, bool)
    if part is Path:
        return isinstance(value, str | Path)
    # Other annotations, such as of a function, are for the class.
    return part is Any or not isinstance(part, type) or isinstance(value, part)
