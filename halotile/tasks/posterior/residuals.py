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
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from halotile.errors import ConfigError
from halotile.tasks.krylov import conjugate_gradients

LATENT = 2**31 + 3  # role of the random numbers, besides those of an image: see `gaussian.py`
SHARE, LEAST_PART = 0.1, 0.01  # share of the residual that a step of bending leaves, and the least part of a step
PROBES = 16  # draws for the diagonal of the metric: with it, an image of 128² takes a tenth of the steps
Tree = Any  # a latent position: tensors in a dictionary, or dictionaries of them
Rows: TypeAlias = torch.Tensor


class Likelihood(Protocol):
    """Probability of the data given a signal.

    ``energy``: its negative logarithm, one number; ``metric_root``: root of the Fisher metric in each entry of the signal; ``transformation``: coordinates in
    which that metric is 1, so that its derivative is ``metric_root``. Linear samples do not need it.
    """

    def energy(self, signal: torch.Tensor) -> torch.Tensor: ...

    def metric_root(self, signal: torch.Tensor) -> torch.Tensor: ...

    def transformation(self, signal: torch.Tensor) -> torch.Tensor: ...


def check(is_good: object, problem: str) -> None:
    if not is_good:
        raise ConfigError(problem)


def numbers(given: Any) -> torch.Tensor:
    """Real numbers of any kind as floating point; those that are not a tensor in double precision."""
    given = given if isinstance(given, torch.Tensor) else np.asarray(given)
    check("complex" not in str(given.dtype), "numbers are complex. Write real and imaginary part as two real ones.")
    if isinstance(given, torch.Tensor):
        return given if given.is_floating_point() else given.double()
    return torch.from_numpy(given.astype(np.float64))


