"""The contents of an object: its networks, tensors and generators, at any depth."""

from __future__ import annotations

import builtins
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

OPAQUE = {*sys.stdlib_module_names, "torch", "numpy", "dask", "distributed"}
"""Packages whose objects are not searched, except networks: their contents are internal."""
CONTAINERS = (list, dict, set, deque)


def contents_of(*objects: Any) -> list[Any]:
    """List the tensors, generators, networks, containers and cells that objects hold, each once.

    The attributes of an object count as a container, but for frozen dataclasses: what those hold besides
    fields is a cache.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> [type(held).__name__ for held in contents_of(lambda x: layer(x)) if isinstance(held, torch.Tensor)]
    ['Parameter']
    """
    found: dict[int, Any] = {}
    pending = list(objects)
    while pending:
        value = pending.pop()
        if id(value) not in found and (inside := direct_contents(value)) is not None:
            found[id(value)] = value
            pending += inside
    return list(found.values())


def wants_gradients(value: Any) -> bool:
    """Return True for an object that holds a tensor which wants a gradient.

    Examples
    --------
    >>> wants_gradients(torch.nn.Linear(1, 1)), wants_gradients([torch.ones(1)])
    (True, False)
    """
    return any(isinstance(held, torch.Tensor) and held.requires_grad for held in contents_of(value))


def direct_contents(value: Any) -> Iterable[Any] | None:
    """Return the direct contents of an object; None if it holds nothing of interest."""
    if isinstance(value, torch.Tensor | torch.Generator):
        return ()
    if isinstance(value, dict):
        return None if value is vars(builtins) else value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, CellType):
        return (cell_content(value),)
    if isinstance(value, FunctionType):
        return _function_contents(value)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return _attributes(value)


def _attributes(value: Any) -> Iterable[Any] | None:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | ModuleType):
        return None
    if type(value).__module__.split(".")[0] in OPAQUE and not isinstance(value, torch.nn.Module):
        return None
    is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    return attributes.values() if is_frozen else (attributes,)


def cell_content(cell: CellType) -> Any:
    """Return the content of a closure cell, or the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _function_contents(function: FunctionType) -> Iterable[Any]:
    """Return closure cells, defaults and, unless a function is importable, the globals it uses."""
    held: list[Any] = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]
    module = sys.modules.get(function.__module__)
    if module is None or function.__globals__ is not vars(module):
        return [*held, function.__globals__]  # unpickled by value: it has globals of its own
    if module.__name__ == "__main__" or getattr(module, function.__qualname__, None) is not function:
        held += [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
    return held


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def running_statistics(value: Any) -> list[tuple[str, torch.nn.Module]]:
    """List the layers of a network that update running statistics in training mode, with their names.

    Examples
    --------
    >>> layer = torch.nn.BatchNorm2d(1)
    >>> running_statistics(torch.nn.Sequential(layer))[0][0], running_statistics(layer.eval())
    ('0', [])
    """
    if not isinstance(value, torch.nn.Module):
        return []
    return [
        (name or type(layer).__name__, layer)
        for name, layer in value.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
        and layer.training
        and layer.running_mean is not None
    ]
