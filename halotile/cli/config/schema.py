"""The configuration as a JSON Schema, so that an editor can complete and check it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from halotile.cli.config.kinds import JOBS, NAMED, VERSION, JobKind, named_in
from halotile.cli.config.kinds import Named as NamedPart
from halotile.errors import HalotileError
from halotile.graphs.rules.values import CHECKS, Above, AtLeast, Named
from halotile.tasks.options import job_key

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """The schema of every kind of job, with the options of whatever is installed.

    Examples
    --------
    >>> schema = config_schema()
    >>> schema["properties"]["job"]["enum"]
    ['denoise', 'reconstruct']
    """
    kinds = [_job_schema(name, kind) for name, kind in JOBS.items()]
    common = {
        "version": {"const": VERSION, "description": "Version of this format."},
        "job": {"enum": list(JOBS), "description": "Kind of job."},
    }
    return {
        "$schema": DIALECT,
        "title": "halotile job",
        "type": "object",
        "properties": common,
        "anyOf": kinds,
    }


def _job_schema(name: str, kind: JobKind) -> dict[str, Any]:
    parts = {section: _section_schema(section, schema) for section, schema in kind.sections.items()}
    parts |= {listed: _list_schema(listed, schema) for listed, schema in kind.lists.items()}
    if kind.values is not None:
        parts |= _section_schema("", kind.values)["properties"]
    return {
        "title": name,
        "description": (kind.schema.__doc__ or "").strip().splitlines()[0],
        "properties": {"version": {"const": VERSION}, "job": {"const": name}} | parts,
        "required": ["version", "job", *(part for part in kind.keys if kind.requires(part))],
        "additionalProperties": False,
    }


def _list_schema(name: str, schema: type) -> dict[str, Any]:
    entry = _section_schema(name, schema)
    return {"description": entry["description"], "type": "array", "minItems": 1, "items": entry}


def _section_schema(section: str, schema: type) -> dict[str, Any]:
    if schema in NAMED:
        named = NAMED[schema]
        choices = [_choice_schema(section, named, name) for name in named.names]
        return {
            "description": (schema.__doc__ or "").strip(),
            "type": "object",
            "required": ["name"],
            "anyOf": [choice for choice in choices if choice],
        }
    made = _inlined(schema)
    for key, entry in made["properties"].items():
        _bound(entry, CHECKS.get((section, key)))
    for key, part in named_in(schema).items():
        described = made["properties"][key]["description"]
        choice = _section_schema(key, part) | {"description": described}
        made["properties"][key] = {"description": described, "anyOf": [choice, {"type": "null"}]}
    return made


def _bound(entry: dict[str, Any], check: object) -> None:
    """Write what a check wants of a number beside its type, wherever that stands."""
    if entry.get("type") in ("integer", "number"):
        if isinstance(check, AtLeast):
            entry["minimum"] = check.least
        elif isinstance(check, Above):
            entry["exclusiveMinimum"] = check.bound
    if entry.get("type") == "string" and isinstance(check, Named):
        entry["enum"] = check.names
    for inner in (*entry.get("anyOf", ()), entry.get("items")):
        if isinstance(inner, dict):
            _bound(inner, check)


def _choice_schema(section: str, named: NamedPart, name: str) -> dict[str, Any] | None:
    """One named choice with its options; a plug-in that cannot be loaded is left out."""
    try:
        declared = named.find(name)
    except (HalotileError, AttributeError):
        return None
    schema = _inlined(named.written(declared))
    described = parameters_of(declared)
    for key, entry in schema["properties"].items():
        entry.setdefault("description", _OWN.get(key) or described.get(key, ""))
        _bound(entry, CHECKS.get((section, key)))
    description = (declared.__doc__ or name).strip().splitlines()[0]
    return schema | {
        "title": name,
        "description": description,
        "properties": {"name": {"const": name, "description": description}} | schema["properties"],
        "required": ["name", *schema.get("required", [])],
        "additionalProperties": False,
    }


_OWN = {
    "data": "The measurement: anything that can be the input of a denoising job.",
    "noise_sigma": "Standard deviation of the noise of the measurement: it counts by 1 / noise_sigma².",
}
"""What operators have besides their options."""


def parameters_of(kind: type) -> dict[str, str]:
    """What the docstring of a class says of its parameters.

    Examples
    --------
    >>> from halotile.tasks.operators.downsample import Downsample
    >>> parameters_of(Downsample)["factor"]
    'How many pixels of the image, along y and x, one pixel of the measurement stands for.'
    """
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^(\w+) : .*\n((?:(?: .*)?\n?)*)", section[1] if section else "", re.MULTILINE)
    return {job_key(name): " ".join(body.split()) for name, body in entries}


def _inlined(schema: type) -> dict[str, Any]:
    """The schema of one dataclass, without the titles that only repeat its keys."""
    from pydantic import TypeAdapter

    made = TypeAdapter(schema).json_schema()
    # The rest of the docstring is for programmers; editors show this line.
    made["description"] = (schema.__doc__ or "").strip().splitlines()[0] if schema.__doc__ else ""
    properties: Mapping[str, dict[str, Any]] = made.get("properties", {})
    for field in properties.values():
        field.pop("title", None)
        if "description" in field:
            field["description"] = " ".join(field["description"].split())
    return made
