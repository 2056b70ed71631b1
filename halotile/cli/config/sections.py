"""The parts of a configuration, checked against the dataclass of its job.

The file is a ``version``, a kind of ``job``, and that job's parts. The schema is the job's own
dataclass; the options of a named choice are checked against the class that the name refers to.
"""

import dataclasses
import functools
import glob
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from halotile.cli.config.yaml_source import ConfigProblem, Document
from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.kinds.base import Check, find_kind, kind_names
from halotile.graphs.kinds.sections import STEM, Cluster, DenoiserChoice, Job, NamedChoice, is_pattern
from halotile.graphs.rules.keys import (
    Key,
    Keys,
    build,
    fault_of_option,
    faults_in,
    keys_of,
    stand_ins,
    taken,
    unknown,
    written_keys,
)
from halotile.graphs.rules.keys import by_channel as options_by_channel
from halotile.graphs.rules.values import OF_CLUSTERS, apply_rules, checks_of, credentials_in, rules_of
from halotile.graphs.words import KeyPath, choices, expected, nearest, parts, shown, value_type
from halotile.storage.disk.place import broken_link
from halotile.tasks.options import OwnPath, ReadPath

VERSION = 1
HEAD = ("version", "job")
# Fields of a job that no file may set, with the message that says so.
FLAGS = dict.fromkeys(
    ("allow_import", "import_folder"), "a file cannot allow itself to run code; add --allow-import to the command"
)


@dataclass(frozen=True)
class JobKeys:
    """The keys at the top of a file of some kind."""

    schema: type[Any]  # dataclass of the job
    # sections, lists: its sections, each by its dataclass, and its lists, each by the dataclass of an entry
    sections: Mapping[str, type]
    lists: Mapping[str, type] = field(default_factory=dict)
    # its mappings of names, such as those of channels, to choices
    mappings: Mapping[str, type[NamedChoice]] = field(default_factory=dict)
    values: Keys = field(default_factory=dict)  # keys outside all sections

    @property
    def keys(self) -> list[str]:
        """Keys at the top of a file, after its head."""
        return [*self.sections, *self.lists, *self.mappings, *self.values]

    def requires(self, key: str) -> bool:
        """Return True where a key has to be written."""
        return any(name == key and kind.is_required for name, kind in keys_of(self.schema).items())


@functools.cache
def keys_of_job(name: str) -> JobKeys:
    """Return the keys of a kind of job: its own come first, and among these input and output.

    >>> keys_of_job("denoise").keys
    ['input', 'output', 'denoiser', 'tile', 'noise', 'run', 'cluster', 'channels']
    """
    job = find_kind(name).job
    keys, shared = keys_of(job), keys_of(Job)
    sections: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    mappings: dict[str, Any] = {}
    values: dict[str, Key] = {}
    first = ("input", "output", "denoiser")
    for key in sorted(keys, key=lambda key: (key in shared, first.index(key) if key in first else len(first))):
        hint = keys[key].type
        section = next((part for part in parts(hint) if dataclasses.is_dataclass(part)), None)
        entry = get_args(hint)[0] if get_origin(hint) is tuple else None
        if section is not None:
            sections[key] = section
        elif dataclasses.is_dataclass(entry):
            lists[key] = entry
        elif dataclasses.is_dataclass(named := value_type(hint)):
            mappings[key] = named
        elif key not in FLAGS:
            values[key] = keys[key]
    return JobKeys(job, sections, lists, mappings, values)


