"""Losses of intensities: their sum over pixels, and their slope by the intensity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

LossAndSlope = tuple[torch.Tensor, torch.Tensor]
FLOOR = 1e-12  # least intensity whose root or logarithm is taken, relative to 1 count


def amplitude_mse(intensity: torch.Tensor, counted: torch.Tensor) -> LossAndSlope:
    """Squared differences of amplitudes, which have about the same spread for any number of photons.

    >>> loss, slope = amplitude_mse(torch.tensor([4.0]), torch.tensor([9.0]))
    >>> loss.tolist(), slope.tolist()
    ([1.0], [-0.5])
    """
    amplitude = intensity.clamp(min=FLOOR).sqrt()
    wrong = amplitude - counted.sqrt()
    return wrong.square(), wrong / amplitude


def intensity_mse(intensity: torch.Tensor, counted: torch.Tensor) -> LossAndSlope:
    """Squared differences of intensities."""
    wrong = intensity - counted
    return wrong.square(), 2 * wrong


def poisson_nll(intensity: torch.Tensor, counted: torch.Tensor) -> LossAndSlope:
    """Negative logarithm of the probability of so many photons, without what the intensity does not change."""
    floored = intensity.clamp(min=FLOOR)
    return intensity - counted * floored.log(), 1 - counted / floored


LOSSES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], LossAndSlope]] = {
    "amplitude_mse": amplitude_mse,
    "intensity_mse": intensity_mse,
    "poisson_nll": poisson_nll,
}
