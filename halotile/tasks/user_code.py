"""Digests of a user's own code that are the same in every process and change with the code.

Code that is imported by name is identified by its source files: those of its module, and of every module of the user's own
that these import. An object from a script is identified by a pickle that has byte code in place of names, and
everything that the code uses: constants, defaults, closures, globals, the state of objects.
"""

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from halotile.tasks.lazy import torch

INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages
SUFFIXES = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
# Attributes that Python adds to a class.
GENERATED = ("__firstlineno__", "__static_attributes__", "__slotnames__", "__doc__", "_abc_impl")
DIGITS = 16


def file_digest(file: Path) -> str:
    """SHA-256 of a source file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def imported_digest(reference: str, value: Any, digest_of: Callable[[Path], str] = file_digest) -> str:
    """Digest of the code behind ``package.module:name``, which was imported as ``value``; ``digest_of``: that of a file.

    >>> len(imported_digest("json:dumps", None))
    16
    """
    files = source_files(reference.partition(":")[0])
    # A module of a notebook has none. By names below the folder: moving a project does not change the digest.
    return value_digest([(str(name), digest_of(files[name])) for name in sorted(files)] or value)


def source_files(name: str) -> dict[Path, Path]:
    """The user's files that run when a module is imported, by their paths below the folder of its topmost package.

    For an installed package these are all its sources; for the standard library none.
    """
    root, top = _root(name), name.partition(".")[0]
    if root and _is_installed(root) and top not in sys.stdlib_module_names:
        return {file.relative_to(root): file for file in (root / top).rglob("*.py")} or _files_of(top, root)
    known: dict[Path, Path] = {}
    asked, pending = {name}, [name]
    while pending:
        module = pending.pop()
        folder = None if _is_foreign(module) else _root(module)
        for place, file in (_files_of(module, folder) if folder else {}).items():
            if place not in known:
                known[place] = file
                wanted = set(_imports(file, place.parent.parts)) - asked
                asked |= wanted
                pending += wanted
    return known


def _root(name: str) -> Path | None:
    """The folder of the topmost package of a module; None for one without a file."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is not None and not places and spec.has_location and spec.origin:
        places = [spec.origin]
    return Path(places[0]).parent if places else None


def _is_installed(folder: Path) -> bool:
    return any(part in INSTALLED for part in folder.parts)


def _files_of(name: str, root: Path) -> dict[Path, Path]:
    """The file of a module below a folder, and those of the packages that contain it, by their paths below the folder."""
    parts = name.split(".")
    places = (Path(*parts[:count]) for count in range(1, len(parts) + 1))
    candidates = (Path(f"{stem}{suffix}") for p in places for stem in (p / "__init__", p) for suffix in SUFFIXES)
    return {place: root / place for place in candidates if (root / place).is_file()}


def _imports(file: Path, package: tuple[str, ...]) -> Iterator[str]:
    """Yield names of the modules that a source file of a package may import, also inside functions."""
    try:
        tree = ast.parse(file.read_bytes() if file.suffix == ".py" else b"")
    except (SyntaxError, ValueError):  # imported conditionally, or not at all
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = [*above, *filter(None, [node.module])]
            yield from (".".join([*origin, alias.name]) for alias in node.names)


@functools.lru_cache(maxsize=1024)
def _is_foreign(module: str | None) -> bool:
    """Return whether a module belongs to Python, an installed package, or halotile, which is identified by its version."""
    top = (module or "__main__").partition(".")[0]
    root = _root(top)
    is_foreign = top in sys.stdlib_module_names or top == "halotile"
    return is_foreign or (root is not None and _is_installed(root))


def value_digest(value: Any) -> str:
    """Digest of a value and the code that it uses; parts that cannot be inspected are left out.

    >>> value_digest(lambda image: image + 1) == value_digest(lambda image: image + 2)
    False
    """
    return _Inspected(value).digest.hexdigest()[:DIGITS]


def whole_digest(value: Any, *, with_code: bool = True) -> str | None:
    """Digest in full length; None if a part cannot be inspected, such as an open file or compiled code.

    ``with_code``: whether classes and functions count with their code, or by their names alone.

    >>> import threading
    >>> len(whole_digest([1, 2])), whole_digest([threading.Lock()]) is None
    (64, True)
    >>> whole_digest({threading.Lock()}) is None
    True
    """
    inspected = _Inspected(value, with_code)
    return inspected.digest.hexdigest() if inspected.is_whole else None


