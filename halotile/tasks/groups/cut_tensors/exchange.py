"""The exchange of tensors between ranks, of which all collectives are made; its gradient is the exchange in the other direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from halotile.tasks.groups.group import TorchGroup, talking

PartShapes = Sequence[Sequence[int]]


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Tensors for each rank, and those of all ranks for this one.

    Packing belongs to it: torch.cat leaves empty tensors out of the graph, and a rank that sends nothing has to take part in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, group: TorchGroup, shapes: PartShapes, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.shapes = group, [part.shape for part in parts]
        sent, received = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        flat = parts[0].new_empty(sum(sent))
        for part, place in zip(parts, flat.split(sent), strict=True):  # torch.cat would copy slices twice
            place.view(part.shape).copy_(part)
        result = flat.new_empty(sum(received))
        with talking(f"exchange of {flat.numel()} numbers"):
            dist.all_to_all_single(result, flat, received, sent, group=group.process_group)
        return tuple(part.view(*shape) for part, shape in zip(result.split(received), shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_Exchange.apply(ctx.group, ctx.shapes, *gradients)


def exchange(parts: Sequence[torch.Tensor], shapes: PartShapes, group: TorchGroup) -> list[torch.Tensor]:
    """Send a tensor to every rank, and return theirs; differentiable any number of times.

    All ranks must call it, and all of them in the backward pass too: what a rank receives must enter its loss, even if it is empty.

    Parameters
    ----------
    parts : sequence of Tensor
        The tensor for each rank, of one dtype on all ranks; it may be empty.
    shapes : sequence of shapes
        Shape of the tensor that comes from each rank.
    group : TorchGroup
        The ranks.

    Examples
    --------
    >>> [part.tolist() for part in exchange([torch.ones(2)], [(2,)], TorchGroup())]
    [[1.0, 1.0]]
    """
    if group.is_alone:
        return [parts[0].reshape(*shapes[0])]
    return list(_Exchange.apply(group, shapes, *parts))
