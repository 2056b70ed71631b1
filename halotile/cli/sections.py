"""The sections of a configuration, checked against the job they describe.

The file is a ``version``, a kind of ``job``, and that job's sections. The schema is the job's own
dataclass; the denoiser's options are checked against the denoiser's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile import registry
from halotile.cli.fields import check_fields, field_types
from halotile.cli.problems import KeyPath, Problem
from halotile.cli.yaml_source import Document
from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.checks import CHECKS, check_depth, check_sizes
from halotile.graphs.job import Cluster, DenoiserChoice, Input, Job, Output, Run, Tile
from halotile.graphs.words import expected, nearest, shown
from halotile.tasks.options import required_keys

VERSION = 1


@dataclass(frozen=True)
class JobKind:
    """A kind of job: the dataclass that is built, and the dataclass of each of its sections."""

    schema: type[Job]
    sections: Mapping[str, type]

    def requires(self, section: str) -> bool:
        """Whether the section has to be written."""
        return section in required_keys(self.schema)


JOBS: Mapping[str, JobKind] = {
    "denoise": JobKind(
        Job,
        {
            "input": Input,
            "output": Output,
            "denoiser": DenoiserChoice,
            "tile": Tile,
            "run": Run,
            "cluster": Cluster,
        },
    )
}
"""The word after ``job:``, and what it means."""

NAMED: Mapping[type, str] = {DenoiserChoice: "denoisers"}
"""Sections that are a name and its options, written side by side; and where the name is looked up."""

_HEAD = ("version", "job")
FLAGS = {"allow_import": "a file cannot allow itself to run code; add --allow-import to the command"}


def check_config(document: Document, base: Path) -> tuple[Job | None, list[Problem]]:
    """The job that a document describes, or every problem it has.

    Parameters
    ----------
    document : Document
        As read from a file, with what the command line sets over it.
    base : Path
        The folder that relative paths start from.
    """
    check = _Check(document, base)
    job = check.job()
    return job, sorted(check.problems, key=_line)


def _line(problem: Problem) -> int:
    """Problems are told in the order of the file; what the command line set comes last."""
    line = problem.place.rpartition(":")[2]
    return int(line) if line.isdigit() else sys.maxsize


class _Check:
    """Goes through a document once and collects what is wrong."""

    def __init__(self, document: Document, base: Path) -> None:
        self.document = document
        self.base = Path(os.path.abspath(base))
        self.tree: dict[str, Any] = document.tree
        self.problems = list(document.problems)
        self.written: dict[str, str] = {}
        """The section that is meant, and the key it is written under."""
        self._declared: dict[str, Any] = {}
        """What a name with its options stands for."""

    def fault(self, path: KeyPath, message: str, error: type[HalotileError] = ConfigError) -> None:
        """Enter a problem, once for each key."""
        if all(problem.path != path for problem in self.problems):
            self.problems.append(Problem(self.document.place_of(path), path, message, error))

    def job(self) -> Job | None:
        """The job, if nothing is wrong with it."""
        kind = self._head()
        if kind is None:
            return None
        self._unknown_sections(kind)
        self.written = {section: self._key_of(section, kind) for section in kind.sections}
        built = {section: self._section(section, schema, kind) for section, schema in kind.sections.items()}
        self._values()
        self._together(built)
        self._on_disk(built)
        if self.problems:
            return None
        return kind.schema(**{key: value for key, value in built.items() if value is not None})

    def _head(self) -> JobKind | None:
        version, kind = self.tree.get("version"), self.tree.get("job")
        if "version" not in self.tree:
            self.fault(("version",), f"missing; begin the file with `version: {VERSION}`")
        elif version != VERSION or isinstance(version, bool | float):
            self.fault(("version",), f"{shown(version)} is not known here; write {VERSION}")
        if isinstance(kind, str) and kind in JOBS:
            return JOBS[kind]
        if kind is None:
            self.fault(("job",), f"missing; write `job: {next(iter(JOBS))}`")
            return JOBS[next(iter(JOBS))]
        near = nearest(str(kind), JOBS)
        hint = f"did you mean {near}?" if near else f"write one of {', '.join(JOBS)}"
        self.fault(("job",), f"no job is called {shown(kind)}; {hint}")
        return JOBS[near] if near else None

    def _unknown_sections(self, kind: JobKind) -> None:
        for key in self.tree:
            if key in FLAGS:
                self.fault((key,), FLAGS[key])
            elif key not in kind.sections and key not in _HEAD:
                self.fault((key,), _unknown(key, [*_HEAD, *kind.sections], kind))

    def _key_of(self, section: str, kind: JobKind) -> str:
        """The key that a section is written under: what is inside a misspelt one is checked all the same."""
        others = (key for key in self.tree if key not in (*kind.sections, *_HEAD, *FLAGS))
        misspelt = next((key for key in others if nearest(key, kind.sections) == section), section)
        return section if section in self.tree else misspelt

    def _section(self, section: str, schema: type, kind: JobKind) -> Any:
        """One section as its dataclass, or None where it has faults or is left out."""
        key = self.written[section]
        values = self.tree.get(key)
        first = next(iter(field_types(schema)))
        if values is None:
            if kind.requires(section):
                self.fault((key,), f"missing; write `{section}: {{{first}: ...}}`")
            return None
        if not isinstance(values, dict):
            instead = f"{section}: {{{first}: {shown(values)}}}"
            self.fault((key,), f"{shown(values)} is not a section; write `{instead}`")
            return None
        if schema in NAMED:
            return self._choice(section, schema, values)
        built, faults = check_fields(schema, values)
        known = field_types(schema)
        for path, message in faults:
            unknown = len(path) == 1 and path[0] not in known
            self.fault((key, *path), _unknown(str(path[0]), known, kind) if unknown else message)
        return built

    def _choice(self, section: str, kind: type, values: Mapping[str, Any]) -> Any:
        """A name with its options: the options are checked against what the name stands for."""
        key, known = self.written[section], registry.names(NAMED[kind])
        named = "name" if "name" in values else next((k for k in values if nearest(k, ["name"])), "name")
        name = values.get(named)
        options = {option: value for option, value in values.items() if option != named}
        if named != "name":
            self.fault((key, named), "unknown key; did you mean name?")
        if name is None:
            self.fault((key, "name"), f"missing; write one of {', '.join(known)}")
            return None
        if not isinstance(name, str):
            self.fault((key, named), f"{shown(name)} is not {expected(str)}; write one of {', '.join(known)}")
            return None
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
            self.fault((key, named), f"no {section} is called {name}; {hint}")
            if near is None:
                return None
            name = near
        try:
            declared = registry.find(NAMED[kind], name).DENOISER
        except HalotileError as error:
            self.fault((key, named), str(error))
            return None
        except AttributeError:
            self.fault((key, named), f"the plug-in {name} declares no DENOISER; repair or uninstall it")
            return None
        return self._options(key, kind, name, declared, options)

    def _options(self, key: str, kind: type, name: str, declared: type, options: dict[str, Any]) -> Any:
        for option in path_fields(declared) & options.keys():
            if isinstance(options[option], str):
                options[option] = self._absolute(options[option])
        built, faults = check_fields(declared, options)
        for path, message in faults:
            self.fault((key, *path), message)
        for file in built.files() if built is not None else ():
            if not os.path.exists(file):
                option = next((name for name in options if str(options[name]) == str(file)), "")
                self.fault((key, option) if option else (key,), f"{file} does not exist")
        self._declared[name] = built
        return kind(name=name, options=options)

    def _values(self) -> None:
        """What the types allow and the job does not."""
        wrong = {problem.path[:2] for problem in self.problems}
        for (section, key), check in CHECKS.items():
            path = (self.written[section], key)
            values = self.tree.get(path[0])
            if not isinstance(values, dict) or values.get(key) is None or path in wrong:
                continue
            if message := check(values[key]):
                self.fault(path, message)

    def _together(self, built: dict[str, Any]) -> None:
        """What each value alone allows, and the others do not."""
        wrong = {problem.path[:2] for problem in self.problems}
        tile, output, choice = (built[section] for section in ("tile", "output", "denoiser"))
        denoiser = self._declared.get(choice.name) if choice is not None else None
        if denoiser is None:
            return
        tile = tile or Tile()
        found = dict(check_sizes(output, tile, denoiser)) if output is not None else {}
        if message := check_depth(tile, denoiser):
            found["tile", "depth"] = message
        for (section, key), message in found.items():
            if (path := (self.written[section], key)) not in wrong:
                self.fault(path, message)

    def _on_disk(self, built: dict[str, Any]) -> None:
        """Make paths absolute, and see that what is to be read is there."""
        if (output := built["output"]) is not None:
            built["output"] = dataclasses.replace(output, path=self._absolute(output.path))
        if (source := built["input"]) is None:
            return
        sides = {name: self._absolute(path) for name, path in source.sides.items()}
        built["input"] = dataclasses.replace(source, path=self._absolute(source.path), sides=sides)
        key = self.written["input"]
        wanted: dict[KeyPath, str] = {(key, "path"): built["input"].path}
        wanted |= {(key, "sides", name): path for name, path in sides.items()}
        for path, file in wanted.items():
            if "://" not in file and not os.path.exists(file):
                self.fault(path, f"{file} does not exist", InputError)

    def _absolute(self, path: str) -> str:
        """A path as the file's folder sees it; addresses such as s3:// stay."""
        if "://" in path:
            return path
        whole = self.base / os.path.expanduser(path)
        # Where a link comes before "..", only the file system knows what is meant.
        return os.path.realpath(whole) if ".." in whole.parts else str(whole)


def _unknown(key: str, here: Iterable[str], kind: JobKind) -> str:
    """What to say of an unknown key: the key that was meant, here or in another section."""
    here = list(here)
    elsewhere = [f"{name}.{key}" for name, schema in kind.sections.items() if key in field_types(schema)]
    meant = " or ".join(elsewhere) or nearest(key, here)
    return f"unknown key; did you mean {meant}?" if meant else f"unknown key; write one of {', '.join(here)}"


def path_fields(schema: type) -> set[str]:
    """Options that name files: a relative one starts from the configuration's folder."""
    return {name for name, kind in field_types(schema).items() if name == "weights" or "Path" in str(kind)}