@dataclass
class Inference:
    """A model and a likelihood over rows of numbers, each row a latent position."""

    model: Callable[[Tree], torch.Tensor]
    likelihood: Likelihood
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors of a position, by their names
    structure: Any  # of a position
    vmap: bool = True
    products: int = 0
    unfinished: int = 0  # samples whose solver did not reach its tolerance

    def split(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The numbers of each name, on the last axis."""
        return dict(zip(self.shapes, rows.split([math.prod(s) for s in self.shapes.values()], -1), strict=True))

    def tree(self, row: Rows) -> Tree:
        """A latent position as the model gets it."""
        parts = self.split(row).items()
        return pytree.tree_unflatten([part.reshape(self.shapes[name]) for name, part in parts], self.structure)

    def each(self, function: Callable[[torch.Tensor], torch.Tensor], rows: Rows) -> Rows:
        """The results of a function for each row."""
        if self.vmap:
            return torch.func.vmap(function)(rows)
        return torch.stack([function(row) for row in rows])

    def checked_figures(self, row: Rows) -> list[float]:
        """Figures that tell this model and these data from others, at a position and beside it; what does not fit together is refused."""
        signal = self.model(self.tree(row))
        check(isinstance(signal, torch.Tensor), f"the model returns a {type(signal).__name__}. Return one tensor.")
        data, root = getattr(self.likelihood, "data", signal), self.likelihood.metric_root(signal)
        shapes = [list(each.shape) for each in (signal, data, root)]
        check(shapes[1:] == shapes[:2], f"signal, data and metric_root have shapes {shapes}. Write the same shapes.")
        energy = float(self.likelihood.energy(signal))
        is_finite = math.isfinite(energy) and root.isfinite().all()
        check(is_finite, f"energy ({energy:g}) or metric of the data are not finite at the start. Write another one.")
        places = torch.stack([row, row + 0.1 * white(row.shape, row, 0)])
        try:
            point, again = Linearized(self, places), Linearized(self, places)
        except RuntimeError as error:
            if not self.vmap:
                raise
            raise ConfigError(f"torch.func.vmap cannot compute the model ({error}). Write vmap=False.") from error
        check(point.signal.requires_grad, "the signal does not follow from the position. Use torch in the model.")
        signal = point.signal.detach()
        is_random = (signal - again.signal).norm() > 1e-4 * signal.norm()  # atomic sums of a GPU are not
        check(not is_random, "the model returns other values when it is called again. Leave out dropout and noise.")
        seen = *signal, point.back(point.slopes[1])[1]
        return [float(4 * each.norm() + (each * white(each.shape, each, 1)).sum()) for each in seen]


class Linearized:
    """The model at some positions, with products of its Jacobian ``J`` that do not evaluate it again."""

    def __init__(self, inference: Inference, positions: Rows) -> None:
        self.inference = inference
        self.positions = positions.detach().requires_grad_()
        with torch.enable_grad():
            self.signal = inference.each(lambda row: inference.model(inference.tree(row)), self.positions)

    @cached_property
    def root(self) -> Rows:
        return self.inference.each(self.inference.likelihood.metric_root, self.signal.detach()).to(self.signal.dtype)

    @cached_property
    def transformed(self) -> Rows:
        return self.inference.each(self.inference.likelihood.transformation, self.signal.detach())

    def back(self, cotangent: Rows) -> Rows:
        """``Jᵀ u``."""
        return torch.autograd.grad(self.signal, self.positions, cotangent, retain_graph=True)[0]

    @cached_property
    def _transposed(self) -> tuple[Rows, Rows]:
        """``Jᵀ u`` as a function of ``u``: its transpose is ``J``."""
        with torch.enable_grad():
            dual = torch.zeros_like(self.signal, requires_grad=True)
            pulled = torch.autograd.grad(self.signal, self.positions, dual, create_graph=True)[0]
        return pulled, dual

    def forth(self, tangent: Rows) -> Rows:
        """``J v``."""
        return torch.autograd.grad(*self._transposed, tangent, retain_graph=True)[0]

    def metric(self, tangent: Rows) -> Rows:
        """``v + Jᵀ R² J v``."""
        self.inference.products += len(tangent)
        return tangent + self.back(self.root.square() * self.forth(tangent))

    @cached_property
    def slopes(self) -> tuple[Rows, Rows]:
        """The likelihood's energies and their derivatives."""
        with torch.enable_grad():
            signal = self.signal.detach().requires_grad_()
            energies = self.inference.each(self.inference.likelihood.energy, signal)
            return energies.detach(), torch.autograd.grad(energies.sum(), signal)[0]

    def energies(self) -> Rows:
        """Negative logarithms of likelihood and prior."""
        return self.slopes[0] + self.positions.detach().square().sum(-1) / 2

    def reduced_chi2(self) -> Rows:
        """Mean squares of the data's residuals, in standard deviations; where the metric is 0, nothing was measured."""
        seen, slopes = (each.reshape(len(each), -1) for each in (self.root, self.slopes[1]))
        return torch.where(seen > 0, slopes / seen, 0).square().sum(1) / (seen > 0).sum(1).clamp(min=1)

    def scale(self) -> Rows:
        """Root of about the diagonal of the metric: the mean square of what white noise of the data becomes."""
        noise = (white(self.signal.shape, self.positions, probe, PROBES) for probe in range(PROBES))
        total: Rows = sum(self.back(self.root * each).square()[0] for each in noise)
        return (1 + total / PROBES).sqrt()


def dots(left: Rows, right: Rows) -> Rows:
    """Scalar products of rows."""
    return (left * right).sum(-1)


def white(shape: Sequence[int], like: Rows, *key: int) -> torch.Tensor:
    """Standard normal numbers that follow from a key."""
    stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([LATENT, *key])))
    return torch.from_numpy(stream.standard_normal(tuple(shape))).to(like)


