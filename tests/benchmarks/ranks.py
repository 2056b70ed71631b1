"""Programs of ranks that train, each measured in processes of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.measuring import CALLS, PROGRAM, WARM, Result, median_seconds, printed

PATCHES, PATCH = 16, 64


def _network() -> Any:
    """A small U-Net."""
    import torch

    from tests.benchmarks.unets import plain_unet

    torch.manual_seed(0)
    return plain_unet()


def _patches(step: int, slot: int, slots: int) -> Any:
    import torch

    count = PATCHES // slots
    return torch.randn(count, 1, PATCH, PATCH, generator=torch.Generator().manual_seed(slots * step + slot))


def ours_step(folder: Path, edge: int, slots: str, mode: str) -> Result:
    """A step of training by ``torch_group.fit``, with sums in the order of slots, or fast, in that of the backend."""
    return _under_torchrun("ranks.our_rank", str(folder), "0", slots, mode)


def our_rank(folder: Path, edge: int, slots: str, mode: Any) -> Result:
    """One rank of ours."""
    import torch

    from halotile import torch_group

    count = int(slots)
    with torch_group.join(device_mode="cpu") as group:
        network, times = _network(), [time.perf_counter()]

        def report(step: int, value: float) -> None:
            times.append(time.perf_counter())

        adam = torch.optim.Adam(network.parameters(), lr=1e-4)
        fit: Any = partial(torch_group.fit, steps=WARM + CALLS, slots=count, mode=mode, report=report)
        fit(group, network, partial(_patches, slots=count), lambda f, x: (f(x) - x).square().mean(), adam)
        steps = [b - a for a, b in zip(times[WARM:-1], times[WARM + 1 :], strict=True)]
        return {"seconds": statistics.median(steps or [0.0])}


def plain_step(folder: Path, edge: int) -> Result:
    """A step of training with DistributedDataParallel."""
    return _under_torchrun("ranks.plain_rank", str(folder), "0")


def plain_rank(folder: Path, edge: int) -> Result:
    """One rank of it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    network, rank = _network(), dist.get_rank()
    wrapped = torch.nn.parallel.DistributedDataParallel(network)
    optimizer, steps = torch.optim.Adam(network.parameters(), lr=1e-4), iter(range(WARM + CALLS))

    def step() -> None:
        x = _patches(next(steps), rank, 2)
        optimizer.zero_grad()
        (wrapped(x) - x).square().mean().backward()
        optimizer.step()

    seconds = median_seconds(step)
    dist.destroy_process_group()
    return {"seconds": seconds}


def _under_torchrun(*program: str) -> Result:
    """What the first of two ranks gives that torchrun starts, each a process of one thread."""
    options = ("--standalone", "--nproc-per-node=2", "--local-ranks-filter=0")
    command = [sys.executable, "-m", "torch.distributed.run", *options, *PROGRAM[1:], *program]
    result: Result = json.loads(printed(program[0], command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    return result


RANK_ROWS: list[tuple[str, str, str, str, int, float | None, int]] = [
    ("ranks", "a step of training a U-Net, 2 ranks / DistributedDataParallel", "ranks.ours_step 2 exact", "ranks.plain_step", 64, 1.05, 5),
    ("ranks", "the same, mode fast / DistributedDataParallel", "ranks.ours_step 2 fast", "ranks.plain_step", 64, 1.05, 5),
    ("ranks", "the same, exact, in the 4 slots of the default / DistributedDataParallel, in 2", "ranks.ours_step 4 exact", "ranks.plain_step", 64, None, 5),
]  # fmt: skip
