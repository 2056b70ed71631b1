"""What an object holds: its networks, tensors and generators, however deep they lie."""

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
"""Packages whose objects are not looked into, networks apart: what they keep is their own affair."""
CONTAINERS = (list, dict, set, deque)


def contents_of(*things: Any) -> list[Any]:
    """Tensors, generators, networks, containers and cells that objects hold, each once.

    Attributes of an object are a container. Frozen ones are looked into, but theirs is none: what is in there besides
    fields is a cache.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> [type(each).__name__ for each in contents_of(lambda x: layer(x)) if isinstance(each, torch.Tensor)]
    ['Parameter']
    """
    found: dict[int, Any] = {}
    ahead = list(things)
    while ahead:
        each = ahead.pop()
        if id(each) not in found:
            inside = _inside(each)
            if inside is not None:
                found[id(each)] = each
                ahead += inside
    return list(found.values())


def _inside(thing: Any) -> Iterable[Any] | None:
    """What an object holds directly; None for those that hold nothing of interest."""
    if isinstance(thing, torch.Tensor | torch.Generator):
        return ()
    if isinstance(thing, dict):
        return None if thing is vars(builtins) else thing.values()
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return thing
    if isinstance(thing, CellType):
        return of_cell(thing)
    if isinstance(thing, FunctionType):
        return _of_function(thing)
    if isinstance(thing, MethodType):
        return (thing.__self__,)
    if isinstance(thing, functools.partial):
        return (thing.func, thing.args, thing.keywords)
    return _of_object(thing)


def _of_object(thing: Any) -> Iterable[Any] | None:
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(thing, type | ModuleType):
        return None
    if type(thing).__module__.split(".")[0] in OPAQUE and not isinstance(thing, torch.nn.Module):
        return None
    return attributes.values() if _is_frozen(thing) else (attributes,)


def _is_frozen(thing: Any) -> bool:
    """Whether it is a dataclass whose fields cannot be set."""
    return bool(getattr(getattr(type(thing), "__dataclass_params__", None), "frozen", False))


def of_cell(cell: CellType) -> Iterable[Any]:
    """What is in a cell of a closure, if there is anything yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing yet
        return ()


def _of_function(function: FunctionType) -> Iterable[Any]:
    """What it closes over, its defaults, and the globals that it names, unless it is one of an imported module."""
    held: list[Any] = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]
    module = sys.modules.get(function.__module__)
    if module is None or function.__globals__ is not vars(module):
        return [*held, function.__globals__]  # unpickled by value: the globals are its own
    if module.__name__ == "__main__" or getattr(module, function.__qualname__, None) is not function:
        held += [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
    return held


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def running_statistics(thing: Any) -> list[tuple[str, torch.nn.Module]]:
    """Layers that change their buffers when they are called in training mode, with their names.

    Examples
    --------
    >>> running_statistics(torch.nn.Sequential(torch.nn.BatchNorm2d(1)))[0][0], running_statistics(torch.nn.BatchNorm2d(1).eval())
    ('0', [])
    """
    if not isinstance(thing, torch.nn.Module):
        return []
    return [
        (name or type(layer).__name__, layer)
        for name, layer in thing.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
        and layer.training
        and layer.running_mean is not None
    ]
