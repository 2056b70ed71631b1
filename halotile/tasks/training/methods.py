"""Methods that train a denoiser without clean images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

MASKED = 0.01
"""Share of the pixels of a patch that are masked by Noise2Void."""
AROUND = [place for place in itertools.product(range(-2, 3), repeat=2) if place != (0, 0)]
"""Neighbours whose median replaces a masked pixel."""
GRID = 4
"""Distance of the pixels that Noise2Self masks."""


class BlindTask(NamedTuple):
    """Input of the network, the wanted result, and the pixels that count."""

    given: torch.Tensor
    wanted: torch.Tensor
    counted: torch.Tensor


class PatchBatch(NamedTuple):
    """Patches as tensors, (patches, channels, rows, columns); ``valid`` is 0 or 1."""

    pixels: torch.Tensor
    valid: torch.Tensor
    second: torch.Tensor


def noise2void(batch: PatchBatch) -> BlindTask:
    """Predict masked pixels from their neighbours, which tell nothing of noise that differs from pixel to pixel.

    References
    ----------
    A. Krull, T.-O. Buchholz, F. Jug, Noise2Void: learning denoising from single noisy images, CVPR (2019); medians as by
    E. Höck et al., N2V2, ECCV Workshops (2022).
    """
    count, _, rows, columns = batch.pixels.shape
    number = max(1, round(MASKED * rows * columns))
    inside = (rows - 4) * (columns - 4)
    places = torch.stack([torch.randperm(inside)[:number] for _ in range(count)])
    row, column = places // (columns - 4) + 2, places % (columns - 4) + 2
    sample = torch.arange(count)[:, None].expand_as(row)
    around = torch.stack([batch.pixels[sample, :, row + a, column + b] for a, b in AROUND])
    given, counted = batch.pixels.clone(), torch.zeros_like(batch.valid)
    given[sample, :, row, column] = around.median(0).values
    counted[sample, :, row, column] = batch.valid[sample, :, row, column]
    return BlindTask(given, batch.pixels, counted)


def noise2self(batch: PatchBatch) -> BlindTask:
    """Predict the pixels of a grid, which have the means of their neighbours instead.

    References
    ----------
    J. Batson, L. Royer, Noise2Self: blind denoising by self-supervision, ICML (2019).
    """
    row, column = (int(n) for n in torch.randint(GRID, (2,)))
    pixels = batch.pixels
    padded = torch.nn.functional.pad(pixels, (1, 1, 1, 1), mode="reflect")
    means = (
        padded[..., :-2, 1:-1] + padded[..., 2:, 1:-1] + padded[..., 1:-1, :-2] + padded[..., 1:-1, 2:]
    ) / 4
    mask = torch.zeros_like(pixels)
    mask[..., row::GRID, column::GRID] = 1
    return BlindTask(torch.where(mask > 0, means, pixels), pixels, mask * batch.valid)


def noise2noise(batch: PatchBatch) -> BlindTask:
    """Predict a second image of the same from the first, or the other way round.

    References
    ----------
    J. Lehtinen et al., Noise2Noise: learning image restoration without clean data, ICML (2018).
    """
    return BlindTask(batch.pixels, batch.second, batch.valid)


METHODS: Mapping[str, Callable[[PatchBatch], BlindTask]] = {
    "noise2void": noise2void,
    "noise2self": noise2self,
    "noise2noise": noise2noise,
}


def mean_loss(module: torch.nn.Module, trial: BlindTask, deviation: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the pixels that count, in units of the deviation of each channel."""
    wrong = (module(trial.given) - trial.wanted) / deviation.view(-1, 1, 1)
    return (wrong.square() * trial.counted).sum() / trial.counted.sum().clamp(min=1)
