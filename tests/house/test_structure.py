"""The house keeps its shape: rooms, sizes, circles, docstrings, words, the public face."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import halotile
from tests.house.imports import ROOT, circles, file_graph, folder_graph, modules

MODULES = [*modules().values()]
LONGEST = 600
LONGEST_FUNCTION = 60
MOST_FILES = 14
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


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_one_way() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {identify(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_no_two_types_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            name = node.name if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                places.setdefault(name, []).append(identify(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_module_opens_with_one_sentence() -> None:
    openings = {
        identify(path): (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0] for path in MODULES
    }
    assert {n: o for n, o in openings.items() if not re.search(r"\w.*[.:]+$", o, re.DOTALL)} == {}


def test_a_public_name_says_what_it_does_and_shows_it() -> None:
    documented = {name: inspect.getdoc(getattr(halotile, name)) or "" for name in halotile.__all__}
    assert [n for n, text in documented.items() if "Examples\n--------\n>>>" not in text] == []


def test_only_public_names_are_listed() -> None:
    assert dir(halotile) == sorted([*halotile.__all__, "__version__"])


def test_the_architecture_page_says_where_to_begin_in_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| feature")[2].partition("\n\n")[0]
    folders = {path.parent.relative_to(ROOT / "halotile").as_posix() for path in MODULES} - {"."}
    rooms = {"graphs", "tasks", "storage"}
    assert set(re.findall(r"`((?:cli|graphs|tasks|storage)[\w/]*)`", table)) == folders - rooms
    files = re.findall(r"`((?:cli|graphs|tasks|storage)/[\w/]*\.py)`", page)
    assert [name for name in files if not (ROOT / "halotile" / name).is_file()] == []


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (ROOT / "halotile/py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+", halotile.__version__)


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"


def test_constraints_pin_every_line_to_a_public_release() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)] == []
    assert pins == sorted(pins)


def test_no_file_is_large() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    large = [file for file in files if file.is_file() and file.stat().st_size > 2**20]
    assert large == [ROOT / "examples/ptychography/petra.cxi"]  # the smallest real scan with a licence for it


UNLIMITED = {
    "result": "timeout",
    "exception": "timeout",
    "traceback": "timeout",
    "wait_for_workers": "timeout",
    "sync": "callback_timeout",
}
"""Methods that wait for Dask, and the argument that limits them."""
ASKED = {"gather", "run", "restart_workers", "cancel", "identity", "ncores", "get_versions"}
"""Methods of a client that wait without a limit of their own: ``ask`` calls them."""


def unlimited_waits(code: str) -> list[int]:
    """Lines in which a thread waits for Dask without a limit; a coroutine is limited by what runs it."""
    tree = ast.parse(code)
    awaited = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Await) for inner in ast.walk(node)}
    waits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in awaited:
            method, owner = node.func.attr, ast.unparse(node.func.value)
            limit, given = UNLIMITED.get(method), {keyword.arg for keyword in node.keywords}
            is_client = owner.endswith(("client", "scheduler", "cluster"))
            is_limited = limit in given or (limit == "timeout" and node.args)
            is_wait = is_client or method != "sync"  # journals have one too
            if (limit and is_wait and not is_limited) or (method in ASKED and is_client):
                waits.append(node.lineno)
    return waits


def test_no_wait_for_dask_is_without_a_limit() -> None:
    """A task that is pinned to a dead worker would be waited for without end."""
    waits = {
        identify(path): lines
        for path in MODULES
        if "graphs" in path.parts and "ThreadPoolExecutor" not in path.read_text()
        if (lines := unlimited_waits(path.read_text()))
    }
    assert waits == {}


def test_text_files_are_read_in_any_locale() -> None:
    guesses = re.compile(r"\.read_text\(\)|(?<!\.)\bopen\([^()\n]*\"[rwa]\"\)")
    assert [identify(path) for path in MODULES if guesses.search(path.read_text())] == []


@pytest.mark.parametrize(
    "line", ["future.result()", "client.gather(futures)", "cluster.client.run(f)", "client.sync(f)"]
)
def test_a_wait_without_a_limit_is_found(line: str) -> None:
    assert unlimited_waits(line)


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Lines of a function that are neither blank, comment nor docstring."""
    body = text[function.lineno - 1 : function.end_lineno]
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del body[first.lineno - function.lineno : (first.end_lineno or 0) - function.lineno + 1]
    return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{identify(path)}: {node.name}": count
        for path in MODULES
        for text in (path.read_text(),)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := lines_of_code(node, text.splitlines())) > LONGEST_FUNCTION
    }
    assert long == {}


def test_no_folder_has_more_files_than_fit_in_mind() -> None:
    counts = Counter(identify(path.parent) for path in MODULES if path.name not in ("__init__.py", "__main__.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_files_import_one_another_in_a_circle() -> None:
    assert circles(file_graph()) == []


def test_no_folders_import_one_another_in_a_circle() -> None:
    assert circles(folder_graph()) == []


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


def test_docstrings_and_names_can_be_read_by_strangers() -> None:
    riddles, banned = [], []
    for path in MODULES:
        tree, here = ast.parse(path.read_text()), identify(path)
        riddles += [f"{here}: {text}" for text in docstrings(tree) if text.split()[0] in RIDDLES]
        words = {(n, word.lower()) for n in defined(tree) for word in re.findall(r"[a-z]+|[A-Z][a-z]*", n)}
        banned += [
            f"{here}: {name}, write {INSTEAD[word]}"
            for name, word in words
            if word in INSTEAD and not (here.startswith(OF_TILES) and word == "processor")
        ]
    assert riddles == []
    assert banned == []
