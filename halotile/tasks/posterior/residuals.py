"""Deviations of posterior samples from their mean: a model linearized at some positions, its metric, linear and bent draws.

References
----------
J. Knollmüller, T. A. Enßlin, Metric Gaussian variational inference, arXiv:1901.11033 (2019). P. Frank, R. Leike, T. A. Enßlin, Geometric variational
inference, Entropy 23 (2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from halotile.errors import ConfigError

LATENT = 2**31 + 2
"""Role of the random numbers, besides those of an image: see ``gaussian.py``."""
WINDOW = 4
"""Steps of conjugate gradients whose gain estimates the energy that is left."""
SHARE, LEAST_SCALE = 0.1, 0.01
"""Share of the residual that a step of bending leaves, and the least part of a step."""
Tree = dict[str, Any]
Rows = torch.Tensor
Apply = Callable[[Rows], Rows]


class Likelihood(Protocol):
    """Probability of the data given a signal.

    ``energy``: its negative logarithm, one number; ``metric_root``: root of the Fisher metric in each entry of the signal; ``transformation``: coordinates in
    which that metric is 1, so that its derivative is ``metric_root``. Linear samples do not need it.
    """

    def energy(self, signal: torch.Tensor) -> torch.Tensor: ...

    def metric_root(self, signal: torch.Tensor) -> torch.Tensor: ...

    def transformation(self, signal: torch.Tensor) -> torch.Tensor: ...


@dataclass
class Inference:
    """A model and a likelihood over rows of numbers, each row a latent position."""

    model: Callable[[Tree], torch.Tensor]
    likelihood: Likelihood
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors of a position, by their names
    vmap: bool = True
    products: int = 0

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def split(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The numbers of each name, on the last axis."""
        return dict(zip(self.shapes, rows.split([math.prod(s) for s in self.shapes.values()], -1), strict=True))

    def tree(self, row: Rows) -> Tree:
        """A latent position as the model gets it."""
        tree: Tree = {}
        for name, part in self.split(row).items():
            *folders, last = name.split(".")
            inner = tree
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[last] = part.reshape(self.shapes[name])
        return tree

    def each(self, function: Callable[[torch.Tensor], torch.Tensor], rows: Rows) -> Rows:
        """The results of a function for each row."""
        if self.vmap:
            return torch.func.vmap(function)(rows)
        return torch.stack([function(row) for row in rows])

    def signals(self, rows: Rows) -> Rows:
        return self.each(lambda row: self.model(self.tree(row)), rows)

    def checked_energy(self, row: Rows) -> float:
        """The energy of the data at a position; a model and a likelihood that do not fit together are refused."""
        signal = self.model(self.tree(row))
        data, root = getattr(self.likelihood, "data", signal), self.likelihood.metric_root(signal)
        energy = float(self.likelihood.energy(signal))
        if not signal.shape == data.shape == root.shape:
            shapes = ", ".join(str(list(each.shape)) for each in (signal, data, root))
            raise ConfigError(f"signal, data and metric_root have shapes {shapes}. Return the same from the model.")
        if not (math.isfinite(energy) and root.isfinite().all()):
            raise ConfigError(
                f"the data's energy or metric is not finite ({energy:g}) at the start. Write another one."
            )
        try:
            point = Linearized(self, row[None])
        except RuntimeError as error:
            raise ConfigError(f"torch.func.vmap cannot compute the model ({error}). Write vmap=False.") from error
        if not point.signal.requires_grad:
            raise ConfigError("the signal does not follow from the position. Use functions of torch in the model.")
        return energy