def loaded_code() -> dict[str, str] | None:
    """Digests of the user's files that this process imported, and of the installed packages, without halotile.

    None if they cannot be determined: a file was deleted, or is in an archive.
    """
    try:
        digests = {"installed": _installed()}
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not _is_foreign(name.partition(".")[0]):
                digests[name] = file_digest(Path(file))
    except OSError:
        return None
    return digests


def _installed() -> str:
    """Digest of the entries of the folders of installed packages, whose records give version and time of installation.

    All of them, imported or not: which ones are imported depends on whether workers are to be started.
    """
    facts = set()
    for folder in {place for place in sys.path if _is_installed(Path(place)) and os.path.isdir(place)}:
        for entry in os.scandir(folder):
            is_record = entry.is_file() or entry.name.endswith((".dist-info", ".egg-info"))
            if entry.name != "__pycache__":
                facts.add((folder, entry.name, entry.stat().st_mtime_ns if is_record else 0))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()


def qualified_name(value: Any) -> str:
    """The name of a function, or of the class of an object, with its module.

    >>> qualified_name(functools.partial(value_digest))
    'halotile.tasks.user_code:value_digest'
    """
    if isinstance(value, functools.partial):
        return qualified_name(value.func)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


class _Inspected(pickle._Pickler):
    """A pickle of a value that is the same in every process, and only for its digest: it cannot be loaded.

    Plain and cloudpickle's would have line numbers and file names of code, random names of classes, sets in the order of the process, and
    references to strings that are one object in one process and two in another.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table

    def __init__(self, value: Any, with_code: bool = True) -> None:
        self.digest = hashlib.sha256()
        self.with_code = with_code
        self.is_whole = True
        super().__init__(types.SimpleNamespace(write=self.digest.update), 4)
        self.pending = [value]
        """The value, and parts of functions and classes, which refer to each other in chains and circles."""
        try:
            for each in self.pending:
                self.dump(each)
        except RecursionError:  # of objects in long chains
            self.is_whole = False

    def memoize(self, obj: Any) -> None:
        if not isinstance(obj, str | bytes):
            super().memoize(obj)  # type: ignore[misc]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        text = f"{getattr(obj, '__module__', '')}:{name or obj.__qualname__}\n"
        self.write(text.encode())  # type: ignore[attr-defined]
        self.memoize(obj)

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, set | frozenset):
            members = [_Inspected(each, self.with_code) for each in value]
            self.is_whole &= all(each.is_whole for each in members)
            return kind, (sorted(each.digest.hexdigest() for each in members),)
        if isinstance(value, types.CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_argcount
            return kind, (value.co_code, *names, value.co_consts)
        if isinstance(value, types.FunctionType):
            self.pending.append(self._function_parts(value))
            return value.__qualname__
        if isinstance(value, type):
            if self.with_code and not _is_foreign(value.__module__):
                attributes = {name: v for name, v in sorted(vars(value).items()) if name not in GENERATED}
                self.pending.append([value.__bases__, attributes])
            return value.__qualname__
        if isinstance(value, types.ModuleType):
            files = {} if _is_foreign(value.__name__) else source_files(value.__name__)
            return kind, (value.__name__, sorted(map(file_digest, files.values())))
        if isinstance(value, functools._lru_cache_wrapper):
            return kind, (value.__wrapped__,)
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            return kind, _tensor_parts(value)
        return NotImplemented if kind in self.dispatch else self._object_parts(value)

    def _function_parts(self, function: types.FunctionType) -> list[Any]:
        parts = [function.__defaults__, function.__kwdefaults__, function.__dict__, function.__closure__]
        if not self.with_code:
            return parts
        code, known = function.__code__, function.__globals__
        if _is_foreign(function.__module__):  # its closure may hold the user's code, its globals do not
            return [*parts, code]
        return [*parts, code, {name: known[name] for name in sorted({*names_in(code)} & known.keys())}]

    def _object_parts(self, value: Any) -> Any:
        """The parts of any other object that pickle would store."""
        kind: Any = type(value)
        try:
            reduce = self.dispatch_table.get(kind)
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # such as an open file or a lock
            self.is_whole = False
            return kind, ()
        if isinstance(parts, str):
            return parts
        make, *rest = parts
        state = [list(part) if isinstance(part, Iterator) else part for part in rest]
        return kind, (getattr(make, "__qualname__", ""),), state


def _tensor_parts(tensor: Any) -> tuple[str, tuple[int, ...], str]:

    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(numbers).hexdigest()


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield every global name in a function, and in those defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
