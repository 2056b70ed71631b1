"""The configuration as a JSON Schema, so that an editor can complete and check it."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from halotile.cli.config.sections import VERSION, JobKeys, keys_of_job
from halotile.errors import HalotileError
from halotile.graphs.kinds.base import Check, JobKind, find_kind, kind_names
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.rules.keys import Keys, keys_of, stand_ins, written_keys
from halotile.graphs.rules.values import Above, AtLeast, Named, checks_of
from halotile.graphs.words import entry_types, parts, value_type
from halotile.tasks.options import OwnPath, ReadPath, job_key

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: Mapping[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    ReadPath: {"type": "string", "format": "path"},
    OwnPath: {"type": "string", "format": "path"},
    Path: {"type": "string", "format": "path"},
}


def config_schema() -> dict[str, Any]:
    """Return the schema of every kind of job, with the options of all installed plug-ins.

    >>> schema = config_schema()
    >>> "denoise" in schema["properties"]["job"]["enum"]
    True
    """
    job_names = kind_names()
    return {
        "$schema": DIALECT,
        "title": "halotile job",
        "type": "object",
        "properties": {
            "version": {"const": VERSION, "description": "Version of this format."},
            "job": {"enum": job_names, "description": "Kind of job."},
        },
        "anyOf": [_job_schema(name, keys_of_job(name)) for name in job_names],
    }


def _job_schema(name: str, keys: JobKeys) -> dict[str, Any]:
    kind = find_kind(name)
    properties: dict[str, Any] = {"version": {"const": VERSION}, "job": {"const": name}}
    for section, schema in {**keys.sections, **keys.lists}.items():
        entry = properties[section] = _section_schema(section, schema, kind)
        if section in keys.lists:
            described = {"description": entry["description"]}
            properties[section] = {**described, "type": "array", "minItems": 1, "items": entry}
    for section, choice in keys.mappings.items():
        described = {"description": _attribute_docs(keys.schema)[section], "type": "object"}
        properties[section] = {**described, "additionalProperties": _section_schema(section, choice, kind)}
    for denoiser in properties["denoiser"]["anyOf"] if keys.mappings else ():
        for key, option in denoiser["properties"].items():
            if key != "name":
                of_channel = {part: option[part] for part in option if part not in ("description", "default")}
                each = {"type": "object", "additionalProperties": of_channel}, {"type": "array", "items": of_channel}
                rest = {part: option[part] for part in option if part not in of_channel}
                denoiser["properties"][key] = rest | {"anyOf": [of_channel, *each]}
    properties |= _properties(keys.values, _attribute_docs(keys.schema), checks_of("", keys.schema, kind))
    required = ["version", "job", *filter(keys.requires, keys.keys)]
    return _object(name, keys.schema, properties, required)


def _object(title: str, described: type, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "title": title,
        # The rest of the docstring is for programmers.
        "description": (described.__doc__ or title).strip().splitlines()[0],
        "type": "object",
        "properties": properties,
        "required": required,
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
                docs[job_key(ast.unparse(field.target))] = " ".join(str(text).split())
    return docs


def _section_schema(section: str, schema: type, kind: JobKind) -> dict[str, Any]:
    if issubclass(schema, NamedChoice):
        choices = [_choice_schema(section, schema, name, kind) for name in schema.accepted()]
        return {
            "description": (schema.__doc__ or "").strip(),
            "type": "object",
            **({} if hasattr(schema, "name") else {"required": ["name"]}),
            "anyOf": [choice for choice in choices if choice],
        }
    keys = keys_of(schema)
    properties = _properties(keys, _attribute_docs(schema), checks_of(section, schema, kind))
    return _object(schema.__name__, schema, properties, [key for key in keys if keys[key].is_required])


def _properties(keys: Keys, described: Mapping[str, str], checks: Mapping[str, Check]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key, kind in keys.items():
        description, usual = kind.field.metadata.get("description"), kind.field.default
        properties[key] = {
            "description": description or described.get(key, ""),
            **_type_schema(kind.type, checks.get(key)),
        }
        if usual is not dataclasses.MISSING:
            properties[key]["default"] = list(usual) if isinstance(usual, tuple) else usual
    return properties


def _type_schema(annotation: Any, check: Check | None = None) -> dict[str, Any]:
    """Return the schema of a type, with the bounds that a check sets for its numbers, and the names that it accepts."""
    schemas = [_part_schema(part, check) for part in parts(annotation)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _part_schema(part: Any, check: Check | None) -> dict[str, Any]:
    if kinds := entry_types(part, 0):
        entries, count = list(map(_type_schema, kinds)), len(kinds)
        return {"type": "array", "prefixItems": entries, "minItems": count, "maxItems": count}
    if kinds := entry_types(part, 1):
        return {"type": "array", "items": _type_schema(kinds[0], check)}
    if (kind := value_type(part)) is not None:
        return {"type": "object", "additionalProperties": _type_schema(kind) or True}
    words = list(get_args(part)) if get_origin(part) is Literal else []
    schema: dict[str, Any] = {"enum": words} if words else dict(_TYPES.get(part, {}))
    if part in (int, float) and isinstance(check, AtLeast):
        schema["minimum"] = check.least
    elif part in (int, float) and isinstance(check, Above):
        schema["exclusiveMinimum"] = check.bound
    elif part is str and isinstance(check, Named):
        schema["enum"] = check.names
    return schema


def _choice_schema(section: str, choice: type[NamedChoice], name: str, kind: JobKind) -> dict[str, Any] | None:
    """Return the schema of one named choice with its options; a plug-in that cannot be loaded is left out."""
    try:
        declared = choice.declared(name)
    except (HalotileError, AttributeError):
        return None
    keys = written_keys(declared, choice)
    described = _attribute_docs(choice) | _attribute_docs(declared) | parameters_of(declared)
    properties = _properties(keys, described, checks_of(section, choice, kind))
    for key in (key for key, written_as in stand_ins(declared).items() if written_as == "denoiser"):
        text = {"description": properties[key]["description"]}
        properties[key] = _section_schema(key, DenoiserChoice, kind) | text
    required = [*([] if hasattr(choice, "name") else ["name"]), *(key for key in keys if keys[key].is_required)]
    made = _object(name, declared, properties, required)
    made["properties"] = {"name": {"const": name, "description": made["description"]}} | properties
    return made


def parameters_of(kind: type) -> dict[str, str]:
    """Return the descriptions of parameters in the docstring of a class.

    >>> from halotile.tasks.operators.downsample import Downsample
    >>> parameters_of(Downsample)["factor"]
    'Pixels of the image for each pixel of the measurement, along y and x.'
    """
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^(\w+) : .*\n((?:(?: .*)?\n?)*)", section[1] if section else "", re.MULTILINE)
    return {job_key(name): " ".join(body.split()) for name, body in entries}
