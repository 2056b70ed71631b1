"""A YAML 1.2 text as plain values, with the line of every key, and faults with their places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.words import KeyPath, counted, dotted


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


MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_NODES = 20_000  # most nodes: far above any configuration, and far below the expansion of an alias bomb

_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "timestamp", "seq", "map")


@dataclass(frozen=True)
class Document:
    """A configuration as read: values, the place of each, and faults found while reading.

    >>> document = read_text("tile:\\n  size: 256\\n", "config.yaml")
    >>> document.tree, document.place_of(("tile", "size")), document.place_of(("tile", "depth"))
    ({'tile': {'size': 256}}, 'config.yaml:2', 'config.yaml:1')
    """

    name: str
    tree: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: tuple[ConfigProblem, ...] = ()

    def place_of(self, path: KeyPath) -> str:
        """Return the place of a key; for a key that does not exist, that of its parent."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.places.get((), self.name)

    def put(self, path: KeyPath, value: Any, place: str) -> Document:
        """Return the document with one value replaced from another source; missing sections are created."""
        tree = _put(self.tree, path, 0, value, place)
        places = {at: where for at, where in self.places.items() if at[: len(path)] != path}
        new_places = {path[:length]: place for length in range(1, len(path)) if path[:length] not in places}
        return replace(self, tree=tree, places=places | new_places | {path: place})


def _put(branch: Any, path: KeyPath, depth: int, value: Any, place: str) -> Any:
    """Return a branch with the value of a path replaced, and its siblings unchanged."""
    if depth == len(path):
        return value
    key, parent = path[depth], path[:depth]
    if isinstance(key, int):
        entries = _entries(branch, parent, key, place)
        entries[key] = _put(entries[key], path, depth + 1, value, place)
        return entries
    if isinstance(branch, list):
        raise ConfigError(
            f"{place}: {dotted(parent)} is a list: write which of its entries, such as {dotted((*parent, 0, key))}."
            if not key.isdigit()
            else f"{place}: {dotted(parent)} is a list: write {dotted((*parent, int(key), *path[depth + 1 :]))}."
        )
    if branch is not None and not isinstance(branch, dict):
        raise ConfigError(
            f"{place}: {dotted(parent)} is {json.dumps(branch, default=str)}, not a section: "
            f"nothing can be set inside it. Set {dotted(parent)} itself."
        )
    section = dict(branch or {})
    section[key] = _put(section.get(key), path, depth + 1, value, place)
    return section


def _entries(branch: Any, parent: KeyPath, number: int, place: str) -> list[Any]:
    """Return a copy of a list that has an entry of this number."""
    if not isinstance(branch, list):
        raise ConfigError(
            f"{place}: {dotted(parent)} is {json.dumps(branch, default=str)}, not a list: it has no entry {number}. "
            f"Set {dotted(parent)} itself."
        )
    if number >= len(branch):
        last = f", the last of them {dotted((*parent, len(branch) - 1))}" if branch else ""
        raise ConfigError(
            f"{place}: {dotted(parent)} has {counted(len(branch), 'entry')}{last}: there is no entry {number}. Set {dotted(parent)} itself to add one."
        )
    return list(branch)


def read_file(path: Path) -> Document:
    """Read a configuration file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Write the path of a configuration.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory. Write the path of a configuration file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes. That is no configuration; is it the image?")
    return read_text(_decode(raw, str(path)), str(path))


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text. Save the file as UTF-8.") from None


def read_text(text: str, name: str) -> Document:
    """Read a configuration from a text; ``name`` identifies it in messages."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        _check_events(YAML(typ="safe", pure=True).parse(text), name)
        yaml = YAML(typ="safe", pure=True)
        root = yaml.compose(text)
    except YAMLError as error:
        raise ConfigError(_syntax_message(error, text, name)) from None
    if root is None:
        return Document(name, None, {(): f"{name}:1"})
    walk = _Walk(name, yaml.constructor)
    tree = walk.value(root, ())
    return Document(name, tree, walk.places, tuple(walk.problems))


def _check_events(events: Any, name: str) -> None:
    """Refuse, before anything is built, YAML features that no configuration needs and that can do harm."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith(("MappingStartEvent", "SequenceStartEvent"))
        depth -= kind.endswith(("MappingEndEvent", "SequenceEndEvent"))
        place = f"{name}:{event.start_mark.line + 1}"
        if kind == "DocumentStartEvent" and event.version not in (None, (1, 2)):
            raise ConfigError(f"{place}: %YAML {'.'.join(map(str, event.version))} is not read. Leave the line out.")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{place}: nested deeper than {MAX_DEPTH} levels. No configuration is.")


def _syntax_message(error: Any, text: str, name: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        return f"{name}:{line}: not YAML: {getattr(error, 'reason', error)}."
    place, problem = f"{name}:{mark.line + 1}", str(error.problem)
    if r"'\t'" in problem:
        return f"{place}: a tab stands where YAML needs spaces. Indent with spaces."
    if "another document" in problem:
        return f"{place}: a second document begins. Write one job in one file."
    during = f" {error.context}" if error.context else ""
    return f"{place}: not YAML: {problem}{during}."


class _Walk:
    """Turns a node tree into values, and records the line of every key."""

    def __init__(self, name: str, constructor: Any) -> None:
        self.name = name
        self.constructor = constructor
        self.places: dict[KeyPath, str] = {}
        self.problems: list[ConfigProblem] = []
        self.nodes = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        """Return the value of a node; aliases are counted each time they occur."""
        place = self.places.setdefault(path, self._place(node))
        self.nodes += 1
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise ConfigError(
                f"{place}: more than {MAX_NODES:,} entries, or aliases that expand to so many. That is no configuration; is it the image?"
            )
        tag = _tag(node)
        if tag not in _PLAIN_TAGS:
            message = f"the tag !{tag.lstrip('!')} is not allowed; write a plain value"
            self.problems.append(ConfigProblem(self._place(node), path, message))
            return None
        kind = type(node).__name__
        if kind == "MappingNode":
            return self._mapping(node, path)
        if kind == "SequenceNode":
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, tag, path)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, place = self._key(key_node), self._place(key_node)
            below = (*path, key)
            if _tag(key_node) not in _PLAIN_TAGS:
                self.problems.append(ConfigProblem(place, below, _not_a_key(key_node)))
                continue
            if key in mapping:
                earlier = self.places[below].rpartition(":")[2]
                self.problems.append(ConfigProblem(place, below, f"written twice, first on line {earlier}; keep one"))
                continue
            self.places[below] = place
            mapping[key] = self.value(value_node, below)
        return mapping

    def _key(self, node: Any) -> str:
        if type(node).__name__ != "ScalarNode":
            raise ConfigError(f"{self._place(node)}: a list or mapping cannot be a key. Write a word.")
        return str(node.value)

    def _scalar(self, node: Any, tag: str, path: KeyPath) -> Any:
        if tag in ("str", "timestamp"):
            return str(node.value)
        try:
            return self.constructor.construct_object(node)
        except ValueError:
            self.problems.append(ConfigProblem(self._place(node), path, f"{node.value[:30]!r} cannot be read as {tag}"))
            return None

    def _place(self, node: Any) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def _tag(node: Any) -> str:
    return str(node.tag).removeprefix("tag:yaml.org,2002:")


def _not_a_key(node: Any) -> str:
    if _tag(node) == "merge":
        return "merge keys are not read; write the keys out"
    return f"the tag !{_tag(node).lstrip('!')} is not allowed; write a plain key"
