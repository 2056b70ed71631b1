"""Comparison of package versions with the workers: a difference may change bits, or fail far from its cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Client

from halotile.graphs.clusters.common.answers import ask

PACKAGES = ["halotile", "torch", "zarr", "numcodecs", "scipy"]
"""Packages besides those that Dask compares itself."""
_NEEDED = ("python", "dask", "distributed", "numpy", "cloudpickle", *PACKAGES)


def differing_versions(client: Client) -> tuple[str, ...]:
    """A line for each package that workers have in another version than this process, or not at all."""
    found = ask(client, client.get_versions, packages=PACKAGES)
    return tuple(_lines(found["client"]["packages"], found["workers"]))


def _lines(ours: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each difference.

    Examples
    --------
    >>> _lines({"numpy": "2.4"}, {"a": {"packages": {"numpy": "2.4"}}, "b": {"packages": {"numpy": "2.3"}}})
    ['numpy is 2.4 here, and 2.3 on b']
    >>> _lines({"halotile": "0.1"}, {"a": {"packages": {"halotile": None}}})
    ['halotile is 0.1 here, and not there on a']
    """
    lines = []
    for package in _NEEDED:
        theirs: dict[str, list[str]] = {}
        for name, facts in workers.items():
            theirs.setdefault(str(facts["packages"].get(package) or "not there"), []).append(name)
        here = str(ours.get(package) or "not there")
        others = [f"{version} on {_listed(names)}" for version, names in theirs.items() if version != here]
        if package in ours and others:
            lines.append(f"{package} is {here} here, and {', '.join(others)}")
    return lines


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
