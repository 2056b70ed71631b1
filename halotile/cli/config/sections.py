"""The parts of a configuration, checked against the dataclass of its job.

The file is a ``version``, a kind of ``job``, and that job's parts. The schema is the job's own
dataclass; the options of a named choice are checked against the class that the name refers to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from halotile.cli.config.choices import read_choice
from halotile.cli.config.fields import check_fields, field_types
from halotile.cli.config.findings import Findings
from halotile.cli.config.kinds import HEAD, VERSION, JobKeys, is_named, keys_of, paths_in
from halotile.cli.config.problems import ConfigProblem, KeyPath
from halotile.cli.config.yaml_source import Document
from halotile.errors import HalotileError
from halotile.graphs.kinds.finder import find_kind, kind_names
from halotile.graphs.kinds.sections import OWN, Cluster, Job
from halotile.graphs.rules.check import checks_of, common_checks, credentials_in, rules_of
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules
from halotile.graphs.words import nearest, shown
from halotile.tasks.options import required_keys

FLAGS = {"allow_import": "a file cannot allow itself to run code; add --allow-import to the command"}


def check_config(
    document: Document, base: Path, *, makes_data: bool = False
) -> tuple[Job | None, list[ConfigProblem]]:
    """Return the job that a document describes, or every problem in it.

    ``document``: document as read from a file, with overrides from the command line; ``base``: folder that relative paths start from; ``makes_data``:
    measurements will be written by the job.
    """
    findings = Findings(document, base, makes_data=makes_data)
    for place, message in credentials_in(document.tree):
        findings.fault(place, message)
    kind = _head(findings, document.tree)
    if kind is not None and find_kind(kind.schema.kind).makes_data:
        findings.makes_data = True
    check = _Check(findings, document.tree, kind) if kind else None
    parts = check.parts() if check else {}
    problems = findings.problems()
    return (kind.schema(**parts) if kind and not problems else None), problems


def check_cluster(document: Document, base: Path) -> tuple[Cluster | None, list[ConfigProblem]]:
    """Return the cluster section of a document, or every problem of that section; other sections are not checked."""
    findings = Findings(document, base)
    tree = {key: value for key, value in document.tree.items() if key == "cluster"}
    parts = _Check(findings, tree, JobKeys(Cluster, {"cluster": Cluster})).parts()
    problems = findings.problems()
    return (None if problems else parts.get("cluster", Cluster())), problems


def _head(findings: Findings, tree: Mapping[str, Any]) -> JobKeys | None:
    version, kind = tree.get("version"), tree.get("job")
    if "version" not in tree:
        findings.fault(("version",), f"missing; begin the file with `version: {VERSION}`")
    elif version != VERSION or isinstance(version, bool | float):
        findings.fault(("version",), f"{shown(version)} is not known here; write {VERSION}")
    kinds = kind_names()
    if isinstance(kind, str) and kind in kinds:
        try:
            return keys_of(kind)
        except HalotileError as error:
            findings.fault(("job",), str(error))
            return None
    if kind is None:
        findings.fault(("job",), f"missing; write {' or '.join(f'`job: {name}`' for name in kinds)}")
        return max(map(keys_of, kinds), key=lambda keys: len({*keys.keys} & tree.keys()))
    near = nearest(str(kind), kinds)
    hint = f"did you mean {near}?" if near else f"write one of {', '.join(kinds)}"
    findings.fault(("job",), f"no job is called {shown(kind)}; {hint}")
    return keys_of(near) if near else None


class _Check:
    """Goes through a document once and builds its parts."""

    def __init__(self, found: Findings, tree: dict[str, Any], kind: JobKeys) -> None:
        self.found = found
        job = find_kind(kind.schema.kind) if issubclass(kind.schema, Job) else None
        self.value_checks = checks_of(job) if job else common_checks(kind.sections)
        self.rules = rules_of(job) if job else OF_CLUSTERS
        self.tree = tree
        self.kind = kind
        self.written = {part: self._key_of(part) for part in kind.keys}
        """The key under which each part is written."""
        self.declared: dict[str, Any] = {}
        """Classes that the names in sections refer to, by registry word."""

    def parts(self) -> dict[str, Any]:
        """Return the parts of the job; those that are wrong or left out are missing."""
        self._unknown_parts()
        built = {name: self._section(name, schema) for name, schema in self.kind.sections.items()}
        built |= {name: self._list(name, schema) for name, schema in self.kind.lists.items()}
        values = self._values(self.kind.values) if self.kind.values else None
        plain = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)} if values else {}
        self._checks()
        self._check_rules(built, plain)
        return {key: value for key, value in built.items() if value is not None} | plain

    def _unknown_parts(self) -> None:
        for key in self.tree:
            if key in FLAGS:
                self.found.fault((key,), FLAGS[key])
            elif key not in self.kind.keys and key not in HEAD:
                self.found.fault((key,), self._unknown(key, [*HEAD, *self.kind.keys]))

    def _key_of(self, part: str) -> str:
        """Return the key that a part is written under: the content of a misspelt section is checked as well."""
        keys = self.kind.keys
        unknown = (key for key in self.tree if key not in (*keys, *HEAD, *FLAGS))
        misspelt = next((key for key in unknown if nearest(key, keys) == part), part)
        return part if part in self.tree else misspelt

    def _unknown(self, key: str, accepted: Iterable[str]) -> str:
        """Return the message for an unknown key: the key that was meant, here or in another section."""
        accepted, sections = list(accepted), self.kind.sections
        elsewhere = [f"{name}.{key}" for name, schema in sections.items() if key in field_types(schema)]
        meant = " or ".join(elsewhere) or nearest(key, accepted)
        return (
            f"unknown key; did you mean {meant}?"
            if meant
            else f"unknown key; write one of {', '.join(accepted)}"
        )

    def _section(self, section: str, schema: type) -> Any:
        """Return one section as its dataclass, or None where it has faults or is left out."""
        key = self.written[section]
        values = self.tree.get(key)
        first = next(iter(field_types(schema)))
        if values is None:
            if self.kind.requires(section):
                self.found.fault((key,), f"missing; write `{section}: {{{first}: ...}}`")
            return None
        if not isinstance(values, dict):
            instead = f"{section}: {{{first}: {shown(values)}}}"
            self.found.fault((key,), f"{shown(values)} is not a section; write `{instead}`")
            return None
        if is_named(schema):
            return self._choice((key,), section, schema, values)
        return self._fields((key,), schema, values)

    def _fields(self, place: KeyPath, schema: type, values: Mapping[str, Any]) -> Any:
        """Return values at a place as their dataclass, or None where they have faults."""
        built, faults = check_fields(schema, self._with_paths(place, schema, values))
        field_names = field_types(schema)
        for path, message in faults:
            unknown = len(path) == 1 and path[0] not in field_names
            self.found.fault(
                (*place, *path), self._unknown(str(path[0]), field_names) if unknown else message
            )
        return built

    def _choice(self, path: KeyPath, part: str, schema: type, values: Mapping[str, Any]) -> Any:
        chosen = read_choice(self.found, path, schema, values)
        if chosen is None:
            return None
        self.declared[part] = chosen.declared
        return chosen.as_part(schema)

    def _list(self, name: str, schema: type) -> Any:
        """Return the entries of a list, or None where one of them is wrong."""
        key = self.written[name]
        values = self.tree.get(key)
        shown_keys = ("name", "data") if is_named(schema) else required_keys(schema)
        entry = f"- {{{', '.join(f'{field}: ...' for field in field_types(schema) if field in shown_keys)}}}"
        if values is None:
            if self.kind.requires(name):
                self.found.fault((key,), f"missing; write `{name}:` and below it `{entry}`")
            return None
        if not isinstance(values, list):
            self.found.fault(
                (key,), f"{shown(values)} is not a list; write entries below it, such as `{entry}`"
            )
            return None
        entries = []
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                self.found.fault((key, number), f"{shown(value)} is not a mapping; write `{entry}`")
            elif is_named(schema):
                chosen = read_choice(self.found, (key, number), schema, value)
                entries.append(chosen.as_part(schema) if chosen and chosen.declared else None)
            else:
                entries.append(self._fields((key, number), schema, value))
        return None if self.found.is_wrong((key,)) else tuple(entries)

    def _values(self, schema: type) -> Any:
        """Return the values outside all sections, as their dataclass."""
        names = field_types(schema)
        keys = {self.written[name]: name for name in names if self.tree.get(self.written[name]) is not None}
        values = self._with_paths((), schema, {name: self.tree[key] for key, name in keys.items()})
        built, faults = check_fields(schema, values)
        for path, message in faults:
            self.found.fault((self.written[str(path[0])], *path[1:]), message)
        return built

    def _with_paths(self, path: KeyPath, schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with absolute paths, and record those that are read."""
        resolved = dict(values)
        for key, mark in paths_in(schema).items():
            value = values.get(key)
            if mark == OWN:
                resolved |= {key: self.found.absolute(value)} if isinstance(value, str) else {}
            elif isinstance(value, dict):
                resolved[key] = {
                    name: self.found.read((*path, key, name), file) for name, file in value.items()
                }
            elif key in values:
                # Outside sections the key may be misspelt; its file is checked nevertheless.
                resolved[key] = self.found.read((*path, key if path else self.written[key]), value)
        return resolved

    def _checks(self) -> None:
        """Record values that the types allow and the job does not."""
        for (section, key), check in self.value_checks.items():
            for path, value in self._places(section, key):
                if value is not None and not self.found.is_wrong(path) and (message := check(value)):
                    self.found.fault(path, message)

    def _places(self, section: str, key: str) -> Iterator[tuple[KeyPath, Any]]:
        """Yield the places of a key of a section, with its values."""
        if not section:
            if key in self.written:
                yield (self.written[key],), self.tree.get(self.written[key])
            return
        values = self.tree.get(self.written.get(section, ""))
        if isinstance(values, dict) and section in self.kind.sections:
            yield (self.written[section], key), values.get(key)
        elif isinstance(values, list) and section in self.kind.lists:
            for number, value in enumerate(values):
                if isinstance(value, dict):
                    yield (self.written[section], number, key), value.get(key)

    def _check_rules(self, built: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        """Record the faults of parts that do not agree."""
        known_parts = {**{name: part for name, part in built.items() if part is not None}, **plain}
        for name, schema in self.kind.sections.items():
            if self.tree.get(self.written[name]) is None and not self.kind.requires(name):
                known_parts[name] = schema()
        if "denoiser" in self.kind.sections:
            known_parts.pop("denoiser", None)
            if self.declared.get("denoiser") is not None:
                known_parts["denoiser"] = self.declared["denoiser"]
        for (part, *rest), message in apply_rules(self.rules, known_parts).items():
            path = (self.written[str(part)], *rest)
            if not self.found.is_wrong(path[:2]):
                self.found.fault(path, message)
