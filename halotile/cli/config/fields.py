"""Checks of one section of a configuration against its dataclass, with messages that use the configuration's keys."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from halotile.graphs.words import choices, expected, nearest, parts, shown
from halotile.tasks.options import description_of, job_key, required_keys

Fault = tuple[tuple[str | int, ...], str]
"""Place inside the section, and message."""

_STAND_INS: Mapping[Any, Any] = {int: 3, float: 1.0, str: "module:name", bool: False, Path: "file"}
"""Values that pass every check, for a required option that is wrong itself while the others are checked."""
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
    """Build a dataclass from values; where that fails, return everything that is wrong.

    Nothing is converted: the text "2" is not a number, and a number is not a text.

    Returns
    -------
    object or None
        An instance of ``schema``, or None when there are faults.
    list of (path, message)
        The faults.
    """
    hints = field_types(schema)
    unknown = [_unknown(key, hints) for key in values if key not in hints]
    known_values = {key: value for key, value in values.items() if key in hints}
    meant = {nearest(key, hints) for key in values if key not in hints} - known_values.keys()
    built, value_faults = _build(schema, known_values)
    # A misspelt key is one fault, not two.
    faults = unknown + [(path, message) for path, message in value_faults if not (path and path[0] in meant)]
    return (None if faults else built), faults


def _build(schema: type, values: Mapping[str, Any]) -> tuple[Any, list[Fault]]:
    """Return an instance, and every fault found while building it.

    A dataclass stops at the first option that it refuses. So that option is taken out, and the dataclass is
    built again from the rest, until no option is refused.
    """
    from pydantic import ValidationError

    hints, rest = field_types(schema), dict(values)
    faults: dict[tuple[str | int, ...], str] = {}
    wrong: set[str] = set()
    while True:
        try:
            # As JSON: there pydantic's strict mode still takes a list for a tuple.
            return _adapter(schema).validate_json(json.dumps(rest), strict=True), list(faults.items())
        except ValidationError as error:
            faults_now = {p: m for p, m in _merged(error, rest, schema).items() if not p or p[0] not in wrong}
        faults |= faults_now
        minded = {str(path[0]) for path in faults_now if path}
        if not minded:
            return None, list(faults.items())
        wrong |= minded
        rest = {key: value for key, value in rest.items() if key not in minded}
        rest |= {key: _stand_in(hints[key]) for key in minded & set(required_keys(schema))}


def _stand_in(annotation: Any) -> Any:
    return next((_STAND_INS[part] for part in parts(annotation) if part in _STAND_INS), None)


@functools.cache
def _adapter(schema: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the keys that a configuration may set, with their types."""
    hints = get_type_hints(schema)
    return {job_key(field.name): hints[field.name] for field in dataclasses.fields(schema) if field.init}


def _unknown(key: str, hints: Collection[str]) -> Fault:
    near = nearest(key, hints)
    if near:
        return (key,), f"unknown key; did you mean {near}?"
    advice = f"write one of {', '.join(hints)}" if hints else "there are no options"
    return (key,), f"unknown key; {advice}"


def _merged(error: Any, values: Mapping[str, Any], schema: type) -> dict[tuple[str | int, ...], str]:
    """Return one fault for each place: pydantic reports each branch of a union separately."""
    hints = field_types(schema)
    faults: dict[tuple[str | int, ...], str] = {}
    for entry in error.errors(include_url=False):
        location = tuple(entry["loc"])
        if not location:
            message = str(entry.get("ctx", {}).get("error", entry["msg"]))
            named = _named(message, hints)
            faults[(named,) if named else ()] = _lowered(message)
        elif entry["type"] == "missing":
            key = str(location[0])
            faults[location] = f"missing; write {description_of(schema, key) or expected(hints[key])}"
        else:
            path = _place_in_values(location, values)
            faults.setdefault(path, _type_fault(path, values, schema, entry))
    return faults


def _named(message: str, keys: Collection[str]) -> str | None:
    """Return the key that a message is about: the first key in it."""
    words = "".join(c if c.isalnum() or c == "_" else " " for c in message).split()
    return next((word for word in words if word in keys), None)


def _lowered(message: str) -> str:
    return message.rstrip(".")


def _place_in_values(location: tuple[str | int, ...], values: Any) -> tuple[str | int, ...]:
    """Return the part of pydantic's location that is a place in the configuration."""
    for length, key in enumerate(location):
        inside = isinstance(values, dict) and key in values
        inside = inside or (isinstance(values, list) and isinstance(key, int) and key < len(values))
        if not inside:
            return location[:length]
        values = values[key]
    return location


def _type_fault(
    path: tuple[str | int, ...], values: Mapping[str, Any], schema: type, entry: Mapping[str, Any]
) -> str:
    value: Any = values
    for key in path:
        value = value[key]
    if entry["type"] == "value_error":
        return _lowered(str(entry["ctx"]["error"]))
    annotation = field_types(schema)[str(path[0])]
    if len(path) > 1:
        annotation = _element(annotation)
    elif value is None:
        instead = "" if path[0] in required_keys(schema) else ", or leave the key out for its default"
        return f"is empty; write {expected(annotation)}{instead}"
    return f"{shown(value)} is not {expected(annotation)}{_advice(value, annotation)}"


def _element(annotation: Any) -> Any:
    """Return the type inside a list or mapping type."""
    for part in parts(annotation):
        arguments = [a for a in get_args(part) if a is not Ellipsis]
        if arguments and get_origin(part) is not Literal:
            return arguments[-1]
    return annotation


def _advice(value: Any, annotation: Any) -> str:
    """Return a hint at the value that was probably meant."""
    allowed = parts(annotation)
    if isinstance(value, str):
        if bool in allowed and value.lower() in _OLD_BOOLEANS:
            return f"; in YAML 1.2 that is text: write {json.dumps(_OLD_BOOLEANS[value.lower()])}"
        if {int, float} & set(allowed) and value.lower().strip("+-.") in ("nan", "inf", "infinity"):
            return ""
        if {int, float} & set(allowed) and _is_number(value):
            return "; write it without quotes"
        # Words of a fixed list are short: the threshold of similarity is lower than for keys.
        word = nearest(value, choices(annotation), likeness=0.5)
        return f"; did you mean {word}?" if word else ""
    if isinstance(value, float) and int in allowed and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, int | float) and str in allowed:
        return "; put it in quotes if it is meant as text"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
