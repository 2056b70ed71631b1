"""The duration of a step of a training, by a trial on random pixels."""

from __future__ import annotations

import statistics
import time

import torch

from halotile.tasks.devices.device import torch_threads
from halotile.tasks.networks.base import Network
from halotile.tasks.training.methods import LAYOUT, METHODS, PatchBatch, mean_loss

TIMES = 3


def seconds_of_slot(network: Network, method: str, shape: tuple[int, int, int]) -> float:
    """Return the time that a rank on a CPU takes for its part of a batch: so many patches of that edge.

    ``shape``: channels, patches, and their edge in pixels.
    """
    channels, count, edge = shape
    with torch_threads():
        module = network.build(channels, torch.zeros(channels), torch.ones(channels))
        module = module.to(memory_format=LAYOUT)
        pixels = torch.rand(count, channels, edge, edge)
        batch = PatchBatch(pixels, torch.ones_like(pixels), pixels)
        seconds = []
        for _ in range(TIMES + 1):
            began = time.perf_counter()
            mean_loss(module, METHODS[method](batch), torch.ones(channels)).backward()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
