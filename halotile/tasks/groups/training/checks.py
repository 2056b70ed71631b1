"""Checks of a training: of its arguments, and of the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError


def type_name(stepped: Any) -> str:
    """Name of the type of an optimizer or a scheduler, with those of the schedulers that it is made of.

    Examples
    --------
    >>> type_name(None)
    'None'
    """
    if stepped is None:
        return "None"
    parts = ", ".join(map(type_name, getattr(stepped, "_schedulers", ())))
    return f"{type(stepped).__name__}({parts})" if parts else type(stepped).__name__


def check_settings(path: Path, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a training with other settings, by their names."""
    others = [name for name, value in own.items() if stored.get(name) != value]
    if others:
        was, now = (", ".join(f"{name} {each.get(name)}" for name in others) for each in (stored, own))
        raise ConfigError(
            f"{path} is the checkpoint of another network or optimizer, or of other settings: it has {was}, and this training {now}. "
            "Write what it has, or another path."
        )
