"""Warnings about networks that train or draw random numbers differently when they run on tiles."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from types import CellType
from typing import Any

import numpy as np
import torch

from halotile.tasks.distributed.transport.contents import cell_content, contents_of, running_statistics


def training_warnings(processor: Any, with_gradients: bool) -> dict[str, str]:
    """List the differences between a call of this processor on tiles and on the whole image, by topic.

    Parameters
    ----------
    processor : callable
        A network or a function.
    with_gradients : bool
        True if gradients are wanted.

    Examples
    --------
    >>> net = torch.nn.Linear(1, 1)
    >>> list(training_warnings(net, True))
    []
    >>> [list(training_warnings(lambda x: net(x), with_gradients)) for with_gradients in (True, False)]
    [['weights'], []]
    """
    messages = {}
    contents = contents_of(processor)
    name = f"the denoiser ({name_of(processor)})"
    if with_gradients and (weight := _unknown_weight(processor, contents)):
        messages["weights"] = (
            f"{name} holds weights that want gradients ({weight}), and distribute knows the weights of a network only: these get "
            "none. Write distribute(network, ...) with the network itself, or requires_grad_(False)."
        )
    if generator := _foreign_generator(contents):
        messages["random numbers"] = (
            f"{name} holds a random number generator ({generator}) that is none of torch: its numbers depend on which worker "
            "computes which tile. Write torch.randn and the like, which are the same for any number of workers."
        )
    layers = [layer for held in contents for layer, _ in running_statistics(held)]
    if layers:
        messages["statistics"] = (
            f"{name} is in training mode, and has layers with running statistics ({layers[0]}): each batch of tiles is normalised "
            "by its own statistics, and those that eval() uses are not updated. Write eval(), for the network or for these "
            "layers, or use layers without them, such as GroupNorm."
        )
    return messages


def _unknown_weight(processor: Any, contents: list[Any]) -> str | None:
    """Name of a weight that wants a gradient and is not a parameter of the network itself."""
    known = {id(p) for p in processor.parameters()} if isinstance(processor, torch.nn.Module) else set()
    tensors = [held for held in contents if isinstance(held, torch.Tensor) and held.requires_grad]
    unknown = [id(tensor) for tensor in tensors if id(tensor) not in known]
    if not unknown:
        return None
    networks = [held for held in contents if isinstance(held, torch.nn.Module)]
    names = {id(p): f"{type(net).__name__}.{name}" for net in networks for name, p in net.named_parameters()}
    return next((names[key] for key in unknown if key in names), "a tensor")


def _foreign_generator(contents: list[Any]) -> str | None:
    """Type of a NumPy or Python generator among the contents."""
    for held in contents:
        entries: Iterable[Any] = ()
        if isinstance(held, dict):
            entries = held.values()
        elif isinstance(held, CellType):
            entries = (cell_content(held),)
        elif isinstance(held, list | tuple | set | frozenset | deque):
            entries = held
        for entry in entries:
            if isinstance(entry, np.random.Generator | np.random.RandomState | random.Random):
                return f"{type(entry).__module__.split('.')[0]}'s {type(entry).__name__}"
    return None


def name_of(processor: Any) -> str:
    """Name of a processor in messages."""
    return str(getattr(processor, "__name__", type(processor).__name__))
