"""Batch norm by the statistics of a whole batch, whose images are on several workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from halotile.errors import ConfigError


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
def fixed_statistics(network: Any, statistics: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let layers normalise by given statistics: a mean and a variance for each, in the order in which they are used."""
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


def measure(reached: UnmeasuredLayer | None) -> torch.Tensor:
    """Return the number of the layer that a call reached, its pixels, and of each channel the mean and the squares around it.

    The number is -1, and alone, if the call came to its end.
    """
    if reached is None:
        return torch.full((1,), -1, dtype=torch.float64)
    x = reached.x.transpose(0, 1).flatten(1).double()
    mean = x.mean(1)
    squares = (x - mean[:, None]).square().sum(1)
    return torch.cat([x.new_tensor([reached.number, x.shape[1]]), mean, squares])


def pool(measured: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor, torch.Tensor, float] | None:
    """Return the number of the layer that the calls reached, with the mean, variance and pixels of all; None at the end.

    Squares around the mean of each call keep the digits that sums of squares lose where an image is far from 0.

    Examples
    --------
    >>> pool([measure(UnmeasuredLayer(4, torch.full((1, 1, 1), value))) for value in (1.0, 3.0)])
    (4, tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64), 2.0)
    """
    layers = {int(each[0]) for each in measured}
    if len(layers) > 1:
        raise ConfigError(
            "the images of a batch go through different layers of batch norm, which have no statistics of all of them then. "
            "Write eval(), or leave images_per_task out."
        )
    if layers == {-1}:
        return None
    table = torch.stack(list(measured))
    counts, (means, squares) = table[:, 1:2], table[:, 2:].chunk(2, 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return layers.pop(), mean, variance, float(count.detach())


def update_running(layer: Any, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
    """Move the running statistics of a layer towards those of a batch, as the layer itself does."""
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