class Linearized:
    """The model at some positions, with products of its Jacobian ``J`` that do not evaluate it again."""

    def __init__(self, inference: Inference, positions: Rows) -> None:
        self.inference = inference
        self.positions = positions.detach().requires_grad_()
        with torch.enable_grad():
            self.signal = inference.signals(self.positions)

    @cached_property
    def root(self) -> Rows:
        return self.inference.each(self.inference.likelihood.metric_root, self.signal.detach()).to(self.signal.dtype)

    @cached_property
    def weight(self) -> Rows:
        return self.root.square()

    @cached_property
    def transformed(self) -> Rows:
        return self.inference.each(self.inference.likelihood.transformation, self.signal.detach())

    def back(self, cotangent: Rows) -> Rows:
        """``Jᵀ u``."""
        found: Rows = torch.autograd.grad(self.signal, self.positions, cotangent, retain_graph=True)[0]
        return found

    @cached_property
    def _transposed(self) -> tuple[Rows, Rows]:
        """``Jᵀ u`` as a function of ``u``: its transpose is ``J``."""
        with torch.enable_grad():
            dual = torch.zeros_like(self.signal, requires_grad=True)
            pulled = torch.autograd.grad(self.signal, self.positions, dual, create_graph=True)[0]
        return pulled, dual

    def forth(self, tangent: Rows) -> Rows:
        """``J v``."""
        found: Rows = torch.autograd.grad(*self._transposed, tangent, retain_graph=True)[0]
        return found

    def metric(self, tangent: Rows) -> Rows:
        """``v + Jᵀ R² J v``."""
        self.inference.products += len(tangent)
        return tangent + self.back(self.weight * self.forth(tangent))

    @cached_property
    def _of_data(self) -> tuple[Rows, Rows]:
        """The likelihood's energies and their derivatives."""
        with torch.enable_grad():
            signal = self.signal.detach().requires_grad_()
            energies = self.inference.each(self.inference.likelihood.energy, signal)
            return energies.detach(), torch.autograd.grad(energies.sum(), signal)[0]

    @property
    def energies(self) -> Rows:
        """Negative logarithms of likelihood and prior."""
        return self._of_data[0] + self.positions.detach().square().sum(-1) / 2

    @property
    def gradients(self) -> Rows:
        return self.positions.detach() + self.back(self._of_data[1])

    @property
    def reduced_chi2(self) -> Rows:
        """Mean squares of the data's residuals, in standard deviations; where the metric is 0, nothing was measured."""
        seen = self.root > 0
        squares = torch.where(seen, self._of_data[1] / self.root, 0).square()
        return squares.flatten(1).sum(1) / seen.flatten(1).sum(1).clamp(min=1)


def dots(left: Rows, right: Rows) -> Rows:
    """Scalar products of rows."""
    return (left * right).sum(-1)


def conjugate_gradients(
    apply: Apply, sides: Rows, start: Rows | None = None, *, enough: float = 0.0, share: float = 0.0, steps: int = 100
) -> Rows:
    """Solve one system for each row; a row is done when the energy that it gains becomes small, and stands still from then on.

    ``enough``: energy, half the squared error in the norm of the matrix, that may be left; ``share``: the same, as a share of all that was gained.

    >>> conjugate_gradients(lambda rows: 2 * rows, torch.ones(1, 2)).tolist()
    [[0.5, 0.5]]
    """
    found = torch.zeros_like(sides) if start is None else start.clone()
    residual = sides.clone() if start is None else sides - apply(start)
    search, length = residual.clone(), dots(residual, residual)
    gains: list[Rows] = []
    least = torch.finfo(length.dtype).eps ** 2 * dots(sides, sides)
    gained, is_active = torch.zeros_like(length), length > least
    for _ in range(steps):
        if not is_active.any():
            break
        seen = apply(search)
        bend = dots(search, seen)
        is_active &= bend > 0
        step = torch.where(is_active, length / bend, 0)
        found += step[:, None] * search
        residual -= step[:, None] * seen
        gains = [*gains, step * length / 2][-WINDOW:]
        gained += gains[-1]
        if len(gains) == WINDOW:
            is_active &= sum(gains) > (share * gained).clamp(min=enough)
        left = dots(residual, residual)
        is_active &= left > least
        search = residual + torch.where(is_active, left / length, 0)[:, None] * search
        length = left
    return found


