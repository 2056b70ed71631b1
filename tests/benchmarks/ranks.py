"""Programs of ranks that train, each measured in processes of its own: ``python ranks.py NAME FOLDER EDGE``."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.measuring import CALLS, WARM, Result, in_two_processes, main, median_seconds

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


def ours_step(folder: Path, edge: int) -> Result:
    """A step of training by ``torch_group.fit``, with sums in the order of slots."""
    return in_two_processes(folder, _our_steps, "exact")


def ours_fast_step(folder: Path, edge: int) -> Result:
    """The same, with sums in the order of the backend."""
    return in_two_processes(folder, _our_steps, "fast")


def _our_steps(mode: Any) -> Result:
    import torch

    from halotile import torch_group

    with torch_group.join(device_mode="cpu") as group:
        network, times = _network(), [time.perf_counter()]
        torch_group.fit(
            group,
            network,
            lambda step, slot: _patches(step, slot, 2),
            lambda module, x: (module(x) - x).square().mean(),
            torch.optim.Adam(network.parameters(), lr=1e-4),
            steps=WARM + CALLS,
            slots=2,
            mode=mode,
            report=lambda step, value: times.append(time.perf_counter()),
        )
        steps = [b - a for a, b in zip(times[WARM:-1], times[WARM + 1 :], strict=True)]
        return {"seconds": statistics.median(steps) if steps else 0.0}


def plain_step(folder: Path, edge: int) -> Result:
    """A step of training with DistributedDataParallel."""
    return in_two_processes(folder, _plain_steps)


def _plain_steps() -> Result:
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


RANK_ROWS: list[tuple[str, str, str, str, int, float, int]] = [
    (
        "ranks",
        "a step of training a U-Net, 2 ranks / DistributedDataParallel",
        "ranks.ours_step",
        "ranks.plain_step",
        64,
        1.05,
        5,
    ),
    (
        "ranks",
        "the same, mode fast / DistributedDataParallel",
        "ranks.ours_fast_step",
        "ranks.plain_step",
        64,
        1.05,
        5,
    ),
]


if __name__ == "__main__":
    main(globals())
