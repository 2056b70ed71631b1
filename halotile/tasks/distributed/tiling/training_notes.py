"""What somebody who trains a denoiser through tiles should know of it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from types import CellType
from typing import Any

import numpy as np
import torch

from halotile.tasks.distributed.transport.contents import contents_of, of_cell, running_statistics


def remarks(processor: Any, with_gradients: bool) -> dict[str, str]:
    """What a call of this processor does not do that it would do without tiles, by a word for each.

    Parameters
    ----------
    processor : callable
        A network, or a function.
    with_gradients : bool
        Whether gradients are wanted.

    Examples
    --------
    >>> net = torch.nn.Linear(1, 1)
    >>> list(remarks(net, True)), list(remarks(lambda x: net(x), True)), list(remarks(lambda x: net(x), False))
    ([], ['weights'], [])
    """
    found = {}
    held = contents_of(processor)
    if with_gradients and (lost := _lost_weight(processor, held)):
        found["weights"] = (
            f"the denoiser ({name_of(processor)}) holds weights that want gradients ({lost}), and distribute sees weights of a network "
            "only: these get none. Write distribute(network, ...) with the network itself, or requires_grad_(False)."
        )
    if drawn := _foreign_generator(held):
        found["random numbers"] = (
            f"the denoiser ({name_of(processor)}) holds a random number generator ({drawn}) that is none of torch: what it draws depends on "
            "which worker computes which tile. Write torch.randn and the like, which are the same for any number of workers."
        )
    layers = [name for each in held for name, _ in running_statistics(each)]
    if layers:
        found["statistics"] = (
            f"the denoiser ({name_of(processor)}) is in training mode, and has layers with running statistics ({layers[0]}): each "
            "batch of tiles is normalised by its own, and those that eval() would use stay as they are. Write eval(), for the network "
            "or for these layers, or take layers without, such as GroupNorm."
        )
    return found


def _lost_weight(processor: Any, held: list[Any]) -> str | None:
    """The name of a weight that wants a gradient, and is none of a network's own."""
    known = {id(p) for p in processor.parameters()} if isinstance(processor, torch.nn.Module) else set()
    lost = [
        each
        for each in held
        if isinstance(each, torch.Tensor) and each.requires_grad and id(each) not in known
    ]
    if not lost:
        return None
    networks = [each for each in held if isinstance(each, torch.nn.Module)]
    names = {id(p): f"{type(net).__name__}.{name}" for net in networks for name, p in net.named_parameters()}
    return next((names[id(each)] for each in lost if id(each) in names), "a tensor")


def _foreign_generator(held: list[Any]) -> str | None:
    """The type of a generator of NumPy or Python among what is held."""
    for each in held:
        inside: Iterable[Any] = ()
        if isinstance(each, dict):
            inside = each.values()
        elif isinstance(each, CellType):
            inside = of_cell(each)
        elif isinstance(each, list | tuple | set | frozenset | deque):
            inside = each
        for thing in inside:
            if isinstance(thing, np.random.Generator | np.random.RandomState | random.Random):
                return f"{type(thing).__module__.split('.')[0]}'s {type(thing).__name__}"
    return None


def name_of(processor: Any) -> str:
    """What messages call a processor."""
    return str(getattr(processor, "__name__", type(processor).__name__))
