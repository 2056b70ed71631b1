"""Batch norm by the statistics of a whole batch, whose images are on several workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from halotile.errors import ConfigError

SUMS = 4
"""Values of a measurement: sum and sum of squares of each channel, their number, and the number of the layer."""


class UnmeasuredLayer(Exception):
    """The call has come to a layer whose statistics are not known yet."""

    def __init__(self, number: int, x: torch.Tensor) -> None:
        self.number = number
        self.x = x


def batch_norms(network: Any) -> list[torch.nn.Module]:
    """List the layers of a network that normalise by the statistics of their batch.

    Examples
    --------
    >>> layer = torch.nn.BatchNorm2d(1)
    >>> len(batch_norms(torch.nn.Sequential(layer))), len(batch_norms(layer.eval()))
    (1, 0)
    """
    if not isinstance(network, torch.nn.Module):
        return []
    kind = torch.nn.modules.batchnorm._BatchNorm
    layers = (layer for layer in network.modules() if isinstance(layer, kind))
    return [layer for layer in layers if layer.training or layer.running_mean is None]


@contextmanager
def given_statistics(network: Any, statistics: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let layers normalise by given statistics: a mean and a variance for each, in the order in which they are used.

    Raises
    ------
    UnmeasuredLayer
        From the call of the network, at the first layer without.
    """
    layers = batch_norms(network)
    used: list[int] = []

    def forward(number: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if number in used:
            raise ValueError(
                "a layer of batch norm is used twice in a call: its statistics would be those of both. Write two layers, or eval()"
            )
        place = 2 * len(used)
        used.append(number)
        if place >= len(statistics):
            raise UnmeasuredLayer(number, x)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        mean, variance = (each.to(x.dtype).reshape(shape) for each in statistics[place : place + 2])
        y = (x - mean) * torch.rsqrt(variance + layer.eps)
        return y if layer.weight is None else y * layer.weight.reshape(shape) + layer.bias.reshape(shape)

    for number, layer in enumerate(layers):
        layer.forward = partial(forward, number, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def sums_of(reached: UnmeasuredLayer | None) -> tuple[torch.Tensor, ...]:
    """Return what a call adds to the statistics of the layer that it reached; the number -1 if it came to its end."""
    if reached is None:
        zero = torch.zeros(1, dtype=torch.float64)
        return zero, zero, zero, zero - 1
    x = reached.x.transpose(0, 1).flatten(1).double()
    count = torch.full((1,), x.shape[1], dtype=torch.float64, device=x.device)
    return x.sum(1), x.square().sum(1), count, torch.full_like(count, reached.number)


def update_running(layer: Any, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
    """Move the running statistics of a layer towards those of a batch, as the layer itself does.

    Raises
    ------
    ConfigError
        For a batch of one pixel, which has no variance.
    """
    if count <= 1:
        raise ConfigError(
            "a batch of a single pixel has no statistics to train batch norm with. Write eval(), or more images."
        )
    if layer.running_mean is None:
        return
    with torch.no_grad():
        layer.num_batches_tracked += 1
        part = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.to(layer.running_mean), part)
        layer.running_var.lerp_((variance * count / (count - 1)).to(layer.running_var), part)
