"""The exchange of tensors between ranks, of which all collectives are made; its gradient is the exchange in the other direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from halotile.tasks.groups.group import TorchGroup, talking

PartShapes = Sequence[Sequence[int]]


def shapes_like(x: torch.Tensor, dim: int, lengths: Sequence[int]) -> list[list[int]]:
    """Shapes like that of ``x`` with other lengths along an axis."""
    return [[n if axis == dim % x.ndim else m for axis, m in enumerate(x.shape)] for n in lengths]


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Tensors for each rank, and those of all ranks for this one.

    Packing belongs to it: torch.cat leaves empty tensors out of the graph, and a rank that sends nothing has to take part in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, group: TorchGroup, shapes: PartShapes, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.shapes = group, [part.shape for part in parts]
        if memory := group.memory_for(parts[0]):
            places = [parts[0].new_empty(*shape) for shape in shapes]
            memory.exchange(parts, places)
            places[group.rank].copy_(parts[group.rank])
            return tuple(places)
        return _exchanged(parts, shapes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_Exchange.apply(ctx.group, ctx.shapes, *gradients)


class _Transpose(torch.autograd.Function):  # type: ignore[misc]
    """A tensor split along one axis, a part for each rank, and those of all ranks for this one joined along another; its gradient is the way back.

    Where ranks share memory, each number is copied once by the rank that has it and once by that which gets it, to its place in the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: TorchGroup,
        x: torch.Tensor,
        split: tuple[int, Sequence[int]],
        joined: tuple[int, Sequence[int]],
    ) -> torch.Tensor:
        ctx.group, ctx.split, ctx.joined = group, split, joined
        if group.is_alone:  # the layout that it has on ranks, so that what follows has their bits
            return x.clone(memory_format=torch.contiguous_format)
        parts = x.split([*split[1]], split[0])
        own, (axis, lengths) = parts[group.rank], joined
        shape = [*own.shape]
        shape[axis] = sum(lengths)
        if memory := group.memory_for(x):
            result = x.new_empty(shape)
            places = result.split([*lengths], axis)
            memory.exchange(parts, places)
            places[group.rank].copy_(own)
            return result
        return torch.cat(_exchanged(parts, shapes_like(own, axis, lengths), group), axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        return None, _Transpose.apply(ctx.group, gradients[0], ctx.joined, ctx.split), None, None


def _exchanged(
    parts: Sequence[torch.Tensor], shapes: PartShapes, group: TorchGroup
) -> tuple[torch.Tensor, ...]:
    """The same by torch.distributed, packed into one message for each rank."""
    sent, received = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
    flat = parts[0].new_empty(sum(sent))
    for part, place in zip(parts, flat.split(sent), strict=True):  # torch.cat would copy slices twice
        place.view(part.shape).copy_(part)
    result = flat.new_empty(sum(received))
    with talking(f"exchange of {flat.numel()} numbers"):
        dist.all_to_all_single(result, flat, received, sent, group=group.process_group)
    return tuple(part.view(*shape) for part, shape in zip(result.split(received), shapes, strict=True))


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


def transpose(
    x: torch.Tensor,
    group: TorchGroup,
    split: tuple[int, Sequence[int]],
    joined: tuple[int, Sequence[int]],
) -> torch.Tensor:
    """Split a tensor along an axis, send each rank its part, and join theirs along another axis; differentiable any number of times.

    Parameters
    ----------
    x : Tensor
        The part of this rank.
    group : TorchGroup
        The ranks.
    split, joined : tuple of int and sequence of int
        An axis, and the lengths of the parts along it, by rank.

    Examples
    --------
    >>> transpose(torch.ones(2, 3), TorchGroup(), (1, [3]), (0, [2])).shape
    torch.Size([2, 3])
    """
    result: torch.Tensor = _Transpose.apply(group, x, split, joined)
    return result
