"""The configuration as a JSON Schema, so that an editor can complete and check it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from halotile.cli.config.kinds import VERSION, JobKeys, is_named, keys_of
from halotile.errors import HalotileError
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.finder import find_kind, kind_names
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.rules.check import checks_of
from halotile.graphs.rules.values import Above, AtLeast, Named
from halotile.graphs.rules.written_options import stand_ins, written_form
from halotile.tasks.options import job_key

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the schema of every kind of job, with the options of all installed plug-ins.

    Examples
    --------
    >>> schema = config_schema()
    >>> "denoise" in schema["properties"]["job"]["enum"]
    True
    """
    job_names = kind_names()
    kinds = [_job_schema(name, keys_of(name)) for name in job_names]
    common = {
        "version": {"const": VERSION, "description": "Version of this format."},
        "job": {"enum": job_names, "description": "Kind of job."},
    }
    return {
        "$schema": DIALECT,
        "title": "halotile job",
        "type": "object",
        "properties": common,
        "anyOf": kinds,
    }


def _job_schema(name: str, keys: JobKeys) -> dict[str, Any]:
    checks = checks_of(find_kind(name))
    parts = {section: _section_schema(section, schema, checks) for section, schema in keys.sections.items()}
    for listed, schema in keys.lists.items():
        entry = _section_schema(listed, schema, checks)
        parts[listed] = {
            "description": entry["description"],
            "type": "array",
            "minItems": 1,
            "items": entry,
        }
    if keys.values is not None:
        described = _attribute_docs(keys.schema)
        values = _section_schema("", keys.values, checks)["properties"]
        parts |= {key: {"description": described.get(key, ""), **entry} for key, entry in values.items()}
    return {
        "title": name,
        "description": (keys.schema.__doc__ or "").strip().splitlines()[0],
        "properties": {"version": {"const": VERSION}, "job": {"const": name}} | parts,
        "required": ["version", "job", *(part for part in keys.keys if keys.requires(part))],
        "additionalProperties": False,
    }


def _attribute_docs(job: type) -> dict[str, str]:
    """Return the strings below the fields of a job, by name."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(job.__mro__)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                docs[ast.unparse(field.target)] = " ".join(str(text).split())
    return docs


def _section_schema(section: str, schema: type, checks: Mapping[tuple[str, str], Check]) -> dict[str, Any]:
    if is_named(schema):
        choices = [_choice_schema(section, schema, name, checks) for name in schema.accepted()]
        return {
            "description": (schema.__doc__ or "").strip(),
            "type": "object",
            **({} if hasattr(schema, "name") else {"required": ["name"]}),
            "anyOf": [choice for choice in choices if choice],
        }
    section_schema = _inlined(schema)
    for key, entry in section_schema["properties"].items():
        _add_bounds(entry, checks.get((section, key)))
    return section_schema


def _add_bounds(entry: dict[str, Any], check: object) -> None:
    """Write the bounds that a check sets for a number beside its type, at every level of the entry."""
    if entry.get("type") in ("integer", "number"):
        if isinstance(check, AtLeast):
            entry["minimum"] = check.least
        elif isinstance(check, Above):
            entry["exclusiveMinimum"] = check.bound
    if entry.get("type") == "string" and isinstance(check, Named):
        entry["enum"] = check.names
    for inner in (*entry.get("anyOf", ()), entry.get("items")):
        if isinstance(inner, dict):
            _add_bounds(inner, check)


def _choice_schema(
    section: str, choice: type[NamedChoice], name: str, checks: Mapping[tuple[str, str], Check]
) -> dict[str, Any] | None:
    """Return the schema of one named choice with its options; a plug-in that cannot be loaded is left out."""
    try:
        declared = choice.declared(name)
    except (HalotileError, AttributeError):
        return None
    schema = _inlined(written_form(choice, declared))
    described = parameters_of(declared) | _attribute_docs(choice)
    for key, entry in schema["properties"].items():
        entry.setdefault("description", described.get(key, ""))
        _add_bounds(entry, checks.get((section, key)))
    nested = stand_ins(declared) if choice.differs else {}
    for key in (key for key, kind in nested.items() if kind == "denoiser"):
        described_key = schema["properties"][key]["description"]
        schema["properties"][key] = _section_schema(key, DenoiserChoice, checks) | {
            "description": described_key
        }
    description = (declared.__doc__ or name).strip().splitlines()[0]
    return schema | {
        "title": name,
        "description": description,
        "properties": {"name": {"const": name, "description": description}} | schema["properties"],
        "required": [*([] if hasattr(choice, "name") else ["name"]), *schema.get("required", [])],
        "additionalProperties": False,
    }


def parameters_of(kind: type) -> dict[str, str]:
    """Return the descriptions of parameters in the docstring of a class.

    Examples
    --------
    >>> from halotile.tasks.operators.downsample import Downsample
    >>> parameters_of(Downsample)["factor"]
    'Pixels of the image for each pixel of the measurement, along y and x.'
    """
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^(\w+) : .*\n((?:(?: .*)?\n?)*)", section[1] if section else "", re.MULTILINE)
    return {job_key(name): " ".join(body.split()) for name, body in entries}


def _inlined(schema: type) -> dict[str, Any]:
    """Return the schema of one dataclass, without titles that only repeat its keys."""
    from pydantic import TypeAdapter

    inlined = TypeAdapter(schema).json_schema()
    # The rest of the docstring is for programmers; editors show this line.
    inlined["description"] = (schema.__doc__ or "").strip().splitlines()[0] if schema.__doc__ else ""
    properties: Mapping[str, dict[str, Any]] = inlined.get("properties", {})
    for field in properties.values():
        field.pop("title", None)
        if "description" in field:
            field["description"] = " ".join(field["description"].split())
    return inlined
