"""The page for users of deepinv.distributed maps every public name, and halotile's take every keyword."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import halotile

peer: Any = pytest.importorskip("deepinv.distributed")
PAGE = (Path(__file__).parents[2] / "docs/distribute.md").read_text()
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(peer.__path__, f"{peer.__name__}."):
        yield importlib.import_module(module.name)


def public_names() -> set[str]:
    """Functions, classes and their methods."""
    names: set[str] = set()
    for module in modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
                continue
            names.add(name)
            if inspect.isclass(value):
                names |= {method for method, member in vars(value).items() if callable(member)}
    return {name for name in names - {"backward", "Index"} if not name.startswith("_")}


def attributes() -> set[str]:
    """Return the attributes of a context that is not open."""
    return {name for name in vars(peer.DistributedContext()) if not name.startswith("_")}


def keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def test_every_public_name_is_on_the_page() -> None:
    names = public_names()
    assert {"distribute", "TilingStrategy", "map_reduce_gather", "A_vjp", "all_gather"} <= names
    assert sorted(names - NAMED) == []


def test_every_keyword_and_attribute_of_the_two_names_is_on_the_page() -> None:
    names = keywords(peer.distribute) | keywords(peer.DistributedContext) | attributes()
    assert sorted(names - NAMED) == []


def test_the_two_names_take_every_keyword() -> None:
    from halotile.graphs.distributed.distribute import IGNORED_KEYWORDS

    assert keywords(peer.DistributedContext) <= keywords(halotile.DistributedContext)
    assert keywords(peer.distribute) <= keywords(halotile.distribute) | set(IGNORED_KEYWORDS)


def test_a_context_has_every_attribute_and_method() -> None:
    ours = halotile.DistributedContext(device_mode="cpu")
    methods = {name for name, value in vars(peer.DistributedContext).items() if callable(value)}
    expected = attributes() | {name for name in methods if not name.startswith("_")}
    assert [name for name in sorted(expected) if not hasattr(ours, name)] == []


def test_new_keywords_are_on_the_page() -> None:
    ours = keywords(halotile.distribute) | keywords(halotile.DistributedContext)
    assert sorted(ours - NAMED) == []