class Findings:
    """Collects faults, one for each key.

    Parameters
    ----------
    document : Document
        The document as read from a file, with overrides from the command line.
    base : Path
        The folder that relative paths start from.
    makes_data : bool
        The measurements will be written by the job: they need not exist.
    """

    def __init__(self, document: Document, base: Path, *, makes_data: bool = False) -> None:
        self.document = document
        self.base = Path(os.path.abspath(base))
        self.makes_data = makes_data
        self._problems = list(document.problems)
        self._files: dict[KeyPath, str] = {}

    def fault(self, path: KeyPath, message: str, error: type[HalotileError] = ConfigError) -> None:
        """Record a fault, unless its key has one already."""
        if all(problem.path != path for problem in self._problems):
            self._problems.append(ConfigProblem(self.document.place_of(path), path, message, error))

    def is_wrong(self, path: KeyPath) -> bool:
        """Return True where a key has a fault, or a value inside it."""
        return any(problem.path[: len(path)] == path for problem in self._problems)

    def read(self, path: KeyPath, file: Any) -> Any:
        """Record a file that is read; return its path, resolved if it is text, against the configuration's folder."""
        if not isinstance(file, str):
            return file
        self._files[path] = self.absolute(file)
        if glob.has_magic(file) and is_pattern(
            pattern := os.path.join(glob.escape(str(self.base)), os.path.expanduser(file))
        ):
            self._files[path] = pattern  # brackets in the folder's name are no pattern
        return self._files[path]

    def absolute(self, path: str) -> str:
        """Return a path resolved against the configuration's folder; addresses such as s3:// stay."""
        if "://" in path:
            return path
        resolved = self.base / os.path.expanduser(path)
        # Where a link comes before "..", only the file system can resolve the path.
        return os.path.realpath(resolved) if ".." in resolved.parts else str(resolved)

    def with_paths(
        self, path: KeyPath, keys: Keys, values: Mapping[str, Any], written: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the values at a place with absolute paths, and record those that are read.

        ``written``: keys that are misspelt in the file: their files are checked nevertheless.
        """
        resolved = dict(values)
        for key in (key for key in keys if key in values):
            value, allowed, place = values[key], parts(keys[key].type), (*path, (written or {}).get(key, key))
            if (OwnPath in allowed or Path in allowed) and isinstance(value, str):
                resolved[key] = self.absolute(value)
            elif ReadPath in allowed and value not in choices(keys[key].type):
                resolved[key] = self.read(place, value)
            elif Mapping[str, ReadPath] in allowed and isinstance(value, dict):
                resolved[key] = {name: self.read((*place, name), file) for name, file in value.items()}
        return resolved

    def built(self, path: KeyPath, kind: type, keys: Keys, values: Mapping[str, Any], faults: Any) -> Any:
        """Return values with absolute paths as an instance of a class; None where they have faults, which are recorded."""
        built, faults = build(kind, keys, values, faults)
        for place, message in faults.items():
            self.fault((*path, *place), message)
        return built

    def problems(self) -> list[ConfigProblem]:
        """Return all faults, with missing files, in the order of the document; the command line comes last."""
        outputs = {file for path, file in self._files.items() if self.makes_data and path[-1] == "data"}
        for path, file in self._files.items():
            if "://" not in file and file not in outputs and not _exists(file):
                self.fault(path, missing(file), InputError)
        return sorted(self._problems, key=_line)


def _exists(file: str) -> bool:
    """Return True for a file, for a pattern that matches one, and for a path that depends on it."""
    return STEM in file or os.path.exists(file) or is_pattern(file)


def missing(file: str | os.PathLike[str]) -> str:
    """Return the message that a file does not exist."""
    link = broken_link(file)
    return f"{file} does not exist: {link}. Correct it, or write another path" if link else f"{file} does not exist"


def _line(problem: ConfigProblem) -> int:
    line = problem.place.rpartition(":")[2]
    return int(line) if line.isdigit() else sys.maxsize


Checks = Mapping[str, Check]


def read_choice(
    found: Findings,
    path: KeyPath,
    choice: type[NamedChoice],
    values: Mapping[str, Any],
    checks: Checks,
    *,
    is_nested: bool = False,
    by_channel: bool = False,
) -> tuple[Mapping[str, Any] | None, Any]:
    """Return the choice in a mapping with absolute paths, and as an instance of its class; None for what is wrong.

    ``by_channel``: options may have a value for each channel; the instance is then that of the first.
    """
    key = "name" if "name" in values else next((k for k in values if nearest(k, ["name"])), "name")
    if key != "name":
        found.fault((*path, key), "unknown key; did you mean name?")
    name = _name(found, (*path, key), choice, values.get(key, getattr(choice, "name", None)))
    declared = _declared(found, (*path, key), choice, name) if name is not None else None
    if name is None or declared is None:
        return None, None
    keys = written_keys(declared, None if is_nested else choice)
    beside = {option: value for option, value in values.items() if option != key}
    if by_channel and (apart := options_by_channel(beside, keys)):
        return _read_apart(found, path, declared, keys, name, beside, apart)
    resolved = found.with_paths(path, keys, _with_nested(found, path, choice, declared, beside))
    elsewhere = partial(fault_of_option, choice, name)
    built = found.built(path, declared, keys, resolved, faults_in(keys, beside, checks, elsewhere))
    for file in built.files() if hasattr(built, "files") else ():
        if not os.path.exists(file):
            option = next((option for option in resolved if str(resolved[option]) == str(file)), "")
            found.fault((*path, option) if option else path, missing(file))
    return {"name": name, **resolved}, built


def _read_apart(
    found: Findings,
    path: KeyPath,
    declared: type,
    keys: Keys,
    name: str,
    values: Mapping[str, Any],
    apart: Mapping[str, Any],
) -> tuple[Mapping[str, Any] | None, Any]:
    """Return a choice with some options for each channel, as :func:`read_choice` does: every value is checked by itself."""
    resolved = found.with_paths(path, keys, {key: value for key, value in values.items() if key not in apart})
    elsewhere = partial(fault_of_option, DenoiserChoice, name)
    faults = faults_in(keys, values, elsewhere=elsewhere)
    faults = {place: message for place, message in faults.items() if place[0] not in apart}
    channels: dict[Any, dict[str, Any]] = {}
    for key, entries in apart.items():
        each = dict(enumerate(entries) if isinstance(entries, list) else entries)
        same = dict.fromkeys(each, keys[key])
        given = found.with_paths((*path, key), same, each)
        for place, message in faults_in(same, given).items():
            found.fault((*path, key, *place), message)
        resolved[key] = list(given.values()) if isinstance(entries, list) else given
        for who, value in given.items():
            channels.setdefault(who, {})[key] = value
    builts = []
    for who, own in channels.items():
        right = {key: value for key, value in own.items() if not found.is_wrong((*path, key, who))}
        common = {key: value for key, value in resolved.items() if key not in apart}
        built, wrong = build(declared, keys, common | right, faults)
        for place, message in wrong.items():
            found.fault((*path, *place[:1], *([who] if place[:1] and place[0] in own else []), *place[1:]), message)
        builts.append(built)
    return {"name": name, **{key: resolved[key] for key in values if key in resolved}}, builts[0]


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
    return read_choice(found, path, choice, value, {}, is_nested=True)[0] or value


def check_config(document: Document, base: Path, *, makes_data: bool = False) -> tuple[Job | None, list[ConfigProblem]]:
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
        self.job = find_kind(kind.schema.kind) if issubclass(kind.schema, Job) else None
        self.tree = tree
        self.kind = kind
        self.written = {part: self._key_of(part) for part in kind.keys}
        """The key under which each part is written."""
        self.denoiser: Any = None
        """The denoiser that the section of that name describes."""

    def parts(self) -> dict[str, Any]:
        """Return the parts of the job; those that are wrong or left out are missing."""
        self._unknown_parts()
        schemas = {**self.kind.sections, **self.kind.lists}
        read = {name: self._section(name, schema) for name, schema in schemas.items()}
        read |= {name: self._mapping(name, choice) for name, choice in self.kind.mappings.items()}
        built = {name: part for name, part in read.items() if part is not None} | self._values()
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

    def _section(self, name: str, schema: type) -> Any:
        """Return a section, or the entries of a list; None where it has faults or is left out."""
        key, keys, is_list = self.written[name], keys_of(schema), name in self.kind.lists
        values, first = self.tree.get(key), next(iter(keys))
        entry = f"- {{{', '.join(f'{key}: ...' for key, kind in keys.items() if kind.is_required)}}}"
        if values is None:
            if self.kind.requires(name):
                instead = f"`{name}:` and below it `{entry}`" if is_list else f"`{name}: {{{first}: ...}}`"
                self.found.fault((key,), f"missing; write {instead}")
        elif not isinstance(values, list if is_list else dict):
            instead = f"section; write `{name}: {{{first}: {shown(values)}}}`"
            instead = f"list; write entries below it, such as `{entry}`" if is_list else instead
            self.found.fault((key,), f"{shown(values)} is not a {instead}")
        elif isinstance(values, dict):
            return self._part((key,), name, schema, values)
        else:
            entries = []
            for number, value in enumerate(values):
                if isinstance(value, dict):
                    entries.append(self._part((key, number), name, schema, value))
                else:
                    self.found.fault((key, number), f"{shown(value)} is not a mapping; write `{entry}`")
            return None if self.found.is_wrong((key,)) else tuple(entries)
        return None

    def _mapping(self, name: str, choice: type[NamedChoice]) -> Any:
        """Return the choices of a mapping by their names; None where one has faults."""
        key = self.written[name]
        values = self.tree.get(key, {})
        if not isinstance(values, dict):
            self.found.fault((key,), f"{shown(values)} is not a mapping; write `{name}: {{NAME: {{name: ...}}}}`")
            return None
        for who, value in values.items():
            if not isinstance(value, dict):
                self.found.fault((key, who), f"{shown(value)} is not a mapping; write `{{name: {value}, ...}}`")
        entries = {who: self._part((key, who), name, choice, v) for who, v in values.items() if isinstance(v, dict)}
        return None if self.found.is_wrong((key,)) else entries

    def _part(self, place: KeyPath, section: str, schema: Any, values: Mapping[str, Any]) -> Any:
        """Return a section, or an entry of a list, as its dataclass; None where it has faults."""
        checks = checks_of(section, schema, self.job)
        if not issubclass(schema, NamedChoice):
            keys = keys_of(schema)
            resolved = self.found.with_paths(place, keys, values)
            return self.found.built(place, schema, keys, resolved, faults_in(keys, values, checks, self._elsewhere))
        by_channel = section == "denoiser" and bool(self.kind.mappings)
        written, built = read_choice(self.found, place, schema, values, checks, by_channel=by_channel)
        if section == "denoiser":
            self.denoiser = None if self.found.is_wrong(place) else built
        if written is None or (section in self.kind.lists and self.found.is_wrong(place)):
            return None
        # Rules of its other keys find their faults as well.
        right = {key for key in written if key == "name" or not self.found.is_wrong((*place, key))}
        return schema.from_mapping({key: written[key] for key in written if key in right})

    def _values(self) -> dict[str, Any]:
        """Return the values outside all sections that are right, with the defaults of those that are left out."""
        keys = self.kind.values
        given = {name: self.tree[key] for name in keys if self.tree.get(key := self.written[name]) is not None}
        faults = faults_in(keys, given, checks_of("", self.kind.schema, self.job))
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
                known_parts[name] = None if getattr(self.kind.schema, name, 0) is None else schema()
        if known_parts.pop("denoiser", None) is not None and self.denoiser is not None:
            known_parts["denoiser"] = self.denoiser
        for (part, *rest), message in apply_rules(rules_of(self.job) if self.job else OF_CLUSTERS, known_parts).items():
            path = (self.written[str(part)], *rest)
            if not self.found.is_wrong(path[:2]):
                self.found.fault(path, message)
