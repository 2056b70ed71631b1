"""Checks one section of a configuration against its dataclass, in words of the configuration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from halotile.cli.problems import nearest, shown
from halotile.tasks.options import job_key

Fault = tuple[tuple[str | int, ...], str]
"""Where inside the section, and what is wrong there."""

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
_OLD_BOOLEANS = {
    "yes": True,
    "on": True,
    "y": True,
    "true": True,
    "no": False,
    "off": False,
    "n": False,
    "false": False,
}


def check_fields(schema: type, values: Mapping[str, Any]) -> tuple[Any, list[Fault]]:
    """Build a dataclass from values; where that fails, say everything that is wrong.

    Nothing is converted: the text "2" is not a number, and a number is not a text.

    Returns
    -------
    object or None
        An instance of ``schema``, or None when there are faults.
    list of (path, message)
        The faults.
    """
    from pydantic import ValidationError

    hints = field_types(schema)
    faults = [_unknown(key, hints) for key in values if key not in hints]
    known = {key: value for key, value in values.items() if key in hints}
    meant = {nearest(key, hints) for key in values if key not in hints}
    try:
        # Through JSON: there pydantic's strict mode still takes a list for a tuple.
        built = _adapter(schema).validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        found = _merged(error, known, hints)
        # A misspelt key is one fault, not two.
        return None, faults + [f for f in found if not (f[0] and f[0][0] in meant and f[0][0] not in known)]
    return (None if faults else built), faults


@functools.cache
def _adapter(schema: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The keys that a configuration may set, with their types."""
    hints = get_type_hints(schema)
    return {job_key(field.name): hints[field.name] for field in dataclasses.fields(schema) if field.init}


def _unknown(key: str, hints: Collection[str]) -> Fault:
    near = nearest(key, hints)
    if near:
        return (key,), f"unknown key; did you mean {near}?"
    return (
        key,
    ), f"unknown key; write one of {', '.join(hints)}" if hints else "unknown key; there are no options"


def _merged(error: Any, values: Mapping[str, Any], hints: Mapping[str, Any]) -> list[Fault]:
    """One fault for each place: pydantic tells each branch of a union on its own."""
    faults: dict[tuple[str | int, ...], str] = {}
    for entry in error.errors(include_url=False):
        location = tuple(entry["loc"])
        if not location:
            message = str(entry.get("ctx", {}).get("error", entry["msg"]))
            named = next((key for key in values if _mentions(message, key)), None)
            faults[(named,) if named else ()] = _lowered(message)
        elif entry["type"] == "missing":
            faults[location] = f"missing; write {expected(hints[str(location[0])])}"
        else:
            path = _existing(location, values)
            faults.setdefault(path, _wrong(path, values, hints, entry))
    return list(faults.items())


def _mentions(message: str, key: str) -> bool:
    return key in "".join(c if c.isalnum() or c == "_" else " " for c in message).split()


def _lowered(message: str) -> str:
    return message.rstrip(".")


def _existing(location: tuple[str | int, ...], values: Any) -> tuple[str | int, ...]:
    """The part of pydantic's location that is a place in the configuration."""
    for length, key in enumerate(location):
        inside = isinstance(values, dict) and key in values
        inside = inside or (isinstance(values, list) and isinstance(key, int) and key < len(values))
        if not inside:
            return location[:length]
        values = values[key]
    return location


def _wrong(
    path: tuple[str | int, ...], values: Mapping[str, Any], hints: Mapping[str, Any], entry: Mapping[str, Any]
) -> str:
    value: Any = values
    for key in path:
        value = value[key]
    if entry["type"] == "value_error":
        return _lowered(str(entry["ctx"]["error"]))
    annotation = hints[str(path[0])] if len(path) == 1 else _element(hints[str(path[0])])
    return f"{shown(value)} is not {expected(annotation)}{_advice(value, annotation)}"


def _element(annotation: Any) -> Any:
    """The type inside a list or mapping type."""
    for part in _parts(annotation):
        arguments = [a for a in get_args(part) if a is not Ellipsis]
        if arguments and get_origin(part) is not Literal:
            return arguments[-1]
    return annotation


def _parts(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in _parts(part)]
    return [annotation]


def _choices(annotation: Any) -> list[str]:
    """The fixed words that a type allows."""
    literals = (part for part in _parts(annotation) if get_origin(part) is Literal)
    return [str(word) for part in literals for word in get_args(part)]


def expected(annotation: Any) -> str:
    """A type, in words.

    Examples
    --------
    >>> expected(int | tuple[int, ...] | Literal["auto"])
    'auto, a whole number or a list of whole numbers'
    >>> expected(Literal["lz4", "zstd"]), expected(tuple[float, float]), expected(str | None)
    ('lz4 or zstd', 'a list of 2 numbers', 'text')
    """
    phrases = _choices(annotation)
    for part in _parts(annotation):
        if part is not type(None) and get_origin(part) is not Literal:
            phrases.append(_phrase(part))
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]])) if phrases else "null"


def _phrase(part: Any) -> str:
    arguments = get_args(part)
    if get_origin(part) is tuple:
        count = "" if Ellipsis in arguments else f"{len(arguments)} "
        return f"a list of {count}{_PLURALS.get(arguments[0], 'values')}"
    if get_origin(part) is list:
        return f"a list of {_PLURALS.get(arguments[0], 'values')}"
    if part in _WORDS:
        return _WORDS[part]
    return "a mapping" if arguments else getattr(part, "__name__", str(part))


def _advice(value: Any, annotation: Any) -> str:
    """What was probably meant."""
    parts = _parts(annotation)
    if isinstance(value, str):
        if bool in parts and value.lower() in _OLD_BOOLEANS:
            return f"; in YAML 1.2 that is text: write {json.dumps(_OLD_BOOLEANS[value.lower()])}"
        if {int, float} & set(parts) and _is_number(value):
            return "; write it without quotes"
        word = _near_choice(value, _choices(annotation))
        return f"; did you mean {word}?" if word else ""
    if isinstance(value, float) and int in parts and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, int | float) and str in parts:
        return "; put it in quotes if it is meant as text"
    return ""


def _near_choice(value: str, choices: list[str]) -> str | None:
    """Words of a fixed list are short: the bar for a likeness is lower than for keys."""
    found = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    return found[0] if found else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
