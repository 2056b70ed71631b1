"""Programs of Fourier transforms, each measured in processes of its own."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.measuring import Result, in_two_processes, median_seconds

FIELD = (2, 10, 720, 1440)
"""Samples, variables, latitudes and longitudes of the transforms that PhysicsNeMo tests."""
MARGIN = 1.3


def ours(folder: Path, edge: int) -> Result:
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
            collectives.fft.rfft2(part, group, sizes, norm="ortho").abs().square().sum().backward()

        return {"seconds": median_seconds(call, group.barrier)}


def physicsnemo(folder: Path, edge: int) -> Result:
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
        DistributedRFFT2.apply(part, FIELD[:1:-1], (3, 2), "ortho").abs().square().sum().backward()

    seconds = median_seconds(call, dist.barrier)
    dist.destroy_process_group()
    return {"seconds": seconds}


def share(folder: Path, edge: int) -> Result:
    """One process's seconds shared by two, with a margin, and those of the messages by themselves."""
    return in_two_processes(folder, _share_and_messages)


def _share_and_messages() -> Result:
    import torch
    import torch.distributed as dist

    from halotile import collectives, torch_group

    with torch_group.join(device_mode="cpu", timeout_seconds=600) as group:
        alone = 0.0
        if group.rank == 0:
            field = torch.randn(FIELD, generator=torch.Generator().manual_seed(0)).requires_grad_()

            def transform() -> None:
                torch.fft.rfft2(field, norm="ortho").abs().square().sum().backward()

            alone = median_seconds(transform)
        rows = FIELD[0] * FIELD[1] * FIELD[2] // group.world_size
        columns = collectives.even_sizes(FIELD[3] // 2 + 1, group.world_size)
        by_rows = [rows * length for length in columns]
        by_columns = [rows * columns[group.rank]] * group.world_size
        sent = torch.zeros(sum(by_rows), dtype=torch.complex64)
        received = torch.zeros(sum(by_columns), dtype=torch.complex64)

        def messages() -> None:
            for _ in range(2):  # there and back, forward and backward
                dist.all_to_all_single(received, sent, by_columns, by_rows)
                dist.all_to_all_single(sent, received, by_rows, by_columns)

        talk = median_seconds(messages, group.barrier)
        return {"seconds": MARGIN / group.world_size * alone + talk, "alone": alone, "messages": talk}


FFT_ROWS = [
    ("fft", "rfft2 forward and backward, 2 × 10 × 720 × 1440, 2 ranks / PhysicsNeMo", "transforms.ours", "transforms.physicsnemo", 720, 0.75, 5),
    ("fft", f"the same / {MARGIN} times half of what one process takes, and its messages by themselves", "transforms.ours", "transforms.share", 720, 1.0, 5),
]  # fmt: skip
