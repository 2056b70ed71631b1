"""Transfers of a tensor that is cut along one axis: gather, scatter, reduce, transpose and halos; and parameters that ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from halotile.errors import ConfigError, PeerLost
from halotile.tasks.groups.group import TorchGroup, check_rank, peer_errors

RULES = ("cut", "zero", "circular")


def halo_exchange(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int, before: int, after: int, boundary: str = "cut"
) -> torch.Tensor:
    """Extend the part of a rank by its neighbours' pixels; the gradient adds what comes back to the pixels of their owners, halves in float32.

    A halo may be longer than the parts beside it, and parts may be empty.

    Parameters
    ----------
    x : Tensor
        The part of this rank.
    group : TorchGroup
        The ranks.
    sizes : sequence of int
        Lengths of the parts along ``dim``.
    dim : int
        The axis that is cut.
    before, after : int
        Pixels that are added on either side.
    boundary : str
        Beyond the ends of the whole: ``cut`` (nothing is added), ``zero``, or ``circular``.

    Raises
    ------
    ConfigError
        When the part has another length than ``sizes`` say, or for another boundary.

    Examples
    --------
    >>> halo_exchange(torch.tensor([1.0, 2.0]), TorchGroup(), [2], 0, 1, 1, "circular").tolist()
    [2.0, 1.0, 2.0, 1.0]
    """
    if boundary not in RULES:
        raise ConfigError(f"boundary is {boundary!r}. Write one of {', '.join(RULES)}.")
    check_part(x, group, sizes, dim)
    bounds = [*accumulate(sizes, initial=0)]
    length = bounds[-1]
    wanted = [_wanted(a, b, before, after, length, boundary) for a, b in pairwise(bounds)]
    owns = [*pairwise(bounds)]
    start = bounds[group.rank]
    wide = x.to(wide_type(x))  # for a moment, so that gradients of halves are summed in float32
    slices = [
        [wide.narrow(dim, a - start, b - a).to(x.dtype) for a, b in _inside(pieces, owns[group.rank])]
        for pieces in wanted
    ]
    sent = [torch.cat(own or [wide.narrow(dim, 0, 0).to(x.dtype)], dim) for own in slices]
    mine = wanted[group.rank]
    lengths = [sum(b - a for a, b in _inside(mine, owned)) for owned in owns]
    received = exchange(sent, shapes_like(x, dim, lengths), group)
    found = _in_order(received, mine, owns, dim)
    if boundary == "zero":
        found = _padded(found, dim, max(0, before - start), max(0, bounds[group.rank + 1] + after - length))
    return found


def _wanted(start: int, stop: int, before: int, after: int, length: int, boundary: str) -> list[tuple[int, int]]:
    """The pieces of the whole that a part with its halo consists of, in order."""
    if start == stop:
        return []
    a, b = start - before, stop + after
    if boundary != "circular":
        return [(max(a, 0), min(b, length))]
    pieces = []
    while a < b:
        turn = a // length * length
        end = min(b, turn + length)
        pieces.append((a - turn, end - turn))
        a = end
    return pieces


def _inside(pieces: Sequence[tuple[int, int]], owned: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of the pieces that a rank owns."""
    cut = ((max(a, owned[0]), min(b, owned[1])) for a, b in pieces)
    return [(a, b) for a, b in cut if a < b]


def _in_order(
    received: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int]], owns: Sequence[tuple[int, int]], dim: int
) -> torch.Tensor:
    """Join what came from the ranks in the order of the pieces."""
    taken = [0] * len(owns)
    parts = [part.narrow(dim, 0, 0) for part in received]  # every rank's part keeps its place in the graph
    for piece in pieces:
        for rank, owned in enumerate(owns):
            for a, b in _inside([piece], owned):
                parts.append(received[rank].narrow(dim, taken[rank], b - a))
                taken[rank] += b - a
    return torch.cat(parts, dim)


