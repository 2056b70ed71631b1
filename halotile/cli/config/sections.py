"""The parts of a configuration, checked against the dataclass of its job.

The file is a ``version``, a kind of ``job``, and that job's parts. The schema is the job's own
dataclass; the options of a named choice are checked against the class that the name refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.cli.config.choices import read_choice, read_part
from halotile.cli.config.findings import Findings
from halotile.cli.config.kinds import HEAD, VERSION, JobKeys, is_named, keys_of_job
from halotile.cli.config.problems import ConfigProblem
from halotile.cli.config.yaml_source import Document
from halotile.errors import HalotileError
from halotile.graphs.kinds.finder import find_kind, kind_names
from halotile.graphs.kinds.sections import Cluster, Job
from halotile.graphs.rules.check import checks_of, common_checks, credentials_in, of_section, rules_of
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules
from halotile.graphs.rules.keys import faults_in, keys_of, taken, unknown
from halotile.graphs.words import KeyPath, nearest, shown
from halotile.tasks.options import required_keys

FLAGS = {"allow_import": "a file cannot allow itself to run code; add --allow-import to the command"}


def check_config(
    document: Document, base: Path, *, makes_data: bool = False
) -> tuple[Job | None, list[ConfigProblem]]:
    """Return the job that a document describes, or every problem in it.

    Parameters
    ----------
    document : Document
        The document as read from a file, with overrides from the command line.
    base : Path
        The folder that relative paths start from.
    makes_data : bool
        The measurements will be written by the job.
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
            return keys_of_job(kind)
        except HalotileError as error:
            findings.fault(("job",), str(error))
            return None
    if kind is None:
        findings.fault(("job",), f"missing; write {' or '.join(f'`job: {name}`' for name in kinds)}")
        return max(map(keys_of_job, kinds), key=lambda keys: len({*keys.keys} & tree.keys()))
    near = nearest(str(kind), kinds)
    hint = f"did you mean {near}?" if near else f"write one of {', '.join(kinds)}"
    findings.fault(("job",), f"no job is called {shown(kind)}; {hint}")
    return keys_of_job(near) if near else None


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
        self.denoiser: Any = None
        """The denoiser that the section of that name describes."""

    def parts(self) -> dict[str, Any]:
        """Return the parts of the job; those that are wrong or left out are missing."""
        self._unknown_parts()
        built = {name: self._section(name, schema) for name, schema in self.kind.sections.items()}
        built |= {name: self._list(name, schema) for name, schema in self.kind.lists.items()}
        built = {name: part for name, part in built.items() if part is not None} | self._values()
        self._check_rules(built)
        return built

    def _unknown_parts(self) -> None:
        for key in self.tree:
            if key in FLAGS:
                self.found.fault((key,), FLAGS[key])
            elif key not in self.kind.keys and key not in HEAD:
                self.found.fault((key,), self._elsewhere(key) or unknown(key, [*HEAD, *self.kind.keys]))

    def _key_of(self, part: str) -> str:
        """Return the key that a part is written under: the content of a misspelt section is checked as well."""
        keys = self.kind.keys
        strange = (key for key in self.tree if key not in (*keys, *HEAD, *FLAGS))
        misspelt = next((key for key in strange if nearest(key, keys) == part), part)
        return part if part in self.tree else misspelt

    def _elsewhere(self, key: str) -> str | None:
        """Return the message for a key that a section has, where it is unknown."""
        places = [f"{name}.{key}" for name, schema in self.kind.sections.items() if key in keys_of(schema)]
        return f"unknown key; did you mean {' or '.join(places)}?" if places else None

    def _section(self, section: str, schema: type) -> Any:
        """Return one section as its dataclass, or None where it has faults or is left out."""
        key, first = self.written[section], next(iter(keys_of(schema)))
        values = self.tree.get(key)
        if values is None:
            if self.kind.requires(section):
                self.found.fault((key,), f"missing; write `{section}: {{{first}: ...}}`")
            return None
        if not isinstance(values, dict):
            instead = f"{section}: {{{first}: {shown(values)}}}"
            self.found.fault((key,), f"{shown(values)} is not a section; write `{instead}`")
            return None
        return self._part((key,), section, schema, values)

    def _part(self, place: KeyPath, section: str, schema: Any, values: Mapping[str, Any]) -> Any:
        """Return a section, or an entry of a list, as its dataclass; None where it has faults."""
        checks = of_section(self.value_checks, section)
        if not is_named(schema):
            keys = keys_of(schema)
            resolved = self.found.with_paths(place, keys, values)
            return read_part(self.found, place, schema, keys, values, resolved, checks, self._elsewhere)
        chosen = read_choice(self.found, place, schema, values, checks)
        if section == "denoiser":
            self.denoiser = chosen.built if chosen else None
        if chosen is None or (section in self.kind.lists and self.found.is_wrong(place)):
            return None
        # Rules of its other keys find their faults as well.
        right = {key for key in chosen.written if not self.found.is_wrong((*place, key))}
        return schema.of(
            {key: value for key, value in chosen.written.items() if key in right or key == "name"}
        )

    def _list(self, name: str, schema: type) -> Any:
        """Return the entries of a list, or None where one of them is wrong."""
        key = self.written[name]
        values = self.tree.get(key)
        shown_keys = ("name", "data") if is_named(schema) else required_keys(schema)
        entry = f"- {{{', '.join(f'{field}: ...' for field in keys_of(schema) if field in shown_keys)}}}"
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
            if isinstance(value, dict):
                entries.append(self._part((key, number), name, schema, value))
            else:
                self.found.fault((key, number), f"{shown(value)} is not a mapping; write `{entry}`")
        return None if self.found.is_wrong((key,)) else tuple(entries)

    def _values(self) -> dict[str, Any]:
        """Return the values outside all sections that are right, with the defaults of those that are left out."""
        keys = self.kind.values
        given = {
            name: self.tree[key] for name in keys if self.tree.get(key := self.written[name]) is not None
        }
        faults = faults_in(keys, given, of_section(self.value_checks, ""))
        for (name, *rest), message in faults.items():
            self.found.fault((self.written[str(name)], *rest), message)
        wrong = {place[0] for place in faults}
        given = {name: kind.field.default for name, kind in keys.items()} | self.found.with_paths(
            (), keys, given, self.written
        )
        return {name: taken(value, keys[name].type) for name, value in given.items() if name not in wrong}

    def _check_rules(self, built: Mapping[str, Any]) -> None:
        """Record the faults of parts that do not agree; a rule of a part that is wrong itself is skipped."""
        known_parts = dict(built)
        for name, schema in self.kind.sections.items():
            if self.tree.get(self.written[name]) is None and not self.kind.requires(name):
                known_parts[name] = schema()
        if known_parts.pop("denoiser", None) is not None and self.denoiser is not None:
            known_parts["denoiser"] = self.denoiser
        for (part, *rest), message in apply_rules(self.rules, known_parts).items():
            path = (self.written[str(part)], *rest)
            if not self.found.is_wrong(path[:2]):
                self.found.fault(path, message)
