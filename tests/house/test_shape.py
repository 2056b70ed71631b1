"""The house stays easy to hold in mind: short functions, small folders, no circles."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.house.imports import ROOT, circles, file_graph, folder_graph, modules

LONGEST_FUNCTION = 60
MOST_FILES = 14


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Lines of a function that are neither blank, comment nor docstring."""
    body = text[function.lineno - 1 : function.end_lineno]
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del body[first.lineno - function.lineno : (first.end_lineno or 0) - function.lineno + 1]
    return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("path", modules().values(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    text = path.read_text()
    functions = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = {
        f.name: count for f in functions if (count := lines_of_code(f, text.splitlines())) > LONGEST_FUNCTION
    }
    assert long == {}


def test_no_folder_has_more_files_than_fit_in_mind() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in modules().values()
        if path.name not in ("__init__.py", "__main__.py")
    )
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_files_import_one_another_in_a_circle() -> None:
    assert circles(file_graph()) == []


def test_no_folders_import_one_another_in_a_circle() -> None:
    assert circles(folder_graph()) == []
