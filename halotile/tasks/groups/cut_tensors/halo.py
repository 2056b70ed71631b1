"""Halos of a tensor that is cut along an axis: filled from the ranks that own them, and added back in the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.transfers import check_part, exchange, shapes_like, wide_type
from halotile.tasks.groups.group import TorchGroup

RULES = ("cut", "zero", "circular")


def halo_exchange(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    dim: int,
    before: int,
    after: int,
    boundary: str = "cut",
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


def _wanted(
    start: int, stop: int, before: int, after: int, length: int, boundary: str
) -> list[tuple[int, int]]:
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
    received: Sequence[torch.Tensor],
    pieces: Sequence[tuple[int, int]],
    owns: Sequence[tuple[int, int]],
    dim: int,
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
