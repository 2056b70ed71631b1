"""Lookup of built-in modules and plug-ins by the names that jobs use.

A built-in is the module ``halotile/<layer>/<kind>/<name>.py``, with underscores where its name has hyphens; it is
imported on first use. A plug-in is an entry point of the group ``halotile.<kind>``::

    [project.entry-points."halotile.denoisers"]
    mine = "my_package.denoising"

Built-ins take precedence: installing a package cannot change the meaning of an existing job. Listing the names
imports nothing.
"""

import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, MissingPackage, UnknownName

_PACKAGE = Path(__file__).parent
_LAYERS = ("storage", "tasks", "graphs")
_FOLDERS = ("jobs",)  # kinds whose extensions are folders, not files


def optional(use: str, module: str, install: str) -> Any:
    """Import a module of an optional package, which ``use`` needs: a sentence such as "an HDF5 file is read with h5py"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(f"{use}, which is not installed. Write: pip install {install}") from error


def names(kind: str) -> list[str]:
    """Every name that :func:`find` accepts, sorted.

    Parameters
    ----------
    kind : str
        A folder of extensions: ``"formats"``, ``"denoisers"``, ``"clusters"``, ...

    Examples
    --------
    >>> "npy" in names("formats")
    True
    """
    return sorted({*_built_in(kind), *(point.name for point in _plug_ins(kind))})


def find(kind: str, name: str) -> Any:
    """Import and return the module or plug-in object of this name.

    Parameters
    ----------
    kind : str
        A folder of extensions: ``"formats"``, ``"denoisers"``, ``"clusters"``, ...
    name : str
        Name of a file in that folder, or of an entry point in the group ``halotile.<kind>``.

    Returns
    -------
    module or object
        The module of a built-in; for a plug-in, the object that its entry point names.

    Raises
    ------
    UnknownName
        When the name is neither a built-in nor a plug-in.
    ConfigError
        When two packages offer it, or the plug-in cannot be imported.

    Examples
    --------
    >>> find("formats", "npy").__name__
    'halotile.storage.formats.npy'
    """
    if name in _built_in(kind):
        return importlib.import_module(f"halotile.{_layer_of(kind)}.{kind}.{name.replace('-', '_')}")
    points = [point for point in _plug_ins(kind) if point.name == name]
    word = singular(kind)
    if not points:
        raise UnknownName(_unknown(word, name, names(kind)))
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            f"{word} {name!r} is ambiguous: it is offered by {' and '.join(sorted(p.value for p in points))}. "
            "Uninstall one of the packages."
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{word} {name!r} is the plug-in {points[0].value!r}, which cannot be loaded: "
            f"{error}. Repair or uninstall that package."
        ) from error


def singular(kind: str) -> str:
    """The noun for one entry of a registry.

    >>> singular("denoisers"), singular("fidelities")
    ('denoiser', 'fidelity')
    """
    return f"{kind.removesuffix('ies')}y" if kind.endswith("ies") else kind.removesuffix("s")


@lru_cache
def _built_in(kind: str) -> frozenset[str]:
    """Names of the modules in the folder of this kind, or of its folders where each extension is one.

    ``base`` defines the interface; a folder beside modules, or a module beside folders, is shared by all of them.
    """
    found = pkgutil.iter_modules([str(_PACKAGE / _layer_of(kind) / kind)])
    modules = (module.name for module in found if module.ispkg == (kind in _FOLDERS))
    return frozenset(name.replace("_", "-") for name in modules if name != "base" and not name.startswith("_"))


@lru_cache
def _layer_of(kind: str) -> str:
    """The layer that has a folder of this kind."""
    for layer in _LAYERS:
        if (_PACKAGE / layer / kind / "__init__.py").is_file():
            return layer
    folders = [entry.parent.name for layer in _LAYERS for entry in (_PACKAGE / layer).glob("*/__init__.py")]
    raise UnknownName(_unknown("kind of extension", kind, folders))


@lru_cache
def _plug_ins(kind: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points that installed packages declare for this kind, cached because scanning them takes 10 ms."""
    return tuple(importlib.metadata.entry_points(group=f"halotile.{kind}"))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Error message for an unknown name, with the closest match and all valid names."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{what} {name!r} is not known here. {hint}Write one of: {', '.join(known)}."
