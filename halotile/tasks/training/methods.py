"""Methods that train a denoiser without clean images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

MASKED = 0.03
"""Share of the pixels of a patch that Noise2Void hides."""
AROUND = torch.tensor([place for place in itertools.product(range(-2, 3), repeat=2) if place != (0, 0)])
"""Offsets of the neighbours, of which one replaces a hidden pixel, or their median."""
GRID = 4
"""Distance of the pixels that Noise2Self hides."""
LAYOUT = torch.channels_last
"""Order in which weights and activations lie in memory: a step on CPUs takes a fifth less than with channels first."""


class BlindTask(NamedTuple):
    """Input of the network, the wanted result, and the pixels that count."""

    given: torch.Tensor
    wanted: torch.Tensor
    counted: torch.Tensor


Replacement = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of pixels, and rows and columns of places in them: the values that stand there instead."""


class PatchBatch(NamedTuple):
    """Patches as tensors, (patches, channels, rows, columns); ``valid`` is 0 or 1."""

    pixels: torch.Tensor
    valid: torch.Tensor
    second: torch.Tensor


def noise2void(batch: PatchBatch) -> BlindTask:
    """Predict hidden pixels from their neighbours, which tell nothing of noise that differs from pixel to pixel.

    References
    ----------
    A. Krull, T.-O. Buchholz, F. Jug, Noise2Void: learning denoising from single noisy images, CVPR (2019).
    """
    return _hidden(batch, *_random_places(batch), _random_neighbour)


def noise2void2(batch: PatchBatch) -> BlindTask:
    """Predict hidden pixels as :func:`noise2void` does; the median of their neighbours stands for them.

    References
    ----------
    E. Höck, T.-O. Buchholz, A. Brachmann, F. Jug, A. Freytag, N2V2: fixing Noise2Void checkerboard artifacts with modified sampling strategies and a tweaked network
    architecture, ECCV workshops (2022).
    """
    return _hidden(batch, *_random_places(batch), _median_neighbour)


def noise2self(batch: PatchBatch) -> BlindTask:
    """Predict the pixels of a grid from all others.

    References
    ----------
    J. Batson, L. Royer, Noise2Self: blind denoising by self-supervision, ICML (2019).
    """
    count, _, rows, columns = batch.pixels.shape
    first_row, first_column = (int(n) for n in torch.randint(GRID, (2,)))
    grid = torch.meshgrid(
        torch.arange(first_row, rows, GRID), torch.arange(first_column, columns, GRID), indexing="ij"
    )
    row, column = (places.reshape(1, -1).expand(count, -1) for places in grid)
    return _hidden(batch, row, column, _random_neighbour)


def _random_places(batch: PatchBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the pixels to hide, (patches, pixels) each."""
    count, _, rows, columns = batch.pixels.shape
    number = max(1, round(MASKED * rows * columns))
    places = torch.stack([torch.randperm(rows * columns)[:number] for _ in range(count)])
    return places // columns, places % columns


def _hidden(
    batch: PatchBatch, row: torch.Tensor, column: torch.Tensor, replacement: Replacement
) -> BlindTask:
    """The prediction of some pixels of each patch, which have other values in what the network is given."""
    sample = torch.arange(len(row))[:, None].expand_as(row)
    given, counted = batch.pixels.clone(), torch.zeros_like(batch.valid)
    given[sample, :, row, column] = replacement(batch.pixels, row, column)
    counted[sample, :, row, column] = batch.valid[sample, :, row, column]
    return BlindTask(given, batch.pixels, counted)


def _random_neighbour(pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the value of one neighbour of each place, (patches, places, channels)."""
    return _neighbours(pixels, row, column, AROUND[torch.randint(len(AROUND), row.shape)])


def _median_neighbour(pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the median of the neighbours of each place, of the two in the middle the lower one."""
    around = torch.stack([_neighbours(pixels, row, column, offset) for offset in AROUND])
    return around.median(dim=0).values


def _neighbours(
    pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Return the values at offsets from places."""
    sample = torch.arange(len(row))[:, None].expand_as(row)
    rows, columns = pixels.shape[-2:]
    return pixels[sample, :, _inside(row, offset[..., 0], rows), _inside(column, offset[..., 1], columns)]


def _inside(place: torch.Tensor, offset: torch.Tensor, edge: int) -> torch.Tensor:
    """Places so far away, on the other side where they would be outside."""
    moved = place + offset
    return torch.where((moved < 0) | (moved >= edge), place - offset, moved)


def noise2noise(batch: PatchBatch) -> BlindTask:
    """Predict a second image of the same from the first, or the other way round.

    References
    ----------
    J. Lehtinen et al., Noise2Noise: learning image restoration without clean data, ICML (2018).
    """
    return BlindTask(batch.pixels, batch.second, batch.valid)


METHODS: Mapping[str, Callable[[PatchBatch], BlindTask]] = {
    "noise2void": noise2void,
    "noise2void2": noise2void2,
    "noise2self": noise2self,
    "noise2noise": noise2noise,
}


def mean_loss(
    module: Callable[[torch.Tensor], torch.Tensor], trial: BlindTask, deviation: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of the pixels that count, in units of the deviation of each channel."""
    wrong = (module(trial.given) - trial.wanted) / deviation.view(-1, 1, 1)
    return (wrong.square() * trial.counted).sum() / trial.counted.sum().clamp(min=1)
