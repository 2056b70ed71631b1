"""A part of a configuration at its place: a section, or a name with its options, checked against the class of the name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from halotile.cli.config.findings import Findings, missing
from halotile.errors import HalotileError
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.rules.keys import Keys, build, fault_of_option, faults_in, stand_ins, written_keys
from halotile.graphs.words import KeyPath, expected, nearest, shown

Checks = Mapping[str, Check]


def read_part(
    found: Findings,
    path: KeyPath,
    kind: type,
    keys: Keys,
    values: Mapping[str, Any],
    resolved: Mapping[str, Any],
    checks: Checks,
    elsewhere: Callable[[str], str | None],
) -> Any:
    """Return values at a place, ``resolved`` to absolute paths, as an instance of a class, or None where they have faults."""
    built, faults = build(kind, keys, resolved, faults_in(keys, values, checks, elsewhere))
    for place, message in faults.items():
        found.fault((*path, *place), message)
    return built


@dataclass(frozen=True)
class Chosen:
    """A choice as a mapping with absolute paths, and the object that it was tried with: None where there is a fault."""

    written: Mapping[str, Any]
    built: Any


def read_choice(
    found: Findings,
    path: KeyPath,
    choice: type[NamedChoice],
    values: Mapping[str, Any],
    checks: Checks,
    *,
    is_nested: bool = False,
) -> Chosen | None:
    """Read the choice in a mapping; None where it holds nothing that could be checked."""
    key = "name" if "name" in values else next((k for k in values if nearest(k, ["name"])), "name")
    if key != "name":
        found.fault((*path, key), "unknown key; did you mean name?")
    name = _name(found, (*path, key), choice, values.get(key, getattr(choice, "name", None)))
    declared = _declared(found, (*path, key), choice, name) if name is not None else None
    if name is None or declared is None:
        return None
    keys = written_keys(declared, None if is_nested else choice)
    beside = {option: value for option, value in values.items() if option != key}
    resolved = found.with_paths(path, keys, _with_nested(found, path, choice, declared, beside))
    elsewhere = partial(fault_of_option, choice, name)
    built = read_part(found, path, declared, keys, beside, resolved, checks, elsewhere)
    for file in built.files() if hasattr(built, "files") else ():
        if not os.path.exists(file):
            option = next((option for option in resolved if str(resolved[option]) == str(file)), "")
            found.fault((*path, option) if option else path, missing(file))
    return Chosen({"name": name, **resolved}, built)


def _name(found: Findings, path: KeyPath, choice: type[NamedChoice], name: Any) -> str | None:
    accepted = choice.accepted()
    one_of = f"write one of {', '.join(accepted)}"
    if name is None:
        found.fault((*path[:-1], "name"), f"missing; {one_of}")
    elif not isinstance(name, str):
        found.fault(path, f"{shown(name)} is not {expected(str)}; {one_of}")
    elif name not in accepted:
        near = nearest(name, accepted, likeness=0.6)  # the names are short
        hint = f"did you mean {near}?" if near else one_of
        found.fault(path, f"no {choice.word()} is called {name}; {hint}")
        return near
    else:
        return name
    return None


def _declared(found: Findings, path: KeyPath, choice: type[NamedChoice], name: str) -> type | None:
    try:
        return choice.declared(name)
    except HalotileError as error:
        found.fault(path, str(error))
    except AttributeError:
        found.fault(path, f"the plug-in {name} declares no {choice.attribute}; repair or uninstall it")
    return None


def _with_nested(
    found: Findings, path: KeyPath, choice: type[NamedChoice], declared: type, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a choice, with the choices among them checked, and absolute paths in these and in mappings."""
    kinds, resolved = stand_ins(declared), dict(values)
    for key, value in values.items():
        place = (*path, key)
        if kinds.get(key) == "denoiser":
            resolved[key] = _nested(found, place, DenoiserChoice, value)
        elif kinds.get(key) == "operators" and isinstance(value, list):
            resolved[key] = [_nested(found, (*place, n), choice, entry) for n, entry in enumerate(value)]
        elif isinstance(value, dict) and choice is not DenoiserChoice:
            resolved[key] = {
                inner: found.read((*place, inner), part) if str(part).endswith(".npy") else part
                for inner, part in value.items()
            }
    return resolved


def _nested(found: Findings, path: KeyPath, choice: type[NamedChoice], value: Any) -> Any:
    """Return a choice among the options of another as a mapping."""
    if not isinstance(value, dict):
        name = value if isinstance(value, str) else "..."
        found.fault(path, f"{shown(value)} is not a mapping; write `{{name: {name}, ...}}`")
        return value
    chosen = read_choice(found, path, choice, value, {}, is_nested=True)
    return chosen.written if chosen else value