def _padded(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """Add zeros on either side along one axis."""
    if x.shape[dim] == 0:
        return x
    sides = [x.new_zeros(shape) for shape in shapes_like(x, dim, (before, after))]
    return torch.cat([sides[0], x, sides[1]], dim)


PartShapes = Sequence[Sequence[int]]


def shapes_like(x: torch.Tensor, dim: int, lengths: Sequence[int]) -> list[list[int]]:
    """Shapes like that of ``x`` with other lengths along an axis."""
    return [[n if axis == dim % x.ndim else m for axis, m in enumerate(x.shape)] for n in lengths]


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Tensors for each rank, and those of all ranks for this one.

    Packing belongs to it: torch.cat leaves empty tensors out of the graph, and a rank that sends nothing has to take part in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, group: TorchGroup, shapes: PartShapes, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def _exchanged(parts: Sequence[torch.Tensor], shapes: PartShapes, group: TorchGroup) -> tuple[torch.Tensor, ...]:
    """The same by torch.distributed, packed into one message for each rank."""
    sent, received = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
    flat = parts[0].new_empty(sum(sent))
    for part, place in zip(parts, flat.split(sent), strict=True):  # torch.cat would copy slices twice
        place.view(part.shape).copy_(part)
    result = flat.new_empty(sum(received))
    with peer_errors(f"exchange of {flat.numel()} numbers"):
        dist.all_to_all_single(result, flat, received, sent, group=group.process_group)
    return tuple(part.view(*shape) for part, shape in zip(result.split(received), shapes, strict=True))


def exchange(parts: Sequence[torch.Tensor], shapes: PartShapes, group: TorchGroup) -> list[torch.Tensor]:
    """Send a tensor to every rank, and return theirs; differentiable any number of times.

    All ranks must call it, and all of them in the backward pass too: what a rank receives must enter its loss, even if it is empty.

    ``parts``: the tensor for each rank, of one dtype on all ranks; it may be empty; ``shapes``: shape of the tensor that comes from each rank;
    ``group``: the ranks.

    >>> [part.tolist() for part in exchange([torch.ones(2)], [(2,)], TorchGroup())]
    [[1.0, 1.0]]
    """
    if group.is_alone:
        return [parts[0].reshape(*shapes[0])]
    return list(_Exchange.apply(group, shapes, *parts))


def transpose(
    x: torch.Tensor, group: TorchGroup, split: tuple[int, Sequence[int]], joined: tuple[int, Sequence[int]]
) -> torch.Tensor:
    """Split a tensor along an axis, send each rank its part, and join theirs along another axis; differentiable any number of times.

    ``x``: the part of this rank; ``group``: the ranks; ``split, joined``: an axis, and the lengths of the parts along it, by rank.

    >>> transpose(torch.ones(2, 3), TorchGroup(), (1, [3]), (0, [2])).shape
    torch.Size([2, 3])
    """
    result: torch.Tensor = _Transpose.apply(group, x, split, joined)
    return result


HALVES = (torch.float16, torch.bfloat16)  # types whose sums are made in float32


def even_sizes(length: int, ranks: int) -> list[int]:
    """Lengths that differ by one at most: the usual cut of an axis.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


def scatter_v(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int = 0, source: int = 0) -> torch.Tensor:
    """Cut the tensor of rank ``source`` into parts, one for each rank; its gradient is gathered there.

    On the other ranks ``x`` gives the other axes and the dtype: pass an empty tensor of length 0 along ``dim``, which requires a gradient
    if that of the source does.

    Raises
    ------
    ConfigError
        When ``sizes`` are not the lengths of as many parts as there are ranks, or do not add up; when there is no rank ``source``.
    """
    check_rank("source", source, group)
    _check_sizes(group, sizes)
    if group.rank == source and sum(sizes) != x.shape[dim]:
        raise ConfigError(
            f"sizes are {list(sizes)}, and the tensor has {x.shape[dim]} along axis {dim}. Write sizes that add up to that."
        )
    parts = x.split([*sizes], dim) if group.rank == source else [_cut(x, dim)] * group.world_size
    lengths = [sizes[group.rank] if rank == source else 0 for rank in range(group.world_size)]
    return torch.cat(exchange(parts, shapes_like(x, dim, lengths), group), dim)


def gather_v(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int = 0, destination: int = 0
) -> torch.Tensor:
    """Join the parts of all ranks on rank ``destination``; the gradient of a part goes back to its rank.

    ``x``: the part of this rank, of length ``sizes[rank]`` along ``dim``. The result has length ``sum(sizes)`` on ``destination``, and length 0
    on the other ranks, which have to use it in their loss all the same. Another length is a `ConfigError`, as is a rank that does not exist.
    """
    check_rank("destination", destination, group)
    check_part(x, group, sizes, dim)
    parts = [x if rank == destination else _cut(x, dim) for rank in range(group.world_size)]
    lengths = sizes if group.rank == destination else [0] * group.world_size
    return torch.cat(exchange(parts, shapes_like(x, dim, lengths), group), dim)


def all_gather_v(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Join the parts of all ranks on every rank; the gradient of a part is the sum over the ranks.

    ``x``: the part of this rank, of length ``sizes[rank]`` along ``dim``; another length is a `ConfigError`. The result has length ``sum(sizes)``.
    Gradients of halves are summed in float32.
    """
    check_part(x, group, sizes, dim)
    # Wide for a moment, so that gradients of halves are summed in float32.
    copies = x.to(wide_type(x)).expand(group.world_size, *x.shape)
    return torch.cat(exchange(copies.to(x.dtype).unbind(), shapes_like(x, dim, sizes), group), dim)


def all_reduce_v(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Sum tensors over the ranks, in their order; each rank keeps its part of the sum.

    ``x``: of length ``sum(sizes)`` along ``dim`` on every rank. The result has length ``sizes[rank]``. Halves are summed in float32.
    """
    _check_sizes(group, sizes)
    received = exchange(x.split([*sizes], dim), shapes_like(x, dim, [sizes[group.rank]] * group.world_size), group)
    return torch.stack(received).to(wide_type(x)).sum(0).to(x.dtype)


def all_reduce(x: torch.Tensor, group: TorchGroup) -> torch.Tensor:
    """Sum tensors of one shape over the ranks, in their order; the gradient is summed in the same way.

    >>> all_reduce(torch.ones(2), TorchGroup()).tolist()
    [1.0, 1.0]
    """
    sizes = even_sizes(x.numel(), group.world_size)
    return all_gather_v(all_reduce_v(x.reshape(-1), group, sizes), group, sizes).view(x.shape)


class _Copy(torch.autograd.Function):  # type: ignore[misc]
    """The same tensor, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TorchGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


def copy_v(x: torch.Tensor, group: TorchGroup) -> torch.Tensor:
    """Return ``x``, which all ranks have alike; its gradient is summed over the ranks, in their order.

    For a computation that the ranks share, such as each on its own part of a batch.
    """
    copied: torch.Tensor = _Copy.apply(x, group)
    return copied


def all_to_all_v(x: torch.Tensor, group: TorchGroup, sizes: Sequence[Sequence[int]], dim: int = 0) -> torch.Tensor:
    """Send consecutive slices to the ranks, and join theirs.

    ``sizes``: a square table, the same on all ranks. ``sizes[a][b]`` is the length along ``dim`` that rank a sends to rank b: row ``rank`` adds up
    to the length of ``x``, column ``rank`` to that of the result. Another table is a `ConfigError`.
    """
    _check_table(group, sizes)
    received = [row[group.rank] for row in sizes]
    return transpose(x, group, (dim, sizes[group.rank]), (dim, received))


def indexed_all_to_all_v(
    x: torch.Tensor, group: TorchGroup, indices: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]], dim: int = 0
) -> torch.Tensor:
    """Send chosen slices to the ranks, and join theirs; a slice may go to several ranks, whose gradients are summed.

    Parameters
    ----------
    x : Tensor
        The part of this rank.
    group : TorchGroup
        The ranks.
    indices : sequence of Tensor
        Numbers of the slices along ``dim`` that go to each rank.
    sizes : sequence of sequence of int
        ``sizes[a][b]`` is the number of slices that rank a sends to rank b.
    dim : int
        The axis of the slices.

    Raises
    ------
    ConfigError
        When the indices have other lengths than ``sizes`` say.
    """
    _check_table(group, sizes)
    if (lengths := [index.numel() for index in indices]) != [*sizes[group.rank]]:
        raise ConfigError(
            f"indices of rank {group.rank} have lengths {lengths}, and sizes[{group.rank}] are {[*sizes[group.rank]]}. Write the lengths of the indices."
        )
    chosen = x.to(wide_type(x)).index_select(dim, torch.cat([*indices])).to(x.dtype)
    return all_to_all_v(chosen, group, sizes, dim)


