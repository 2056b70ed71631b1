"""Solvers: a step from gradients, by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from halotile.tasks.ptychography.state import PartTensors, ReconstructionState, as_real

DECAYS, EPSILON = (0.9, 0.999), 1e-8
PatternSolver = Callable[[ReconstructionState, PartTensors, Mapping[str, float]], None]


def adam(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float]) -> None:
    """Adam, with real and imaginary parts by themselves.

    References
    ----------
    D. P. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR (2015).
    """
    state.steps += 1
    of_means, of_squares = (1 - decay**state.steps for decay in DECAYS)
    means, squares = (state.moments.setdefault(name, {}) for name in ("means", "squares"))
    for name, rate in rates.items():
        gradient, parameter = (as_real(values[name]) for values in (gradients, state.parameters))
        mean = as_real(means.setdefault(name, torch.zeros_like(gradients[name])))
        square = squares.setdefault(name, torch.zeros_like(gradient))
        mean.lerp_(gradient, 1 - DECAYS[0])
        square.lerp_(gradient.square(), 1 - DECAYS[1])
        spread = square.sqrt().div_(math.sqrt(of_squares)).add_(EPSILON)
        parameter.addcdiv_(mean, spread, value=-rate / of_means)


def sgd(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float]) -> None:
    """Steepest descent."""
    state.steps += 1
    for name, rate in rates.items():
        state.parameters[name].add_(gradients[name], alpha=-rate)


SOLVERS: Mapping[str, PatternSolver] = {"adam": adam, "sgd": sgd}
