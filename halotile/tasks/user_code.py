"""Digests of a user's own code that are the same in every process and change with the code.

Code that is imported by name is identified by its source files: those of its module, and of every module of the user's own
that these import. An object from a script is identified by its byte code, and by
everything that it uses: constants, defaults, closures, globals, the state of objects.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""
SUFFIXES = ("py", *(suffix.lstrip(".") for suffix in importlib.machinery.EXTENSION_SUFFIXES))
GENERATED = ("__firstlineno__", "__static_attributes__", "__slotnames__", "__doc__", "_abc_impl")
"""Attributes that Python adds to a class."""
DIGITS = 16


def imported_digest(reference: str, value: Any) -> str:
    """Digest of the code behind ``package.module:name``, which was imported as ``value``.

    Examples
    --------
    >>> len(imported_digest("json:dumps", None))
    16
    """
    files = _sources(reference.partition(":")[0])
    if not files:  # such as a module of a notebook
        return value_digest(value)
    digest = hashlib.sha256()
    for file, folder in sorted(files.items()):
        content = file.read_bytes()
        # Relative to the folder: moving a project does not change the digest.
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]


def source_files(name: str) -> list[Path]:
    """The user's files that run when a module is imported, sorted by name.

    For an installed package these are all its sources; for the standard library none.
    """
    return sorted(_sources(name))


def _sources(name: str) -> dict[Path, Path]:
    """Each of these files, and the folder in which its topmost package lies."""
    root, top = _root(name), name.partition(".")[0]
    if root is None or top in sys.stdlib_module_names:
        return {}
    if _is_installed(root):
        return dict.fromkeys(sorted((root / top).rglob("*.py")) or _files_of(root, top), root)
    known: dict[Path, Path] = {}
    pending = [(name, root)]
    asked = {name}
    while pending:
        module, folder = pending.pop()
        files = list(_files_of(folder, module))
        if not files and (elsewhere := _own_root(module)):
            folder, files = elsewhere, list(_files_of(elsewhere, module))
        for file in files:
            if file not in known:
                known[file] = folder
                wanted = set(_imports(file, folder)) - asked
                asked |= wanted
                pending += [(imported, folder) for imported in wanted]
    return known


def _own_root(name: str) -> Path | None:
    """The folder of a module of the user's own; None for one of Python, or of an installed package."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    root = _root(name)
    return None if root is None or _is_installed(root) else root


def _root(name: str) -> Path | None:
    """The folder of the topmost package of a module; None for one without a file."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is not None and not places and spec.has_location and spec.origin:
        places = [spec.origin]
    return Path(places[0]).parent if places else None


def _is_installed(folder: Path) -> bool:
    return any(part in INSTALLED for part in folder.parts)


def _files_of(root: Path, name: str) -> Iterator[Path]:
    """Yield the file of a module below a folder, and those of the packages that contain it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        for candidate in (place / "__init__", place):
            yield from filter(Path.is_file, (Path(f"{candidate}.{suffix}") for suffix in SUFFIXES))


def _imports(file: Path, root: Path) -> Iterator[str]:
    """Yield names of the modules that a source file may import, also inside functions."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # imported conditionally, or not at all
        return
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            if _is_own(origin):
                yield from (f"{origin}.{alias.name}".lstrip(".") for alias in node.names)


def _is_own(name: str) -> bool:
    """Return whether a name does not belong to halotile, which is identified by its version."""
    return name.partition(".")[0] != "halotile"


def value_digest(value: Any) -> str:
    """Digest of a function or an object, and everything that it uses.

    Examples
    --------
    >>> def times(factor):
    ...     return lambda image: image * factor
    >>> value_digest(times(2)) == value_digest(times(2)), value_digest(times(2)) == value_digest(times(3))
    (True, False)
    """
    return _Walk(value).digest.hexdigest()[:DIGITS]


def whole_digest(value: Any, *, with_code: bool = True) -> str | None:
    """Digest in full length; None if a part cannot be inspected, such as an open file or compiled code.

    ``with_code``: whether classes and functions count with their code, or by their names alone.

    Examples
    --------
    >>> import threading
    >>> len(whole_digest([1, 2])), whole_digest([threading.Lock()]) is None
    (64, True)
    """
    walk = _Walk(value, with_code)
    return walk.digest.hexdigest() if walk.is_whole else None


def loaded_code() -> dict[str, str] | None:
    """Digests of the user's files that this process imported, and of the installed packages, without halotile.

    None if they cannot be determined: a file was deleted, or lies in an archive.
    """
    try:
        digests = {"installed": _installed()}
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not _is_foreign(name.partition(".")[0]):
                digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
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

    Examples
    --------
    >>> qualified_name(functools.partial(value_digest))
    'halotile.tasks.user_code:value_digest'
    """
    if isinstance(value, functools.partial):
        return qualified_name(value.func)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


