"""What an object is to ``distribute``, as far as its type tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.errors import ConfigError

KINDS = ("physics", "linear_physics", "denoiser", "prior", "data_fidelity", "module", "parameters")


def recognise(thing: Any) -> str:
    """The kind of an object.

    Raises
    ------
    ConfigError
        When it could be several; the message says what was seen.

    Examples
    --------
    >>> recognise(torch.nn.Parameter(torch.ones(1)))
    'parameters'
    """
    several = isinstance(thing, list | tuple)
    first = thing[0] if several and len(thing) else thing
    if isinstance(first, torch.nn.Parameter):
        return "parameters"
    if kind := _of_deepinv(thing, several):
        return kind
    if isinstance(thing, torch.nn.Module):
        raise ConfigError(
            f"Cannot auto-detect generic torch.nn.Module: {type(thing).__name__} could be a denoiser or a model. "
            "Write type_object='denoiser' to run it on tiles."
        )
    if several:
        names = ", ".join(dict.fromkeys(type(each).__name__ for each in thing)) or "nothing"
        raise ConfigError(
            f"the {type(thing).__name__} holds {names}: what they are together is not clear. Write type_object, one of "
            f"{', '.join(KINDS)}."
        )
    raise ConfigError(
        f"the object is a {type(thing).__name__}{' that can be called' if callable(thing) else ''}: what it is for is not "
        f"clear. Write type_object, one of {', '.join(KINDS)}."
    )


def unstacked(things: Sequence[Any]) -> list[Any]:
    """The operators of stacks, and those that are none."""
    return [part for thing in things for part in getattr(thing, "physics_list", [thing])]


def _of_deepinv(thing: Any, several: bool) -> str | None:
    """The kind of an object of deepinv, or of several."""
    try:
        from deepinv.models.base import Denoiser
        from deepinv.optim import BaseOptim
        from deepinv.optim.data_fidelity import DataFidelity
        from deepinv.optim.prior import Prior
        from deepinv.physics import LinearPhysics, Physics
    except ImportError:
        return None
    parts = list(thing) if several else [thing]
    if not parts:
        return None
    if all(isinstance(part, Physics) for part in parts):
        return (
            "linear_physics"
            if all(isinstance(part, LinearPhysics) for part in unstacked(parts))
            else "physics"
        )
    if all(isinstance(part, DataFidelity) for part in parts):
        return "data_fidelity"
    for kind, name in ((BaseOptim, "module"), (Denoiser, "denoiser"), (Prior, "prior")):
        if isinstance(thing, kind):
            return name
    return None
