"""Sums over shifted slices, in the same order for every pixel.

A convolution routine chooses its algorithm by the size of its input, and a running sum
depends on its start: their last bits depend on the tile. Here each output pixel is the same
sequence of single multiplications and additions at any place in any window, so its bits
are the same too. For that reason nothing here uses a fused multiply-add (``alpha=``, ``addcmul``),
which may be rounded once in a vector loop and twice in its remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Pixels of a strip on a CPU: smaller strips lose more to the calls than they gain in the cache, larger ones exceed it.
STRIP_PIXELS = 1 << 18
# Factor by which strips are larger on a GPU, which has no such cache, and where each step costs a kernel launch.
GPU_FACTOR = 64


def strips(batch: torch.Tensor, pixels: int = STRIP_PIXELS) -> Iterator[tuple[int, int]]:
    """Intervals of the first spatial axis of about ``pixels`` pixels each, on a GPU many more."""
    length = batch.shape[2]
    if batch.is_cuda:
        pixels *= GPU_FACTOR
    rows = max(1, pixels * length // max(1, batch.numel()))
    return ((start, min(start + rows, length)) for start in range(0, length, rows))


def rows_around(batch: torch.Tensor, start: int, stop: int, depth: int) -> torch.Tensor:
    """Rows ``start - depth`` to ``stop + depth`` of the first spatial axis, the outermost ones repeated."""
    import torch

    length = batch.shape[2]
    if start >= depth and stop + depth <= length:
        return batch.narrow(2, start - depth, stop - start + 2 * depth)
    rows = torch.arange(start - depth, stop + depth, device=batch.device).clamp_(0, length - 1)
    return batch.index_select(2, rows)


def widened(like: torch.Tensor, axis: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty array like ``like`` with ``depth`` more pixels at both ends of an axis, and the view of its middle."""
    shape = list(like.shape)
    shape[axis] += 2 * depth
    room = like.new_empty(shape)
    return room, room.narrow(axis, depth, like.shape[axis])


def repeat_edges(room: torch.Tensor, axis: int, depth: int) -> None:
    """Fill both ends of a widened array with its outermost pixels."""
    if depth:
        last = room.shape[axis] - depth
        room.narrow(axis, 0, depth).copy_(room.narrow(axis, depth, 1))
        room.narrow(axis, last, depth).copy_(room.narrow(axis, last - 1, 1))


def weigh_symmetric(source: torch.Tensor, axis: int, taps: Sequence[float], out: torch.Tensor) -> None:
    """``out[i] = taps[0] s[i] + sum_k taps[k] (s[i-k] + s[i+k])`` along an axis.

    ``source``: longer than `out` by `len(taps) - 1` pixels at both ends of the axis; ``axis``: axis to sum along; ``taps``: weight of the middle
    pixel, then of its neighbours at distance 1, 2, ; ``out``: array for the result.
    """
    import torch

    middle, length = len(taps) - 1, out.shape[axis]
    torch.mul(source.narrow(axis, middle, length), taps[0], out=out)
    pair = torch.empty_like(out)
    for k, tap in enumerate(taps[1:], start=1):
        before, after = source.narrow(axis, middle - k, length), source.narrow(axis, middle + k, length)
        torch.add(before, after, out=pair)
        out.add_(pair.mul_(tap))


def box_sum(source: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Sums of ``size`` neighbours along an axis; the result is ``size - 1`` pixels shorter.

    The number of summed pixels doubles in each pass, so the number of passes grows with the logarithm of the size.
    """
    length = source.shape[axis] - size + 1
    total: torch.Tensor | None = None
    taken, run = 0, 1
    while True:
        if size & run:
            part = source.narrow(axis, taken, length)
            total = part if total is None else total + part
            taken += run
        if taken == size:
            return total if total is not None else source
        short = source.shape[axis] - run
        source = source.narrow(axis, 0, short) + source.narrow(axis, run, short)
        run *= 2