@dataclass(frozen=True)
class Draws:
    """Pairs of samples around a position.

    ``numbers``: those of the pairs; ``seed`` and ``key``: of the random numbers, the same for all pairs; ``scale``: root of about the diagonal of the metric;
    ``kept``: 1 where a latent number varies, 0 where it does not.
    """

    inference: Inference
    center: Rows
    scale: Rows
    numbers: Sequence[int]
    seed: int
    key: int
    kept: Rows

    @cached_property
    def _at(self) -> Linearized:
        return Linearized(self.inference, self.center.expand(len(self.numbers), -1))

    def _white(self, shape: Sequence[int], role: int) -> Rows:
        """White noise, from one stream for each pair."""
        return torch.stack([white(shape, self.center, self.seed, self.key, n, role) for n in self.numbers])

    @cached_property
    def _sides(self) -> Rows:
        """Numbers whose covariance is the metric."""
        data, prior = self._white(self._at.signal.shape[1:], 0), self._white(self.center.shape, 1)
        return self.kept * (self._at.back(self._at.root * data) + prior)

    def linear(self, tol: float, steps: int) -> Rows:
        """Residuals whose covariance is the inverse metric (MGVI): of each pair one and its mirror image."""
        root, apply = self.scale, self._at.metric

        def scaled(rows: Rows) -> Rows:
            return self.kept * apply(rows / root) / root

        sides = self._sides / root
        found, left = conjugate_gradients(scaled, sides, tol, steps)
        if left > tol > 0:
            self.inference.unfinished += 2 * int(((sides - scaled(found)).norm(dim=1) > tol * sides.norm(dim=1)).sum())
        return _mirrored(found / root)

    def bent(self, start: Rows, tol: float, steps: int, inner: int) -> Rows:
        """Residuals that are white in coordinates in which the metric at the center is nearly 1 (geoVI).

        A sample ``x`` solves ``x - e + Jᵀ(e) R(e) (t(x) - t(e)) = side``, here by Newton's method. A step that does not come closer is halved.
        """
        sides, enough = _mirrored(self._sides), tol**2 * self.center.numel()
        at = Linearized(self.inference, self.center.expand(len(sides), -1))
        base, change = self.center + start, torch.zeros_like(start)
        part, gap = torch.ones_like(start[:, :1]), torch.full_like(start[:, :1], math.inf)
        done = torch.zeros_like(part, dtype=torch.bool)
        for left_steps in reversed(range(steps + 1)):
            there = Linearized(self.inference, base + part * change)
            path = self.kept * at.back(at.root * (there.transformed - at.transformed))
            residual = sides - (there.positions - at.positions).detach() - path
            left = dots(residual, residual / self.scale.square())[:, None]
            is_closer = (left < gap) & (part > 0)
            base = torch.where(is_closer, there.positions.detach(), base)
            if not left_steps:
                done |= is_closer & (left <= enough)
                break
            step, is_solved = self._newton(at, there, torch.where(is_closer, residual, 0), inner, enough / 4)
            change, gap = torch.where(is_closer, step, change), torch.where(is_closer, left, gap)
            is_done = is_closer & is_solved & (dots(step, residual).abs() <= enough)[:, None]
            done |= is_done
            base = base + torch.where(is_done, step, 0)
            part = torch.where(is_closer, 1, part / 2) * ~is_done * (part > LEAST_PART)
            if not part.any():
                break
        self.inference.unfinished += int((~done).sum()) if tol > 0 else 0
        return base - self.center

    def _newton(self, at: Linearized, there: Linearized, residual: Rows, steps: int, least: float) -> tuple[Rows, Rows]:
        """Solve ``v + Jᵀ(e) R(e) R(x) J(x) v = residual``, which is not symmetric, by stabilized biconjugate gradients; return as well where it is solved."""
        root = at.root * there.root

        def apply(rows: Rows) -> Rows:
            self.inference.products += len(rows)
            rows = rows / self.scale
            return (rows + self.kept * at.back(root * there.forth(rows))) / self.scale

        found, shadow = torch.zeros_like(residual), residual / self.scale
        residual = search = shadow
        length = dots(shadow, shadow)[:, None]
        goal, is_active = (SHARE**2 * length).clamp(min=least), length > 0
        for _ in range(steps):
            if not is_active.any():
                break
            seen = apply(search)
            first = torch.where(is_active, length / dots(shadow, seen)[:, None], 0)
            half = residual - first * seen
            turned = apply(half)
            second = torch.where(is_active, (dots(turned, half) / dots(turned, turned))[:, None], 0).nan_to_num(0)
            found = found + first * search + second * half
            residual = half - second * turned
            is_active &= dots(residual, residual)[:, None] > goal
            before, length = length, dots(shadow, residual)[:, None]
            search = residual + length / before * first / second * (search - second * seen)
            search = torch.where(is_active, search, 0)
        return found / self.scale, ~is_active


def _mirrored(rows: Rows) -> Rows:
    return torch.stack((rows, -rows), 1).flatten(0, 1)
