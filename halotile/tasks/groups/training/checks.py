"""Checks of a training: of its arguments, and of the checkpoint that it goes on from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halotile.errors import ConfigError

MODES = ("exact", "fast")


def check_arguments(ranks: int, slots: int, seed: int, mode: str) -> None:
    """Refuse numbers and a mode that mean nothing."""
    if slots < ranks:
        raise ConfigError(
            f"slots is {slots}, and there are {ranks} ranks: each takes at least one. Write slots={ranks} or more."
        )
    if seed < 0:
        raise ConfigError(f"seed is {seed}. Write 0 or more.")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}. Write one of {', '.join(MODES)}.")


def check_stepped_alone(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse an optimizer and a scheduler that want more for a step than that there is one."""
    if not _steps_alone(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew within a step, and here each step has one loss. "
            "Write another optimizer, such as torch.optim.Adam."
        )
    if scheduler is not None and not _steps_alone(scheduler):
        raise ConfigError(
            f"{type(scheduler).__name__} needs a metric for each step, and none is passed here. "
            "Write a scheduler that follows the number of steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )


def _steps_alone(stepped: Any) -> bool:
    """True where a step needs no arguments."""
    try:
        inspect.signature(type(stepped).step).bind(stepped)
    except TypeError:
        return False
    return True


def check_loss(value: Any) -> None:
    """Refuse a loss that is not a tensor with one number."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = (
            f"has shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"is a {type(value).__name__}"
        )
        raise ConfigError(
            f"the loss {found}. Return a tensor with one number, such as (module(data) - data).square().mean()."
        )


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


def check_settings(path: Path | None, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a training with other settings, by their names."""
    others = [name for name, value in own.items() if stored.get(name) != value]
    if others:
        was, now = (", ".join(f"{name} {each.get(name)}" for name in others) for each in (stored, own))
        raise ConfigError(
            f"{path} is the checkpoint of another network or optimizer, or of other settings: it has {was}, and this training {now}. "
            "Write what it has, or another path."
        )
