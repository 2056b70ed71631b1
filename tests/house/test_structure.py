"""The house keeps its shape: rooms, sizes, circles, docstrings, words, the public face; and waits are limited, so that what hangs ends in an error."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import halotile

ROOT = Path(__file__).parents[2]


Graph = Mapping[str, set[str]]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    for node in _run(parsed(path)):
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


def test_no_two_types_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in parsed(path).body:
            name = node.name if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                places.setdefault(name, []).append(identify(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_module_opens_with_one_sentence_is_read_in_one_go_and_reads_text_in_any_locale() -> None:
    guesses = re.compile(r"\.read_text\(\)|(?<!\.)\bopen\([^()\n]*\"[rwa]\"\)")
    for path in MODULES:
        text, opening = path.read_text(), (ast.get_docstring(parsed(path)) or "").split("\n\n")[0]
        assert len(text.splitlines()) <= LONGEST, path
        assert re.search(r"\w.*[.:]+$", opening, re.DOTALL), path
        assert not guesses.search(text), path


def test_a_public_name_says_what_it_does_and_shows_it_and_no_other_is_listed() -> None:
    documented = {name: inspect.getdoc(getattr(halotile, name)) or "" for name in halotile.__all__}
    assert [n for n, text in documented.items() if "Examples\n--------\n>>>" not in text] == []
    assert dir(halotile) == sorted([*halotile.__all__, "__version__"])


def test_the_architecture_page_says_where_to_begin_in_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| feature")[2].partition("\n\n")[0]
    folders = {path.parent.relative_to(ROOT / "halotile").as_posix() for path in MODULES} - {"."}
    rooms = {"graphs", "tasks", "storage"}
    assert set(re.findall(r"`((?:cli|graphs|tasks|storage)[\w/]*)`", table)) == folders - rooms
    named = re.findall(r"`((?:cli|graphs|tasks|storage)/[\w/.]+)`", page)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "halotile" / name).exists()] == []


def test_the_package_is_typed_and_has_a_version_and_the_changelog_a_place_for_what_comes_next() -> None:
    assert (ROOT / "halotile/py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+", halotile.__version__)
    assert re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == "Unreleased"


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
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := lines_of_code(node, text.splitlines())) > LONGEST_FUNCTION
    }
    assert long == {}


def test_no_folder_has_more_files_than_fit_in_mind() -> None:
    counts = Counter(identify(path.parent) for path in MODULES if path.name not in ("__init__.py", "__main__.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_files_or_folders_import_one_another_in_a_circle() -> None:
    assert circles(file_graph()) == circles(folder_graph()) == []


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
        tree, here = parsed(path), identify(path)
        riddles += [f"{here}: {text}" for text in docstrings(tree) if text.split()[0] in RIDDLES]
        words = {(n, word.lower()) for n in defined(tree) for word in re.findall(r"[a-z]+|[A-Z][a-z]*", n)}
        banned += [
            f"{here}: {name}, write {INSTEAD[word]}"
            for name, word in words
            if word in INSTEAD and not (here.startswith(OF_TILES) and word == "processor")
        ]
    assert riddles == []
    assert banned == []


WITHOUT_LIMIT = {"exception", "get", "join", "recv", "recv_bytes", "result", "traceback", "wait"}


"""Methods that wait for ever where they are called without an argument."""


OF_DASK = {
    *("as_completed", "cancel", "gather", "get_versions", "identity", "ncores", "nthreads", "restart_workers"),
    *("run", "run_on_scheduler", "scheduler_info", "sync", "wait_for_workers"),
}


"""Calls of Dask that wait for ever, with whatever arguments, unless `ask` calls them."""


LIMITS = {"callback_timeout", "seconds", "timeout"}


OWN_THREADS = ("halotile/storage/", "halotile/tasks/")


"""Folders without Dask, whose futures are those of threads of the same process."""


ALLOWED = {
    "halotile/graphs/runs/signals.py": "the program of `recon-cli exec` takes as long as it takes",
    "halotile/graphs/clusters/workers/fork_server.py": "poll() comes before, and kill() or the end of the pipe; a child waits for its parent",
    "halotile/graphs/jobs/ptychography/call.py": "a thread that heeds what is raised for the ranks",
    "halotile/graphs/runs/records.py": "a thread that reads a file",
    "halotile/graphs/runs/passes/worker_setup.py": "a coroutine that ask() calls",
    "halotile/graphs/runs/status.py": "a thread that ends when it is asked to",
    "halotile/tasks/devices/gpu.py": "memory that the copies of the same GPU return",
    "halotile/tasks/groups/group.py": "torch limits it by the timeout of the group",
    "halotile/tasks/groups/script.py": "the script of a rank, which the driver looks after",
}


def unlimited_waits(text: str, place: str) -> list[str]:
    """Calls of a file that may wait for ever, as they are written."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    limited = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "asyncio.wait_for"}
    found = []
    for call in calls:
        *_, owner, name = ["", *ast.unparse(call.func).rsplit(".", 1)]
        if id(call) in limited or any(word.arg in LIMITS for word in call.keywords):
            continue
        if name == "get" and any(f"{owner}{sign} ContextVar" in text for sign in (":", " =")):
            continue
        if name in ("result", "exception") and place.startswith(OWN_THREADS):
            continue
        of_dask = name in OF_DASK and (name == "as_completed" or owner.endswith(("client", "cluster")))
        if of_dask or (name in WITHOUT_LIMIT and owner and not call.args):
            found.append(ast.unparse(call))
    return found


def test_every_wait_is_limited() -> None:
    found = defaultdict[str, list[str]](list)
    for path in modules().values():
        if waits := unlimited_waits(path.read_text(), identify(path)):
            found[identify(path)] = waits
    assert {place: waits for place, waits in found.items() if place not in ALLOWED} == {}
    assert {*ALLOWED} == {*found}  # none is left over
