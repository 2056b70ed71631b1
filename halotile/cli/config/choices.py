"""A name with its options, checked against the class that the name refers to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halotile.cli.config.fields import check_fields, field_types
from halotile.cli.config.findings import Findings, missing
from halotile.cli.config.problems import KeyPath
from halotile.errors import HalotileError
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.words import expected, nearest, shown


@dataclass(frozen=True)
class Chosen:
    """A name, the keys written beside it, and the resulting object: None where there is a fault."""

    name: str
    values: Mapping[str, Any]
    declared: Any

    def as_part(self, schema: Any) -> Any:
        """Return it as a part of a job: an instance of the class of the choice."""
        return schema.of({"name": self.name, **self.values})


def read_choice(
    found: Findings,
    path: KeyPath,
    choice: type[NamedChoice],
    values: Mapping[str, Any],
    *,
    is_nested: bool = False,
) -> Chosen | None:
    """Read the choice in a mapping, with absolute paths; None where it holds nothing that could be checked."""
    key = "name" if "name" in values else next((k for k in values if nearest(k, ["name"])), "name")
    if key != "name":
        found.fault((*path, key), "unknown key; did you mean name?")
    name = _name(found, (*path, key), choice, values.get(key, getattr(choice, "name", None)))
    declared = _declared(found, (*path, key), choice, name) if name is not None else None
    if name is None or declared is None:
        return None
    beside = {option: value for option, value in values.items() if option != key}
    if choice.differs:
        from halotile.graphs.rules.written_options import as_written, written_form

        written = as_written(declared) if is_nested else written_form(choice, declared)
        beside = _with_files(found, path, choice, declared, beside)
    else:
        written, beside = declared, _with_weights(found, declared, beside)
    built, faults = check_fields(written, beside)
    for place, message in faults:
        if len(place) == 1 and place[0] not in field_types(written):
            from halotile.graphs.rules.written_options import fault_of_option

            message = fault_of_option(choice, name, str(place[0])) or message
        found.fault((*path, *place), message)
    for file in built.files() if hasattr(built, "files") else ():
        if not os.path.exists(file):
            option = next((option for option in beside if str(beside[option]) == str(file)), "")
            found.fault((*path, option) if option else path, missing(file))
    return Chosen(name, beside, built)


def _name(findings: Findings, path: KeyPath, choice: type[NamedChoice], name: Any) -> str | None:
    accepted = choice.accepted()
    one_of = f"write one of {', '.join(accepted)}"
    if name is None:
        findings.fault((*path[:-1], "name"), f"missing; {one_of}")
    elif not isinstance(name, str):
        findings.fault(path, f"{shown(name)} is not {expected(str)}; {one_of}")
    elif name not in accepted:
        near = nearest(name, accepted, likeness=0.6)  # the names are short
        findings.fault(
            path, f"no {choice.word()} is called {name}; " + (f"did you mean {near}?" if near else one_of)
        )
        return near
    else:
        return name
    return None


def _declared(findings: Findings, path: KeyPath, choice: type[NamedChoice], name: str) -> type | None:
    try:
        return choice.declared(name)
    except HalotileError as error:
        findings.fault(path, str(error))
    except AttributeError:
        findings.fault(path, f"the plug-in {name} declares no {choice.attribute}; repair or uninstall it")
    return None


def _with_weights(findings: Findings, declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a denoiser, with absolute paths."""
    files = path_fields(declared)
    return {
        key: findings.absolute(value) if key in files and isinstance(value, str) else value
        for key, value in values.items()
    }


def path_fields(schema: type) -> set[str]:
    """Return the options that name files: a relative path starts from the configuration's folder."""
    return {name for name, kind in field_types(schema).items() if name == "weights" or "Path" in str(kind)}


def _with_files(
    findings: Findings,
    path: KeyPath,
    choice: type[NamedChoice],
    declared: type,
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the keys of a choice, with absolute paths of its input files; nested choices are checked."""
    from halotile.graphs.rules.written_options import stand_ins

    meant = stand_ins(declared) | {"data": "array"}
    resolved = dict(values)
    for key, value in values.items():
        place = (*path, key)
        if meant.get(key) == "operators":
            resolved[key] = _nested(findings, place, choice, value)
        elif meant.get(key) == "denoiser":
            resolved[key] = _nested_denoiser(findings, place, value)
        elif key in meant:
            resolved[key] = findings.read(place, value)
        elif isinstance(value, dict):
            resolved[key] = {
                inner: findings.read((*place, inner), part) if str(part).endswith(".npy") else part
                for inner, part in value.items()
            }
    return resolved


def _nested_denoiser(findings: Findings, path: KeyPath, value: Any) -> Any:
    """Return a denoiser among the options as a mapping."""
    if not isinstance(value, dict):
        findings.fault(path, f"{shown(value)} is not a mapping; write `{path[-1]}: {{name: {shown(value)}}}`")
        return {}
    chosen = read_choice(findings, path, DenoiserChoice, value)
    return {"name": chosen.name, **chosen.values} if chosen else value


def _nested(findings: Findings, path: KeyPath, choice: type[NamedChoice], values: Any) -> Any:
    """Return the operators inside another operator, as mappings."""
    if not isinstance(values, list):
        return values
    mappings = []
    for number, value in enumerate(values):
        place = (*path, number)
        if not isinstance(value, dict):
            findings.fault(place, f"{shown(value)} is not a mapping; write `{{name: ..., ...}}`")
            continue
        chosen = read_choice(findings, place, choice, value, is_nested=True)
        mappings.append({"name": chosen.name, **chosen.values} if chosen else value)
    return mappings
