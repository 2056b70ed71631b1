"""The configuration as a JSON Schema, so that an editor can complete and check it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile import registry
from halotile.cli.sections import JOBS, NAMED, VERSION, JobKind
from halotile.errors import HalotileError
from halotile.graphs.checks import CHECKS, Above, AtLeast

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """The schema of every kind of job, with the options of every installed denoiser.

    Examples
    --------
    >>> schema = config_schema()
    >>> schema["properties"]["job"]["enum"]
    ['denoise']
    """
    kinds = [_job_schema(kind) for kind in JOBS.values()]
    common = {
        "version": {"const": VERSION, "description": "Version of this format."},
        "job": {"enum": list(JOBS), "description": "Kind of job."},
    }
    if len(kinds) == 1:
        (only,) = kinds
        only["properties"] = common | only["properties"]
        return {"$schema": DIALECT, "title": "halotile job", "type": "object"} | only
    for name, kind in zip(JOBS, kinds, strict=True):
        kind["properties"] = common | {"job": {"const": name}} | kind["properties"]
    return {
        "$schema": DIALECT,
        "title": "halotile job",
        "type": "object",
        "properties": common,
        "anyOf": kinds,
    }


def _job_schema(kind: JobKind) -> dict[str, Any]:
    required = [section for section in kind.sections if kind.requires(section)]
    return {
        "description": (kind.schema.__doc__ or "").strip().splitlines()[0],
        "properties": {
            section: _section_schema(section, schema) for section, schema in kind.sections.items()
        },
        "required": ["version", "job", *required],
        "additionalProperties": False,
    }


def _section_schema(section: str, kind: type) -> dict[str, Any]:
    if kind in NAMED:
        choices = [_choice_schema(NAMED[kind], name) for name in registry.names(NAMED[kind])]
        return {
            "description": (kind.__doc__ or "").strip(),
            "type": "object",
            "required": ["name"],
            "anyOf": [choice for choice in choices if choice],
        }
    made = _inlined(kind)
    for key, entry in made["properties"].items():
        _bound(entry, CHECKS.get((section, key)))
    return made


def _bound(entry: dict[str, Any], check: object) -> None:
    """Write what a check wants of a number beside its type, wherever that stands."""
    if entry.get("type") in ("integer", "number"):
        if isinstance(check, AtLeast):
            entry["minimum"] = check.least
        elif isinstance(check, Above):
            entry["exclusiveMinimum"] = check.bound
    for inner in (*entry.get("anyOf", ()), entry.get("items")):
        if isinstance(inner, dict):
            _bound(inner, check)


def _choice_schema(kind: str, name: str) -> dict[str, Any] | None:
    """One named choice with its options; a plug-in that cannot be loaded is left out."""
    try:
        declared = registry.find(kind, name).DENOISER
    except HalotileError:
        return None
    schema = _inlined(declared)
    description = (declared.__doc__ or name).strip().splitlines()[0]
    return schema | {
        "title": name,
        "description": description,
        "properties": {"name": {"const": name, "description": description}} | schema.get("properties", {}),
        "required": ["name", *schema.get("required", [])],
        "additionalProperties": False,
    }


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