def distributed_transpose(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    cut: int,
    whole: int,
    new_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Change the axis along which a tensor is cut.

    Parameters
    ----------
    x : Tensor
        The part of this rank, cut along the axis ``cut``.
    group : TorchGroup
        The ranks.
    sizes : sequence of int
        Lengths of the parts along ``cut``.
    cut, whole : int
        The axis that is cut, and that along which the result is.
    new_sizes : sequence of int, optional
        Lengths of the parts along ``whole``; left out, even ones.
    """
    check_part(x, group, sizes, cut)
    new = even_sizes(x.shape[whole], group.world_size) if new_sizes is None else new_sizes
    _check_sizes(group, new)
    return transpose(x, group, (whole, new), (cut, sizes))


def reduce_loss(loss: float | torch.Tensor, group: TorchGroup, *, mean: bool = True) -> float:
    """Return the mean of a loss over the ranks, or its sum with ``mean=False``, in float64. It is for a log: no gradient passes through it.

    >>> reduce_loss(torch.tensor(0.5), TorchGroup())
    0.5
    """
    value = torch.as_tensor(loss).detach().to(torch.float64)
    return float(group.all_reduce(value.to(group.device), "mean" if mean else "sum"))


def as_real(x: torch.Tensor) -> torch.Tensor:
    """A view with real and imaginary parts, of a complex tensor."""
    return torch.view_as_real(x) if x.is_complex() else x


def wide_type(x: torch.Tensor) -> torch.dtype:
    """Type in which numbers of a tensor are summed."""
    return torch.float32 if x.dtype in HALVES else x.dtype


def _cut(x: torch.Tensor, dim: int) -> torch.Tensor:
    """An empty part, which keeps its place in the graph."""
    return x.narrow(dim, 0, 0)


def _check_sizes(group: TorchGroup, sizes: Sequence[int]) -> None:
    if len(sizes) != group.world_size or min(sizes) < 0:
        raise ConfigError(
            f"sizes are {list(sizes)}, and there are {group.world_size} ranks. Write the length of each rank's part."
        )


def check_part(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int) -> None:
    """Refuse a part of another length than ``sizes`` say."""
    _check_sizes(group, sizes)
    if x.shape[dim] != sizes[group.rank]:
        raise ConfigError(
            f"the part of rank {group.rank} has {x.shape[dim]} along axis {dim}, and sizes are {list(sizes)}. Write the lengths of the parts."
        )


def _check_table(group: TorchGroup, sizes: Sequence[Sequence[int]]) -> None:
    if [len(row) for row in sizes] != [group.world_size] * group.world_size:
        raise ConfigError(
            f"sizes are {[list(row) for row in sizes]}. Write a row of {group.world_size} lengths for each of {group.world_size} ranks."
        )


UNREACHED = (
    "Perhaps its backward pass reached none of the parameters that mark_shared marks, so that it sends no gradients: add 0 * parameter.sum() of one of "
    "them to its loss."
)
MARKED = WeakIdKeyDictionary()  # parameters whose gradients are summed


def mark_shared(module: torch.nn.Module, group: TorchGroup, *, mean: bool = False) -> Callable[[], None]:
    """Sum the gradients of a module's parameters over the ranks whenever a backward pass ends; returns a function that ends this.

    All gradients travel in one buffer, in float32 whatever they are (float64 and complex ones in buffers of their own). A parameter without a gradient on
    some ranks counts as zero there. Every rank must run the backward pass, and at least one of the parameters must have a gradient in it: a pass
    that reaches none of them sends nothing, and the other ranks wait in vain, or take the gradients of its next pass for those of this one.

    Parameters
    ----------
    module : Module
        The module, with the same parameters on all ranks.
    group : TorchGroup
        The ranks.
    mean : bool
        The mean over the ranks instead of the sum.

    Raises
    ------
    ConfigError
        When a parameter is marked already.
    PeerLost
        In a backward pass, when another rank ended, or its pass reaches none of the parameters.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1)
    >>> unmark = mark_shared(layer, TorchGroup())
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad.tolist()
    [[1.0, 1.0]]
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter in MARKED for parameter in parameters):
        raise ConfigError(
            "a parameter of this module is marked already: its gradients would be summed twice. "
            "Call first what the other mark_shared returned."
        )
    MARKED.update(dict.fromkeys(parameters, True))
    arriving: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    passes = [-1]

    def record(number: int, gradient: torch.Tensor) -> None:
        before = parameters[number].grad
        arriving[number] = gradient.detach(), None if before is None else before.clone()

    def written(number: int, _: torch.Tensor) -> None:
        # A pass that failed leaves its gradients behind, and calls nothing at its end.
        if (now := torch._C._current_graph_task_id()) != passes[0]:
            passes[0] = now
            found.clear()
            torch.autograd.Variable._execution_engine.queue_callback(reduce)
        found[number] = arriving.pop(number)

    def reduce() -> None:
        _sum_gradients(parameters, dict(found), group, mean)
        found.clear()

    handles = []
    for number, parameter in enumerate(parameters if group.world_size > 1 else ()):
        handles.append(parameter.register_hook(partial(record, number)))
        handles.append(parameter.register_post_accumulate_grad_hook(partial(written, number)))

    def unmark() -> None:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            MARKED.pop(parameter, None)

    return unmark


@torch.no_grad()  # type: ignore[untyped-decorator]
def _sum_gradients(
    parameters: list[torch.nn.Parameter],
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]],
    group: TorchGroup,
    mean: bool,
) -> None:
    """Replace the gradients of this rank, each found with what was there before, by the sums over the ranks."""
    added = [found[n][0] if n in found else torch.zeros_like(p) for n, p in enumerate(parameters)]
    wide = [gradient.to(wide_type(gradient)) for gradient in added]
    for dtype in sorted({gradient.dtype for gradient in wide}, key=str):
        chosen = [number for number, gradient in enumerate(wide) if gradient.dtype == dtype]
        flat = torch.cat([wide[number].reshape(-1) for number in chosen])
        try:
            total = group.all_reduce(flat, "mean" if mean else "sum")
        except PeerLost as error:
            raise PeerLost(f"{error} {UNREACHED}") from error
        for number, part in zip(chosen, total.split([wide[n].numel() for n in chosen]), strict=True):
            parameter = parameters[number]
            before = found[number][1] if number in found else parameter.grad
            gradient = part.view(parameter.shape).to(parameter.dtype)
            parameter.grad = gradient if before is None else before + gradient
