"""A user's own model of the patterns: a torch module that is imported by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halotile.errors import ConfigError
from halotile.tasks.options import import_from, import_reference
from halotile.tasks.ptychography.recipe import ScanRecipe

NEEDED = {"object": "rows, columns", "probe": "modes, rows, columns"}
"""Attributes that a module has for the result, complex tensors, and their axes."""


def built_module(recipe: ScanRecipe) -> torch.nn.Module:
    """Build the user's module. Runs the user's code."""
    import_from(recipe.import_folder)
    assert recipe.module is not None
    torch.manual_seed(recipe.seed)
    module = import_reference(recipe.module)(recipe.scan, recipe.patterns, **recipe.module_options)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{recipe.module} returned {type(module).__name__}. Write one that returns a torch.nn.Module."
        )
    for name, axes in NEEDED.items():
        found = getattr(module, name, None)
        if not isinstance(found, torch.Tensor) or not found.is_complex() or found.ndim != axes.count(",") + 1:
            what = f"of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else "missing"
            raise ConfigError(
                f"the {name} of {recipe.module} is {what}. Add it as an attribute or a property: a complex tensor, ({axes})."
            )
    if wrong := [
        name for name, value in module.named_parameters() if value.dtype not in (torch.float32, torch.complex64)
    ]:
        raise ConfigError(
            f"the parameter {wrong[0]} of {recipe.module} is in double precision. Write float32 or complex64."
        )
    return module.train()


def load(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Let a module compute with the tensors of a state."""
    for name, value in module.named_parameters():
        if name in parameters:
            value.data = parameters[name]


def module_contents(recipe: ScanRecipe, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Object, probe and all parameters by their names."""
    module = built_module(recipe)
    load(module, parameters)
    found = {name: getattr(module, name).detach() for name in NEEDED}
    return found | {f"parameters/{name}": value for name, value in parameters.items()}
