"""Conjugate gradients on the normal equations, one pass per iteration and one before the first."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halotile.graphs.solvers.base import (
    RECOMPUTED,
    RESIDUAL,
    SPENT,
    Problem,
    ReadVector,
    SolverBase,
    SolverTraits,
    State,
    Step,
    advanced,
)
from halotile.storage.rim import Readable
from halotile.tasks.image_task import Sum
from halotile.tasks.operators.sum import Total
from halotile.tasks.terms import MISFIT

RR, PQ, RQ, QQ = "rr", "pq", "rq", "qq"
FIRST = "first"  # square of the first residual
COMPUTED = "computed"  # residual relative to the first, when it was last computed and not updated by recurrence
ROUNDED = 100.0  # factor on the resolution of the pixels: an updated residual shorter by this is mostly rounding error
# Largest ratio of a recomputed residual to the one before it at which it pays to go on; also of an updated residual to
# the recomputed one at which the updated one was rounding error.
PAYS = 0.5

# Factor on the resolution of the pixels times the length of the measurements: a step that changes `A x` by less
# follows rounding alone. At the solution, such steps are 1.7 to 2.6 times that product, for images of any size in
# single and in double precision.
NOISE = 4.0


@dataclass(frozen=True)
class ConjugateGradients(SolverBase):
    """``N x = b``: for least squares without a prior, the image of least misfit.

    ``x``, the residual ``r``, the direction ``p`` and ``q = N p`` are written in one pass: the length of the
    next residual, which the new direction needs, follows from sums over the pass before. Rounding makes the
    updated residual drift away from ``b - N x``: once it is as short as was asked for, or as single or double
    precision can represent it, it is recomputed, and the directions restart from it. When that no longer
    shortens it, or it was rounding error from the start, the solver is done.

    References
    ----------
    M. Hestenes, E. Stiefel, Methods of conjugate gradients for solving linear systems, J. Res. NBS 49 (1952).
    """

    name: ClassVar[str] = "cg"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2, "r": 2, "p": 2, "q": 2}
    traits: ClassVar[SolverTraits] = SolverTraits(
        prior_by=None, takes_steps=False, passes_before=1, needs_squares=True, reads_measurements=False
    )

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the recomputed residual is small or as short as rounding permits.

        >>> row = {"change": 0.001, "residual": 0.005}
        >>> [ConjugateGradients().is_done(0.01, row | {"recomputed": anew}) for anew in (0.0, 1.0)]
        [False, True]
        """
        return bool(row[RECOMPUTED]) and (row[RESIDUAL] <= tol or bool(row.get(SPENT)))

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one step along the direction, and the next direction. The first pass only computes the residual."""
        if state.passes == 0:
            return self._restart(problem, Total((problem.start,), (1.0,)))
        alpha, beta = _coefficients(state.numbers)
        x, r, p, q = (read(name, 0) for name in ("x", "r", "p", "q"))
        ahead = Total((x, p), (1.0, alpha))
        if _is_due(problem, state.numbers):
            return self._restart(problem, problem.computed_once(ahead))
        residual = Total((r, q), (1.0, -alpha))
        return self._make_step(problem, ahead, residual, Total((residual, p), (1.0, beta)))

    def _restart(self, problem: Problem, x: Readable) -> Step:
        """Return the recomputed residual, and the direction along it."""
        residual = problem.computed_once(Total((problem.gradient(x),), (-1.0,)))
        return self._make_step(problem, x, residual, residual)

    def _make_step(self, problem: Problem, x: Readable, r: Readable, p: Readable) -> Step:
        direction = problem.computed_once(p)
        q = problem.normal(direction)
        pairs = {RR: (r, r), PQ: (direction, q), RQ: (r, q), QQ: (q, q)}
        sums = tuple(Sum(name, "dot", left, right) for name, (left, right) in pairs.items())
        return Step({"x": x, "r": r, "p": direction, "q": q}, sums)

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state, with its misfit, its relative residual, and the sums for its coefficients."""
        coefficients = {name: sums[name] for name in (RR, PQ, RQ, QQ)}
        recomputed = MISFIT in sums  # only a gradient records it
        if recomputed:
            misfit = sums[MISFIT] + problem.misfit_of_zero
        else:
            alpha, _ = _coefficients(state.numbers)
            misfit = state.numbers[MISFIT] - alpha * state.numbers[RR] / 2
        first = state.numbers.get(FIRST, sums[RR])
        residual = math.sqrt(sums[RR] / first) if first > 0 else 0.0
        before, packed = (state.numbers.get(name, math.inf) for name in (COMPUTED, RESIDUAL))
        was_rounding = residual > PAYS * before and packed < PAYS * residual
        reported = {
            FIRST: first,
            MISFIT: max(misfit, 0.0),
            RESIDUAL: residual,
            RECOMPUTED: float(recomputed),
            COMPUTED: residual if recomputed else before,
            SPENT: float(recomputed and (was_rounding or _follows_rounding(problem, coefficients))),
        }
        return advanced(state, **coefficients, **reported)


def _is_due(problem: Problem, numbers: Mapping[str, float]) -> bool:
    """Return True where the residual is to be recomputed instead of updated."""
    packed = ROUNDED * float(np.finfo(problem.dtype).eps) * numbers.get(COMPUTED, 1.0)
    return not numbers[RECOMPUTED] and numbers[RESIDUAL] <= max(problem.tol, packed)


def _follows_rounding(problem: Problem, sums: Mapping[str, float]) -> bool:
    """Return True where the step ahead gains less than rounding costs, if the length of the measurements is known."""
    alpha, _ = _coefficients(sums)
    least = (NOISE * float(np.finfo(problem.dtype).eps)) ** 2 * problem.misfit_of_zero
    return alpha * sums[RR] / 2 < least


def _coefficients(sums: Mapping[str, float]) -> tuple[float, float]:
    """Return the step along the direction, and the factor of the old direction in the new one."""
    if sums[PQ] <= 0 or sums[RR] <= 0:
        return 0.0, 0.0  # nothing is left to gain
    alpha = sums[RR] / sums[PQ]
    after = sums[RR] - 2 * alpha * sums[RQ] + alpha**2 * sums[QQ]
    return alpha, max(after, 0.0) / sums[RR]


SOLVER = ConjugateGradients
