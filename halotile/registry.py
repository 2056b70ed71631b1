"""Turns a name in a job into one file of halotile, or one entry point of an installed package.

A built-in is the module ``halotile/<room>/<kind>/<name>.py``, with underscores where its name has hyphens; it is
imported when it is first asked for. A plug-in is an entry point of the group ``halotile.<kind>``::

    [project.entry-points."halotile.denoisers"]
    mine = "my_package.denoising"

Built-ins come first: installing a package cannot change what a job meant before. Listing the names
imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, UnknownName

_PACKAGE = Path(__file__).parent
_ROOMS = ("storage", "tasks", "graphs")
_FOLDERS = ("jobs",)
"""Kinds whose extensions are folders, not files."""


def names(kind: str) -> list[str]:
    """Every name that :func:`find` answers to, sorted.

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
    """The module or plug-in object of this name, imported now.

    Parameters
    ----------
    kind : str
        A folder of extensions: ``"formats"``, ``"denoisers"``, ``"clusters"``, ...
    name : str
        Name of a file in that folder, or of an entry point in the group ``halotile.<kind>``.

    Returns
    -------
    module or object
        The module of a built-in; of a plug-in, whatever its entry point names.

    Raises
    ------
    UnknownName
        When nothing answers to the name.
    ConfigError
        When two packages offer it, or the plug-in cannot be imported.

    Examples
    --------
    >>> find("formats", "npy").__name__
    'halotile.storage.formats.npy'
    """
    if name in _built_in(kind):
        return importlib.import_module(f"halotile.{_room_of(kind)}.{kind}.{name.replace('-', '_')}")
    points = [point for point in _plug_ins(kind) if point.name == name]
    if not points:
        raise UnknownName(_unknown(_singular(kind), name, names(kind)))
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            f"{_singular(kind)} {name!r} is offered by {' and '.join(sorted(p.value for p in points))}: "
            "which one is meant is not clear. Uninstall one of the packages."
        )
    return _load(kind, points[0])


def _load(kind: str, point: importlib.metadata.EntryPoint) -> Any:
    """The object that an entry point names."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_singular(kind)} {point.name!r} is the plug-in {point.value!r}, which cannot be loaded: "
            f"{error}. Repair or uninstall that package."
        ) from error


@lru_cache
def _built_in(kind: str) -> frozenset[str]:
    """Names of the modules in the folder of this kind, or of its folders where each extension is one.

    ``base`` holds the contract; a folder beside files, or a file beside folders, what all of them share.
    """
    folder = _PACKAGE / _room_of(kind) / kind
    found = pkgutil.iter_modules([str(folder)])
    modules = (module.name for module in found if module.ispkg == (kind in _FOLDERS))
    return frozenset(
        name.replace("_", "-") for name in modules if name != "base" and not name.startswith("_")
    )


@lru_cache
def _room_of(kind: str) -> str:
    """The room that has a folder of this kind."""
    for room in _ROOMS:
        if (_PACKAGE / room / kind / "__init__.py").is_file():
            return room
    folders = [entry.parent.name for room in _ROOMS for entry in (_PACKAGE / room).glob("*/__init__.py")]
    raise UnknownName(_unknown("kind of extension", kind, folders))


@lru_cache
def _plug_ins(kind: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points that installed packages declare for this kind: to look through all of them takes 10 ms."""
    return tuple(importlib.metadata.entry_points(group=f"halotile.{kind}"))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Says what was asked, the nearest name there is, and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{what} {name!r} is not known here. {hint}Write one of: {', '.join(known)}."


def _singular(kind: str) -> str:
    """One of a kind, in words."""
    return kind.removesuffix("s")
