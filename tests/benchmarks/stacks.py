"""Programs that apply stacks of blurs, each measured in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.measuring import Result, in_two_processes, seconds

EIGHT = (5, 7, 9, 11, 13, 15, 5, 15)
CALLS = 5


def kernel(edge: int) -> NDArray[Any]:
    """A gaussian."""
    line = np.exp(-((np.arange(edge) - edge // 2) ** 2) / (2 * (edge / 5) ** 2))
    square = np.outer(line, line)
    normed: NDArray[Any] = (square / square.sum()).astype(np.float32)
    return normed


def blurs(edges: Sequence[int]) -> list[Any]:
    """deepinv's circular blurs with such kernels."""
    import torch
    from deepinv.physics import Blur

    return [Blur(filter=torch.from_numpy(kernel(edge))[None, None], padding="circular") for edge in edges]


def image(edge: int) -> Any:
    """An image, the same every time."""
    import torch

    return torch.rand(1, 1, edge, edge, generator=torch.Generator().manual_seed(0))


def one_blur(index: int, device: Any, shared: Any) -> Any:
    """One of the eight: operators that a factory makes have a task each, on the whole image."""
    return blurs(EIGHT)[index]


def ours(folder: Path, edge: int, way: str) -> Result:
    """``A^T A x``: block by block by direct sums (exact), with all blurs in one kernel by Fourier transforms (fast), or with a task for each
    operator, which holds the whole image, and a tree of sums (tree)."""
    from halotile import DistributedContext, distribute

    x, by_task = image(edge), {"num_operators": len(EIGHT), "type_object": "linear_physics"}
    with DistributedContext(workers=2) as ctx:
        given: Any = one_blur if way == "tree" else blurs(EIGHT)
        options: Any = {"exact": {"exact": True}, "fast": {}, "tree": by_task}[way]
        physics = distribute(given, ctx, **options)
        before = ctx.client.run(peak_bytes)
        median = _timed(lambda: physics.A_adjoint_A(x))
        after = ctx.client.run(peak_bytes)
    return {"seconds": median, "peak_bytes": max(after[worker] - before[worker] for worker in after)}


def _timed(call: Callable[[], Any]) -> float:
    """The median of a few calls, after a first one."""
    call()
    return statistics.median(seconds(call) for _ in range(CALLS))


def deepinv_distributed(folder: Path, edge: int) -> Result:
    """deepinv.distributed with two processes of one thread."""
    return in_two_processes(folder, _deepinv_rank, edge)


def _deepinv_rank(edge: int) -> Result:
    import torch
    from deepinv.distributed import DistributedContext, distribute

    x = image(edge)
    with DistributedContext(backend="gloo", device_mode="cpu") as context, torch.no_grad():
        physics = distribute(blurs(EIGHT), context)
        before = peak_bytes()
        return {"seconds": _timed(lambda: physics.A_adjoint_A(x)), "peak_bytes": peak_bytes() - before}


def peak_bytes() -> int:
    """The most resident memory of this process so far, everything imported."""
    import deepinv
    import torch
    import zarr

    import halotile.tasks.distributed.stacks.linear
    from halotile.tasks.block import peak_memory_bytes

    del deepinv, torch, zarr, halotile
    return peak_memory_bytes()
