"""The kinds of objects that ``distribute`` accepts, and their detection by type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.errors import ConfigError

KINDS = ("physics", "linear_physics", "denoiser", "prior", "data_fidelity", "module", "parameters")


def detect_kind(value: Any) -> str:
    """Detect the kind of an object.

    Raises
    ------
    ConfigError
        When the kind is ambiguous; with the type of the object.

    Examples
    --------
    >>> detect_kind(torch.nn.Parameter(torch.ones(1)))
    'parameters'
    """
    is_list = isinstance(value, list | tuple)
    first = value[0] if is_list and len(value) else value
    if isinstance(first, torch.nn.Parameter):
        return "parameters"
    if kind := _deepinv_kind(value, is_list):
        return kind
    if isinstance(value, torch.nn.Module):
        raise ConfigError(
            f"Cannot auto-detect generic torch.nn.Module: {type(value).__name__} could be a denoiser or a model. "
            "Write type_object='denoiser' to run it on tiles."
        )
    if is_list:
        names = ", ".join(dict.fromkeys(type(entry).__name__ for entry in value)) or "nothing"
        given = f"the {type(value).__name__} holds {names}"
    else:
        suffix = " that can be called" if callable(value) else ""
        given = f"the object is a {type(value).__name__}{suffix}"
    raise ConfigError(f"{given}: its kind is not clear. Write type_object, one of {', '.join(KINDS)}.")


def unstack(physics: Sequence[Any]) -> list[Any]:
    """Replace stacks by their operators."""
    return [part for each in physics for part in getattr(each, "physics_list", [each])]


def _deepinv_kind(value: Any, is_list: bool) -> str | None:
    """Detect the kind of one or several objects of deepinv."""
    try:
        from deepinv.models.base import Denoiser
        from deepinv.optim import BaseOptim
        from deepinv.optim.data_fidelity import DataFidelity
        from deepinv.optim.prior import Prior
        from deepinv.physics import LinearPhysics, Physics
    except ImportError:
        return None
    parts = list(value) if is_list else [value]
    if not parts:
        return None
    if all(isinstance(part, Physics) for part in parts):
        is_linear = all(isinstance(part, LinearPhysics) for part in unstack(parts))
        return "linear_physics" if is_linear else "physics"
    if all(isinstance(part, DataFidelity) for part in parts):
        return "data_fidelity"
    classes = ((BaseOptim, "module"), (Denoiser, "denoiser"), (Prior, "prior"))
    return next((kind for base, kind in classes if isinstance(value, base)), None)
