"""Findings of the checks of a configuration: its faults, and the files that it names."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.cli.config.problems import ConfigProblem
from halotile.cli.config.yaml_source import Document
from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.kinds.patterns import is_pattern
from halotile.graphs.kinds.sections import STEM
from halotile.graphs.rules.keys import Keys
from halotile.graphs.words import KeyPath, parts
from halotile.storage.disk.place import broken_link
from halotile.tasks.options import OwnPath, ReadPath


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
        if is_pattern(pattern := os.path.join(glob.escape(str(self.base)), os.path.expanduser(file))):
            self._files[path] = pattern  # brackets in the name of the folder are none of it
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

        Parameters
        ----------
        written : mapping, optional
            Keys that are misspelt in the file: their files are checked nevertheless.
        """
        resolved = dict(values)
        for key in (key for key in keys if key in values):
            value, allowed, place = values[key], parts(keys[key].type), (*path, (written or {}).get(key, key))
            if OwnPath in allowed and isinstance(value, str):
                resolved[key] = self.absolute(value)
            elif ReadPath in allowed:
                resolved[key] = self.read(place, value)
            elif Mapping[str, ReadPath] in allowed and isinstance(value, dict):
                resolved[key] = {name: self.read((*place, name), file) for name, file in value.items()}
        return resolved

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
    return (
        f"{file} does not exist: {link}. Mend it, or write another path" if link else f"{file} does not exist"
    )


def _line(problem: ConfigProblem) -> int:
    line = problem.place.rpartition(":")[2]
    return int(line) if line.isdigit() else sys.maxsize
