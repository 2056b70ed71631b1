"""Values and types as a job file writes them."""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from halotile.errors import redacted
from halotile.tasks.options import OwnPath, ReadPath

_WORDS: Mapping[Any, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    ReadPath: "a path", OwnPath: "a path", Path: "a path",
}  # fmt: skip
ALIKE = {
    "gpu": ("cuda", "local-cuda"),
    "gpus": ("cuda", "local-cuda"),
    "rate": ("lr",),
    "learning_rate": ("lr",),
    "rates": ("lr_factors",),
    "batch_size": ("batch",),
}
"""Words that users write, with the accepted words of the same meaning."""
KeyPath = tuple[str | int, ...]
"""Place of a value in a job, such as ``("tile", "size")``."""
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