class _Walk:
    """Traverse a value once and feed its parts to a digest."""

    def __init__(self, value: Any, with_code: bool = True) -> None:
        self.digest = hashlib.sha256()
        self.with_code = with_code
        self.is_whole = True
        self.seen: dict[int, tuple[int, Any]] = {}
        """By address: the number of the object, and the object itself, so that its address is not reused."""
        self.take(value)

    def update(self, *words: object) -> None:
        for word in words:
            text = str(word).encode()
            self.digest.update(b"%d:" % len(text) + text)

    def take(self, value: Any) -> None:
        kind = type(value)
        if value is None or value is Ellipsis or kind in (bool, int, float, complex, str, bytes):
            self.update(kind.__name__, repr(value))
            return
        if id(value) in self.seen:
            self.update("again", self.seen[id(value)][0])
            return
        self.seen[id(value)] = len(self.seen), value
        self._take_compound(value)

    def _take_compound(self, value: Any) -> None:
        if isinstance(value, tuple | list):
            self._take_all(type(value).__name__, value)
        elif isinstance(value, set | frozenset):  # in the same order in all processes
            self._take_all("set", sorted(map(value_digest, value)))
        elif type(value) is dict:  # their order may matter, such as that of the layers of a network
            self._take_mapping(value)
        elif isinstance(value, types.MappingProxyType):
            self._take_mapping(_sorted(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.update("array", value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
        elif "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            self._take_tensor(value)
        elif isinstance(value, types.CodeType):
            self._take_code(value)
        elif isinstance(value, types.FunctionType):
            self._take_function(value)
        elif isinstance(value, functools.partial):
            self._take_all("partial", (value.func, value.args, dict(sorted(value.keywords.items()))))
        elif isinstance(value, types.MethodType):
            self._take_all("method", (value.__func__, value.__self__))
        elif isinstance(value, type):
            self._take_class(value)
        elif isinstance(value, types.ModuleType):
            self._take_module(value)
        elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            self._take_all(type(value).__name__, (value.__wrapped__,))
        elif isinstance(value, property):
            self._take_all("property", (value.fget, value.fset))
        else:
            self._take_object(value)

    def _take_all(self, what: str, values: Any) -> None:
        values = list(values)
        self.update(what, len(values))
        for value in values:
            self.take(value)

    def _take_mapping(self, mapping: Mapping[Any, Any]) -> None:
        self.update("mapping", len(mapping))
        for key, value in mapping.items():
            self.take(key)
            self.take(value)

    def _take_tensor(self, tensor: Any) -> None:
        import torch

        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.update(
            "tensor", tensor.dtype, tuple(tensor.shape), hashlib.sha256(numbers.tobytes()).hexdigest()
        )

    def _take_code(self, code: types.CodeType) -> None:
        self.update("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
        self._take_all("constants", code.co_consts)

    def _take_function(self, function: types.FunctionType) -> None:
        self.update("function", function.__module__, function.__qualname__)
        if self.with_code:
            self.take(function.__code__)
        self._take_all("defaults", (function.__defaults__, function.__kwdefaults__, function.__dict__))
        for cell in function.__closure__ or ():
            try:
                self.take(cell.cell_contents)
            except ValueError:  # the cell is still empty
                self.update("empty")
        if not self.with_code or _is_foreign(
            function.__module__
        ):  # its closure may hold the user's code, its globals do not
            return
        named = sorted(set(_names(function.__code__)) & function.__globals__.keys())
        self._take_mapping({name: function.__globals__[name] for name in named})

    def _take_class(self, kind: type) -> None:
        self.update("class", kind.__module__, kind.__qualname__)
        if not self.with_code or _is_foreign(kind.__module__):
            return
        self._take_all("bases", kind.__bases__)
        # Slots are included with the objects that fill them.
        slots = types.MemberDescriptorType | types.GetSetDescriptorType
        items = vars(kind).items()
        self._take_mapping(
            _sorted({k: v for k, v in items if k not in GENERATED and not isinstance(v, slots)})
        )

    def _take_module(self, module: types.ModuleType) -> None:
        self.update("module", module.__name__)
        if not _is_foreign(module.__name__):
            self.update(*(file.read_bytes() for file in source_files(module.__name__)))

    def _take_object(self, value: Any) -> None:
        """Take any other object by the parts that pickle would store."""
        self.take(type(value))
        try:
            registered = copyreg.dispatch_table.get(type(value))
            parts = registered(value) if registered else value.__reduce_ex__(4)
        except Exception:  # such as an open file or a lock
            self.is_whole = False
            return
        if isinstance(parts, str):
            self.update(getattr(value, "__module__", ""), parts)
            return
        make, arguments, *state = parts
        self.update(getattr(make, "__qualname__", ""))
        self._take_all("object", [arguments, *(list(s) if isinstance(s, Iterator) else s for s in state)])


def _sorted(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A mapping in the order of its keys, if they have one."""
    return dict(sorted(mapping.items())) if all(isinstance(key, str) for key in mapping) else mapping


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield every global name in a function, and in those defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@functools.lru_cache(maxsize=1024)
def _is_foreign(module: str | None) -> bool:
    """Return whether a module belongs to Python, an installed package, or halotile."""
    top = (module or "__main__").partition(".")[0]
    if top in sys.stdlib_module_names or not _is_own(top):
        return True
    root = _root(top)
    return root is not None and _is_installed(root)
