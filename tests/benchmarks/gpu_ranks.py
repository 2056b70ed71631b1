"""A rank on a GPU that nccl connects with itself, as a program: ``python gpu_ranks.py ranks FOLDER EDGE DEVICE``; gloo, on the CPU.

A rank that is alone would call neither. What this shows is that the collectives compute on a GPU what they compute on a CPU; the speed of
several GPUs takes several.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.measuring import Result, fresh, main

if TYPE_CHECKING:
    import torch

    from halotile.tasks.groups.group import TorchGroup

COLLECTIVES = ("all_reduce", "rfft2", "gradient of rfft2")


@contextmanager
def connected(folder: Path, device: str) -> Iterator[TorchGroup]:
    """The group of one rank that is connected with itself."""
    import torch
    import torch.distributed as dist

    from halotile.tasks.groups import opening
    from halotile.tasks.groups.group import TorchGroup

    backend = "nccl" if device == "cuda" else "gloo"
    opening._connect(opening.Rendezvous(meeting=str(fresh(folder / "meeting"))), backend)
    try:
        yield TorchGroup(device=torch.device(device, 0), backend=backend)
    finally:
        dist.destroy_process_group()


def results(group: TorchGroup, edge: int) -> dict[str, torch.Tensor]:
    """What the collectives give on the device of a group, brought to the CPU, where all numbers are drawn."""
    import torch

    from halotile.tasks.groups import collectives

    def drawn(seed: int, dtype: Any = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(edge, edge, generator=generator, dtype=dtype).to(group.device)

    image = drawn(5).requires_grad_()
    spectrum = collectives.fft.rfft2(image, group, [edge], norm="ortho")
    (gradient,) = torch.autograd.grad(spectrum, image, drawn(7, torch.complex64)[:, : edge // 2 + 1])
    found = (group.all_reduce(drawn(6), "mean"), spectrum.detach(), gradient)
    return {name: tensor.cpu() for name, tensor in zip(COLLECTIVES, found, strict=True)}


def ranks(folder: Path, edge: int, device: str) -> Result:
    """How far each is from that of a rank that is alone on a CPU, of the largest number."""
    from halotile.tasks.groups import opening
    from halotile.tasks.groups.group import TorchGroup

    expected = results(TorchGroup(), edge)
    with connected(folder, device) as group:
        assert not group.is_alone
        actual = results(group, edge)
        for each in (group, opening._beside(group)):  # both barriers of ranks on GPUs
            each.barrier()
    return {name: float((actual[name] - whole).abs().max() / whole.abs().max()) for name, whole in expected.items()}


if __name__ == "__main__":
    main(globals())
