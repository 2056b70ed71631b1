"""The import graph of halotile, of files and of folders."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted((ROOT / "halotile").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def file_graph() -> dict[str, set[str]]:
    """The modules that each module imports at any time; those that only type checkers see are left out."""
    known = modules()
    return {name: {*_imported(path, known)} - {name} for name, path in known.items()}


def folder_graph() -> dict[str, set[str]]:
    """The same of the folders that modules lie in, where neither lies in the other."""
    known, graph = modules(), defaultdict[str, set[str]](set)
    for name, others in file_graph().items():
        here = _folder(known[name])
        for there in (_folder(known[other]) for other in others):
            if not (here + "/").startswith(there + "/") and not (there + "/").startswith(here + "/"):
                graph[here].add(there)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Groups in which each leads to every other one.

    Examples
    --------
    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    [['b', 'c']]
    """
    reached = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(n for n in reached[name] if name in reached.get(n, ()))) for name in graph}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for other in graph.get(todo.pop(), set()) - found:
            found.add(other)
            todo.append(other)
    return found


def _folder(path: Path) -> str:
    return path.relative_to(ROOT).parent.as_posix()


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in _run(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full if full in known else node.module,) if name in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    yield node
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        yield from _run(child)
