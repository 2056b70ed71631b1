"""Networks that are trained as ranks of a torch program in the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from halotile import torch_group
from halotile.tasks.groups.group import TorchGroup

STEPS = 50


def network() -> torch.nn.Sequential:
    """Convolutions with running statistics, random numbers, and a parameter that no loss sees."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Conv2d(8, 1, 3, padding=1),
    )
    layers.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    return layers


def batch(step: int, slot: int) -> torch.Tensor:
    """The images of a slot."""
    numbers = torch.Generator().manual_seed(100 * step + slot)
    return torch.randn(3, 1, 24, 24, generator=numbers)


def loss(module: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Distance from the images themselves."""
    distance: torch.Tensor = (module(images) - images).square().mean()
    return distance


def trained(
    group: TorchGroup, steps: int = STEPS, killed: str = "", **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the network after so many steps; rank 1 is killed in step 30, once, where there is a folder for a mark."""
    module = network()
    if group.rank:
        with torch.no_grad():
            module[0].weight.zero_()  # those of rank 0 count

    def next_batch(step: int, slot: int) -> torch.Tensor:
        mark = Path(killed, "killed")
        if killed and step == 30 and group.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step, slot)

    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if killed:
        options |= {"checkpoint": Path(killed, "state"), "checkpoint_seconds": 0.0}
    losses = torch_group.fit(
        group, module, next_batch, loss, optimizer, steps=steps, slots=4, seed=7, scheduler=scheduler, **options
    )
    return losses, module.state_dict()
