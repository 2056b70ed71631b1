"""Docstrings begin with a noun phrase or an imperative, and names use the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.imports import ROOT, modules

RIDDLES = {"What", "Whether", "How", "Where", "Who", "Why", "Which", "That"}
INSTEAD = {
    "picture": "image",
    "processor": "cpu (or, of tiles, the function that processes them)",
    "card": "gpu",
    "sweep": "pass",
    "told": "reported, recorded or given",
    "tell": "report, warn or notify",
    "telling": "reporting",
    "hands": "io threads",
    "lanes": "io threads",
    "sight": "receptive field, or view",
    "chance": "attempt",
    "slack": "margin",
    "doubts": "warnings",
    "wish": "choice",
    "keeper": "supervisor",
}
OF_TILES = "halotile/tasks/distributed/"
"""Where deepinv's word for a function on tiles, processor, is meant."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of classes and functions, and of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for part in body[isinstance(node, ast.Module) :]:
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                text = part.value.value
                if isinstance(text, str) and text.strip():
                    yield text


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module gives to functions, classes, parameters and values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("path", modules().values(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_and_names_can_be_read_by_strangers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert [text for text in docstrings(tree) if text.split()[0] in RIDDLES] == []
    of_tiles = path.relative_to(ROOT).as_posix().startswith(OF_TILES)
    words = {(name, word) for name in defined(tree) for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name)}
    banned = {
        name: INSTEAD[word.lower()]
        for name, word in words
        if word.lower() in INSTEAD and not (of_tiles and word.lower() == "processor")
    }
    assert banned == {}
