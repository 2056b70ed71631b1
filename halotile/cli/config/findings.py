"""What is found in a configuration on the way through it: its faults, and the files that it names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from halotile.cli.config.problems import KeyPath, Problem
from halotile.cli.config.yaml_source import Document
from halotile.errors import ConfigError, HalotileError, InputError
from halotile.storage.disk.place import broken_link


class Findings:
    """Collects faults, one for each key.

    Parameters
    ----------
    document : Document
        As read from a file, with what the command line sets over it.
    base : Path
        The folder that relative paths start from.
    makes_data : bool
        Whether the measurements are yet to be written: they need not be there.
    """

    def __init__(self, document: Document, base: Path, *, makes_data: bool = False) -> None:
        self.document = document
        self.base = Path(os.path.abspath(base))
        self.makes_data = makes_data
        self._problems = list(document.problems)
        self._files: dict[KeyPath, str] = {}

    def fault(self, path: KeyPath, message: str, error: type[HalotileError] = ConfigError) -> None:
        """Enter a fault, unless its key has one."""
        if all(problem.path != path for problem in self._problems):
            self._problems.append(Problem(self.document.place_of(path), path, message, error))

    def is_wrong(self, path: KeyPath) -> bool:
        """Whether a key has a fault, or something inside it."""
        return any(problem.path[: len(path)] == path for problem in self._problems)

    def read(self, path: KeyPath, file: Any) -> Any:
        """A file that is read, as the configuration's folder sees it; a value of another type is nobody's path."""
        if not isinstance(file, str):
            return file
        self._files[path] = self.absolute(file)
        return self._files[path]

    def absolute(self, path: str) -> str:
        """A path as the configuration's folder sees it; addresses such as s3:// stay."""
        if "://" in path:
            return path
        whole = self.base / os.path.expanduser(path)
        # Where a link comes before "..", only the file system knows what is meant.
        return os.path.realpath(whole) if ".." in whole.parts else str(whole)

    def problems(self) -> list[Problem]:
        """All faults, with the files that are not there, in the order of the document; the command line comes last."""
        made = {file for path, file in self._files.items() if self.makes_data and path[-1] == "data"}
        for path, file in self._files.items():
            if "://" not in file and file not in made and not os.path.exists(file):
                self.fault(path, missing(file), InputError)
        return sorted(self._problems, key=_line)


def missing(file: str | os.PathLike[str]) -> str:
    """That a file is not there, in words."""
    link = broken_link(file)
    return (
        f"{file} does not exist: {link}. Mend it, or write another path" if link else f"{file} does not exist"
    )


def _line(problem: Problem) -> int:
    line = problem.place.rpartition(":")[2]
    return int(line) if line.isdigit() else sys.maxsize
