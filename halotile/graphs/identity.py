"""What makes two runs the same job: everything that can change a bit of the output, or its place in a shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import halotile


def package_version(name: str) -> str:
    """The installed version of a package, found without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def code_versions() -> dict[str, str]:
    """The code whose rounding the result depends on."""
    return {
        "halotile": halotile.__version__,
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
    }


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A digest of an identity: equal for equal values, whatever the order of their keys."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Where two identities differ, one readable line each.

    Examples
    --------
    >>> differences({"depth": [7], "codec": "lz4"}, {"depth": [9], "codec": "lz4"})
    ['depth was [7], is [9]']
    """
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        name = f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{name}.")
        elif old != new:
            lines.append(f"{name} was {_word(old)}, is {_word(new)}")
    return lines


def _word(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, default=str)
