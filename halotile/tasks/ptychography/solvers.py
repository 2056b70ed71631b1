"""Solvers: a step from gradients, by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halotile.tasks.groups.cut_tensors.transfers import as_real
from halotile.tasks.ptychography.model import Positions
from halotile.tasks.ptychography.recipe import SolverStage
from halotile.tasks.ptychography.state import PartTensors, ReconstructionState

EPSILON = 1e-8
# Epochs without a lower loss after which a stage with `plateau` multiplies its learning rate.
PATIENCE, FACTOR = 10, 0.2
EDGES = 8  # the largest curvature of the squared differences of an image, relative to that of one pixel's square
HISTORY = 5  # steps whose curvature L-BFGS remembers
ADDED_RATE = 0.01  # learning rate of Adam for the parts that a PIE does not refine itself, relative to its own


@dataclass(frozen=True)
class PatternBatch:
    """The patterns of a step.

    ``positions``: of each slot; ``scale``: factor from sums to means of a pixel; ``rate``: learning rate without the factors of the parts;
    ``stage``: the options of the solver.
    """

    positions: Sequence[Positions]
    scale: float
    rate: float
    stage: SolverStage

    @property
    def smoothness(self) -> float:
        """Weight of squared differences between neighbouring pixels of the object, whose gradient is in that of the object."""
        return self.stage.smoothness / self.scale


PatternSolver = Callable[[ReconstructionState, PartTensors, Mapping[str, float], PatternBatch], None]


def adam(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float], batch: PatternBatch) -> None:
    """Adam, with real and imaginary parts by themselves.

    References
    ----------
    D. P. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR (2015).
    """
    first, second = batch.stage.betas
    _forget_other_betas(state, torch.tensor([first, second], dtype=torch.float64))
    means, squares, counts = (state.moments.setdefault(name, {}) for name in ("means", "squares", "counts"))
    for name, rate in rates.items():
        # Relative to the counts, beside which EPSILON is to be small.
        gradient = as_real(gradients[name] * (batch.scale / state.root**2))
        parameter = as_real(state.parameters[name])
        mean = as_real(means.setdefault(name, torch.zeros_like(gradients[name])))
        square = squares.setdefault(name, torch.zeros_like(gradient))
        largest = []
        if batch.stage.amsgrad:
            most = state.moments.setdefault("largest", {})
            largest = [most.setdefault(name, torch.zeros_like(gradient))]
        count = counts.setdefault(name, torch.zeros((), device=parameter.device)).add_(1)
        # The kernel of torch.optim.Adam(fused=True): one pass over memory in place of ten.
        torch._fused_adam_(
            [parameter], [gradient], [mean], [square], largest, [count], lr=rate, beta1=first, beta2=second,
            weight_decay=0.0, eps=EPSILON, amsgrad=batch.stage.amsgrad, maximize=False,
        )  # fmt: skip


def _forget_other_betas(state: ReconstructionState, betas: torch.Tensor) -> None:
    """Forget moments that were kept with other shares: the correction of Adam would take them for its own."""
    kept = state.moments.setdefault("betas", {})
    if not torch.equal(kept.setdefault("both", betas).cpu(), betas):
        kept["both"] = betas
        for name in ("means", "squares", "counts", "largest"):
            state.moments.pop(name, None)


def sgd(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float], batch: PatternBatch) -> None:
    """Steepest descent, with ``momentum`` that of the heavy ball.

    References
    ----------
    B. T. Polyak, Some methods of speeding up the convergence of iteration methods, USSR Comput. Math. Math. Phys. 4 (1964) 1.
    """
    momentum, directions = batch.stage.momentum, gradients
    if momentum:
        directions = state.moments.setdefault("directions", {})
        for name in rates:
            last = directions.setdefault(name, torch.zeros_like(gradients[name]))
            last.mul_(momentum).add_(gradients[name], alpha=batch.scale)
    for name, rate in rates.items():
        state.parameters[name].add_(directions[name], alpha=-rate if momentum else -rate * batch.scale)


def rpie(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float], batch: PatternBatch) -> None:
    """The regularised ptychographic iterative engine, of several positions at once; with ``alpha`` 1 it is ePIE.

    The step of a pixel of the object is its gradient divided by its illumination in this batch, unless that is faint; for
    the probe, by the transmission of the object. Other parts are refined by Adam.

    References
    ----------
    A. Maiden, D. Johnson, P. Li, Further improvements to the ptychographical iterative engine, Optica 4 (2017) 736.
    """
    alpha = batch.stage.alpha
    weights = {"object": _light(state, batch), "probe": _passed(state, batch)}
    for name, weight in weights.items():
        if name in rates:
            curvature = 2 * ((1 - alpha) * weight + alpha * weight.max())
            if name == "object":
                curvature += EDGES * smoothness_factor(state, batch.smoothness)
            step = gradients[name] / curvature
            state.parameters[name].add_(step, alpha=-rates[name] / (state.norm**2 if name == "probe" else 1))
    adam(state, gradients, {name: ADDED_RATE * rate for name, rate in rates.items() if name not in weights}, batch)


def lbfgs(state: ReconstructionState, gradients: PartTensors, rates: Mapping[str, float], batch: PatternBatch) -> None:
    """Limited-memory BFGS, of all patterns at once, without a line search: each step is the learning rate times the direction.

    References
    ----------
    J. Nocedal, S. Wright, Numerical Optimization, algorithm 7.4.
    """
    # A part with a factor is measured in units of it, so that its step is larger by its square.
    factors = {name: rate / batch.rate for name, rate in rates.items()}
    gradient = _joined({name: gradients[name] * factor * batch.scale for name, factor in factors.items()})
    kept = state.moments.setdefault("lbfgs", {})
    if "gradient" in kept:
        _remember(kept, gradient)
    direction = gradient.clone()
    pairs = [(kept[f"step {n}"], kept[f"change {n}"]) for n in range(HISTORY) if f"step {n}" in kept]
    shares = []
    for step, change in pairs:  # the last one first
        shares.append(step.dot(direction) / change.dot(step))
        direction.sub_(change * shares[-1])
    if pairs:
        step, change = pairs[0]
        direction.mul_(step.dot(change) / change.dot(change))
    else:
        direction.mul_((1 / gradient.abs().sum()).clamp(max=1.0))
    for (step, change), share in zip(reversed(pairs), reversed(shares), strict=True):
        direction.add_(step * (share - change.dot(direction) / change.dot(step)))
    kept["gradient"], kept["step"] = gradient, direction.mul_(-batch.rate)
    lengths = [as_real(gradients[name]).numel() for name in factors]
    for (name, factor), part in zip(factors.items(), direction.split(lengths), strict=True):
        parameter = as_real(state.parameters[name])
        parameter.add_(part.view(parameter.shape), alpha=factor)


def begin_epoch(state: ReconstructionState, stage: SolverStage, number: int) -> None:
    """Discard what another solver, or an epoch in which parts were held, left in the state; ``number``: epoch of the stage, from 0."""
    following = state.moments.get("following")
    if number in (0, stage.hold_positions) or following:
        state.moments.pop("lbfgs", None)
    if number == 0:
        state.moments.pop("directions", None)
    if following and int(following["probe"].sub_(1)) < 0:
        state.moments.pop("following")
    state.follow_first()


def _remember(kept: PartTensors, gradient: torch.Tensor) -> None:
    """Keep the last step and what it changed in the gradient, if the loss was convex along it."""
    step, change = kept["step"], gradient - kept["gradient"]
    if float(change.dot(step)) <= EPSILON * float(step.norm() * change.norm()):
        return
    for n in reversed(range(HISTORY - 1)):
        for name in ("step", "change"):
            if f"{name} {n}" in kept:
                kept[f"{name} {n + 1}"] = kept[f"{name} {n}"]
    kept["step 0"], kept["change 0"] = step, change


def _joined(parts: PartTensors) -> torch.Tensor:
    return torch.cat([as_real(part).reshape(-1) for part in parts.values()])


SOLVERS: Mapping[str, PatternSolver] = {"adam": adam, "sgd": sgd, "rpie": rpie, "lbfgs": lbfgs}


def smoothness_factor(state: ReconstructionState, weight: float) -> float:
    """The factor of a difference between neighbouring pixels of the object in the gradient of a smoothness: the weight by the light of the probe."""
    pixels: int = state.parameters["object"].numel()
    return 2 * weight * state.norm**2 / pixels


def add_smoothness(state: ReconstructionState, gradients: PartTensors, weight: float) -> None:
    """Add the gradient of the mean squared difference between neighbouring pixels of the object."""
    image, factor = state.parameters["object"], smoothness_factor(state, weight)
    for axis, length in enumerate(image.shape):
        difference = factor * image.diff(dim=axis)
        gradients["object"].narrow(axis, 1, length - 1).add_(difference)
        gradients["object"].narrow(axis, 0, length - 1).sub_(difference)


def _light(state: ReconstructionState, batch: PatternBatch) -> torch.Tensor:
    """Intensity that each pixel of the object had from the positions of a batch, to a whole pixel."""
    intensity = state.probe.abs().square().sum(0)
    rows, columns = intensity.shape
    total = torch.zeros(state.parameters["object"].shape, device=intensity.device)
    for positions in batch.positions:
        for (row, column), weight in zip(positions.pixel.tolist(), positions.weight.tolist(), strict=True):
            total[row : row + rows, column : column + columns].add_(intensity, alpha=weight**2)
    return total


def _passed(state: ReconstructionState, batch: PatternBatch) -> torch.Tensor:
    """Sum of the squared modulus of the object that each pixel of the probe saw."""
    rows, columns = state.parameters["probe"].shape[-2:]
    modulus = state.parameters["object"].abs().square()
    total = torch.zeros(rows, columns, device=modulus.device)
    for positions in batch.positions:
        for (row, column), weight in zip(positions.pixel.tolist(), positions.weight.tolist(), strict=True):
            total.add_(modulus[row : row + rows, column : column + columns], alpha=weight**2)
    return total


def rate_of(stage: SolverStage, losses: Sequence[float]) -> float:
    """The learning rate after the epochs of a stage that are done."""
    rate = stage.lr
    if stage.plateau:
        best, waited = math.inf, 0
        for loss in losses:
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited > PATIENCE:
                rate, waited = rate * FACTOR, 0
    return rate
