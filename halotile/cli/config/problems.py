"""Problems of a configuration: each fault with its place, all reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.words import KeyPath, dotted


@dataclass(frozen=True)
class ConfigProblem:
    """One fault of a configuration.

    >>> print(ConfigProblem("config.yaml:7", ("tile", "siez"), "unknown key; did you mean size?"))
    config.yaml:7: tile.siez: unknown key; did you mean size?
    """

    place: str
    path: KeyPath
    message: str
    error: type[HalotileError] = ConfigError

    def __str__(self) -> str:
        # An option of the command line is its own place: `--set tile.size` names the key already.
        key = dotted(self.path)
        if not key or self.place in ("--workers", f"--set {key}"):
            return f"{self.place}: {self.message}"
        return f"{self.place}: {key}: {self.message}"

    def to_json(self) -> dict[str, object]:
        """The fault for programs."""
        file, _, line = self.place.rpartition(":")
        return {
            "file": file if line.isdigit() else self.place,
            "line": int(line) if line.isdigit() else None,
            "key": dotted(self.path),
            "message": self.message,
        }


def raise_problems(source: str, problems: Sequence[ConfigProblem]) -> None:
    """Raise one error that lists every problem; do nothing when there is none."""
    if not problems:
        return
    error = InputError if all(p.error is InputError for p in problems) else ConfigError
    if len(problems) == 1:
        raise error(str(problems[0]))
    lines = "\n".join(str(problem) for problem in problems)
    raise error(f"{len(problems)} problems in {source}; nothing was started\n{lines}")
