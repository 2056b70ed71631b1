"""Programs of ranks that exchange tensors, each measured in processes of its own: ``python ranks.py NAME FOLDER EDGE``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.measuring import Result, in_two_processes, main

CALLS, WARM = 15, 3
FIELD = (2, 10, 720, 1440)
"""Samples, variables, latitudes and longitudes of the transforms that PhysicsNeMo tests."""
PATCHES, PATCH = 16, 64


def _median_seconds(call: Callable[[], Any], barrier: Callable[[], Any]) -> float:
    """The median of several calls, which all ranks begin together."""
    seconds = []
    for number in range(WARM + CALLS):
        barrier()
        began = time.perf_counter()
        call()
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


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

    seconds = _median_seconds(step, lambda: None)
    dist.destroy_process_group()
    return {"seconds": seconds}


def ours_fft(folder: Path, edge: int) -> Result:
    """rfft2 of a field that is cut along its latitudes, forward and backward."""
    return in_two_processes(folder, _our_transforms)


def _our_transforms() -> Result:
    import torch

    from halotile import collectives, torch_group

    with torch_group.join(device_mode="cpu") as group:
        sizes = collectives.even_sizes(FIELD[2], group.world_size)
        part = torch.randn(FIELD, generator=torch.Generator().manual_seed(0)).split(sizes, 2)[group.rank]
        part = part.clone().requires_grad_()

        def call() -> None:
            spectrum = collectives.fft.rfft2(part, group, sizes, norm="ortho")
            spectrum.abs().square().sum().backward()

        return {"seconds": _median_seconds(call, group.barrier)}


def physicsnemo_fft(folder: Path, edge: int) -> Result:
    """The same by PhysicsNeMo's functions."""
    return in_two_processes(folder, _their_transforms)


def _their_transforms() -> Result:
    import torch
    import torch.distributed as dist
    from physicsnemo.distributed.fft import DistributedRFFT2
    from physicsnemo.distributed.manager import DistributedManager

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # It knows GPUs only: marks for their profiler are left out, and what its initialisation would have found is set by hand.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    DistributedManager._shared_state |= {
        "_rank": rank, "_world_size": size, "_local_rank": rank, "_distributed": True, "_cuda": False,
        "_device": torch.device("cpu"), "_is_initialized": True, "_groups": {"spatial_parallel": dist.group.WORLD},
        "_group_ranks": {"spatial_parallel": list(range(size))}, "_group_names": {dist.group.WORLD: "spatial_parallel"},
        "_backend": "gloo", "_initialization_method": "env",
    }  # fmt: skip
    whole = torch.randn(FIELD, generator=torch.Generator().manual_seed(0))
    part = whole.chunk(size, 2)[rank].clone().requires_grad_()

    def call() -> None:
        spectrum = DistributedRFFT2.apply(part, FIELD[:1:-1], (3, 2), "ortho")
        spectrum.abs().square().sum().backward()

    seconds = _median_seconds(call, dist.barrier)
    dist.destroy_process_group()
    return {"seconds": seconds}


RANK_ROWS: list[tuple[str, str, str, str, int, float, int]] = [
    (
        "ranks",
        "rfft2 forward and backward, 2 × 10 × 720 × 1440, 2 ranks / PhysicsNeMo",
        "ranks.ours_fft",
        "ranks.physicsnemo_fft",
        720,
        0.75,
        5,
    ),
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