@dataclass(frozen=True)
class Draws:
    """Pairs of samples around a position.

    ``numbers``: those of the pairs; ``key``: of the random numbers, the same for all pairs; ``kept``: 1 where a latent number varies, 0 where it does not.
    """

    inference: Inference
    center: Rows
    numbers: Sequence[int]
    seed: int
    key: int
    kept: Rows

    @cached_property
    def _at(self) -> Linearized:
        return Linearized(self.inference, self.center.expand(len(self.numbers), -1))

    @cached_property
    def _white(self) -> tuple[Rows, Rows]:
        """White noise of the data and of the prior: one stream for each pair."""
        shape = self._at.signal.shape[1:]
        drawn = np.empty((len(self.numbers), math.prod(shape) + self.inference.size))
        for row, number in zip(drawn, self.numbers, strict=True):
            key = np.random.SeedSequence([self.seed, LATENT, self.key, number])
            np.random.Generator(np.random.Philox(key)).standard_normal(out=row)
        rows = torch.from_numpy(drawn).to(self.center)
        data, prior = rows.split([math.prod(shape), self.inference.size], 1)
        return data.reshape(-1, *shape), self.kept * prior

    @cached_property
    def _sides(self) -> Rows:
        """Numbers whose covariance is the metric."""
        data, prior = self._white
        return self.kept * self._at.back(self._at.root * data) + prior

    def linear(self, tol: float, steps: int) -> Rows:
        """Residuals whose covariance is the inverse metric (MGVI): of each pair one and its mirror image."""
        enough, start = tol * self.inference.size, self._white[1]
        metric: Apply = lambda rows: self.kept * self._at.metric(rows)  # noqa: E731
        return _mirrored(conjugate_gradients(metric, self._sides, start, enough=enough, steps=steps))

    def bent(self, start: Rows, tol: float, steps: int, inner: int) -> Rows:
        """Residuals that are white in coordinates in which the metric at the center is nearly 1 (geoVI).

        A sample ``x`` solves ``x - e + Jᵀ(e) R(e) (t(x) - t(e)) = side``, here by Newton's method. A step that does not come closer is halved.
        """
        sides, enough = _mirrored(self._sides), tol * self.inference.size
        at = Linearized(self.inference, self.center.expand(len(sides), -1))
        base, change = self.center + start, torch.zeros_like(start)
        scale, gap = torch.ones_like(start[:, 0]), torch.full_like(start[:, 0], math.inf)
        for _ in range(steps):
            there = Linearized(self.inference, base + scale[:, None] * change)
            path = self.kept * at.back(at.root * (there.transformed - at.transformed))
            residual = sides - (there.positions - at.positions).detach() - path
            left = dots(residual, residual)
            is_closer = (left < gap) & (scale > 0)
            gap = torch.where(is_closer, left, gap)
            base = torch.where(is_closer[:, None], there.positions.detach(), base)
            step = self._newton(at, there, is_closer[:, None] * residual, inner)
            change = torch.where(is_closer[:, None], step, change)
            is_done = is_closer & (dots(step, residual).abs() / 2 <= enough)
            base = base + is_done[:, None] * step
            scale = torch.where(is_closer, 1.0, scale / 2) * ~is_done * (scale > LEAST_SCALE)
            if not scale.any():
                break
        return base - self.center

    def _newton(self, at: Linearized, there: Linearized, residual: Rows, steps: int) -> Rows:
        """Solve ``v + Jᵀ(e) R(e) R(x) J(x) v = residual``, which is not symmetric, by stabilized biconjugate gradients."""
        root = at.root * there.root

        def apply(rows: Rows) -> Rows:
            self.inference.products += len(rows)
            return rows + self.kept * at.back(root * there.forth(rows))

        found, shadow, search, scale = torch.zeros_like(residual), residual, residual, dots(residual, residual)
        length, is_active = scale, scale > 0
        for _ in range(steps):
            if not is_active.any():
                break
            seen = apply(search)
            first = torch.where(is_active, length / dots(shadow, seen), 0)[:, None]
            half = residual - first * seen
            turned = apply(half)
            second = torch.where(is_active, dots(turned, half) / dots(turned, turned), 0).nan_to_num(0)[:, None]
            found = found + first * search + second * half
            residual = half - second * turned
            is_active &= dots(residual, residual) > SHARE**2 * scale
            before, length = length, dots(shadow, residual)
            ratio = torch.where(is_active, length / before, 0)[:, None] * first / second
            search = torch.where(is_active[:, None], residual + ratio * (search - second * seen), 0)
        return found


def _mirrored(rows: Rows) -> Rows:
    return torch.stack((rows, -rows), 1).flatten(0, 1)
