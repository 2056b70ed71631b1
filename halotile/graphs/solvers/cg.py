"""Conjugate gradients on the normal equations, one sweep an iteration and one before the first."""

from __future__ import annotations

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
    SolverBase,
    State,
    Step,
    Traits,
    Vectors,
    advanced,
)
from halotile.storage.rim import Readable
from halotile.tasks.fidelity import MISFIT
from halotile.tasks.operators.sum import Total
from halotile.tasks.step import Sum

RR, PQ, RQ, QQ = "rr", "pq", "rq", "qq"
FIRST = "first"
"""The square of the first residual."""
COMPUTED = "computed"
"""How long the residual was, against the first one, when it was last computed and not carried."""
ROUNDED = 100.0
"""Times the resolution of the pixels: once a residual is shorter by this, what is carried of it is mostly rounding."""
PAYS = 0.5
"""How much shorter a computed residual is than the one before it, if going on from it pays; and a carried one than the computed, if
what was carried was rounding."""

NOISE = 4.0
"""Times the resolution of the pixels, of the length of what was measured: a step that changes ``A x`` by less follows rounding alone.
At the solution, such steps are 1.7 to 2.6 times it, for images of any size in single and in double precision."""


@dataclass(frozen=True)
class ConjugateGradients(SolverBase):
    """``N x = b``: for squares without a prior, the image of least misfit.

    ``x``, the residual ``r``, the direction ``p`` and ``q = N p`` are written in one sweep: the length that the residual is
    going to have, which the new direction needs, follows from sums over the sweep before. Rounding takes the residual away from
    ``b - N x`` in the course of time: once it is as short as was asked for, or as single or double precision can carry it, it is
    computed anew, and the directions begin again from it. When that no longer makes it shorter, or it was rounding from the start, the solver
    is done.

    References
    ----------
    M. Hestenes, E. Stiefel, Methods of conjugate gradients for solving linear systems, J. Res. NBS 49 (1952).
    """

    name: ClassVar[str] = "cg"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2, "r": 2, "p": 2, "q": 2}
    traits: ClassVar[Traits] = Traits(
        prior_by=None, takes_steps=False, passes_before=1, fidelities=("l2",), reads_measurements=False
    )

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the residual, computed anew, is small or as short as rounding lets it be.

        Examples
        --------
        >>> row = {"change": 0.001, "residual": 0.005}
        >>> [ConjugateGradients().is_done(0.01, row | {"recomputed": anew}) for anew in (0.0, 1.0)]
        [False, True]
        """
        return bool(row[RECOMPUTED]) and (row[RESIDUAL] <= tol or bool(row.get(SPENT)))

    def step(self, problem: Problem, state: State, read: Vectors) -> Step:
        """One step along the direction, and the direction after it. The first sweep only finds the residual."""
        if state.iteration == 0:
            return self._anew(problem, Total((problem.start,), (1.0,)))
        alpha, beta = _coefficients(state.numbers)
        x, r, p, q = (read(name, 0) for name in ("x", "r", "p", "q"))
        ahead = Total((x, p), (1.0, alpha))
        if _is_due(problem, state.numbers):
            return self._anew(problem, problem.held(ahead))
        residual = Total((r, q), (1.0, -alpha))
        return self._made(problem, ahead, residual, Total((residual, p), (1.0, beta)))

    def _anew(self, problem: Problem, x: Readable) -> Step:
        """The residual as it is, and the direction along it."""
        residual = problem.held(Total((problem.gradient(x),), (-1.0,)))
        return self._made(problem, x, residual, residual)

    def _made(self, problem: Problem, x: Readable, r: Readable, p: Readable) -> Step:
        direction = problem.held(p)
        q = problem.normal(direction)
        pairs = {RR: (r, r), PQ: (direction, q), RQ: (r, q), QQ: (q, q)}
        sums = tuple(Sum(name, "dot", left, right) for name, (left, right) in pairs.items())
        return Step({"x": x, "r": r, "p": direction, "q": q}, sums)

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """The next iteration, with the sums that its coefficients come from, its misfit and its relative residual."""
        known = {name: sums[name] for name in (RR, PQ, RQ, QQ)}
        recomputed = MISFIT in sums  # only a gradient notes it
        if recomputed:
            misfit = sums[MISFIT] + problem.misfit_of_zero
        else:
            alpha, _ = _coefficients(state.numbers)
            misfit = state.numbers[MISFIT] - alpha * state.numbers[RR] / 2
        first = state.numbers.get(FIRST, sums[RR])
        residual = math.sqrt(sums[RR] / first) if first > 0 else 0.0
        before, packed = (state.numbers.get(name, math.inf) for name in (COMPUTED, RESIDUAL))
        was_rounding = residual > PAYS * before and packed < PAYS * residual
        told = {
            FIRST: first,
            MISFIT: max(misfit, 0.0),
            RESIDUAL: residual,
            RECOMPUTED: float(recomputed),
            COMPUTED: residual if recomputed else before,
            SPENT: float(recomputed and (was_rounding or _follows_rounding(problem, known))),
        }
        return advanced(state, **known, **told)


def _is_due(problem: Problem, numbers: Mapping[str, float]) -> bool:
    """Whether the residual is to be computed, and not carried any further."""
    packed = ROUNDED * float(np.finfo(problem.dtype).eps) * numbers.get(COMPUTED, 1.0)
    return not numbers[RECOMPUTED] and numbers[RESIDUAL] <= max(problem.tol, packed)


def _follows_rounding(problem: Problem, sums: Mapping[str, float]) -> bool:
    """Whether the step ahead gains less than rounding costs, where the length of what was measured is known."""
    alpha, _ = _coefficients(sums)
    least = (NOISE * float(np.finfo(problem.dtype).eps)) ** 2 * problem.misfit_of_zero
    return alpha * sums[RR] / 2 < least


def _coefficients(sums: Mapping[str, float]) -> tuple[float, float]:
    """How far along the direction, and how much of it is kept."""
    if sums[PQ] <= 0 or sums[RR] <= 0:
        return 0.0, 0.0  # nothing is left to gain
    alpha = sums[RR] / sums[PQ]
    after = sums[RR] - 2 * alpha * sums[RQ] + alpha**2 * sums[QQ]
    return alpha, max(after, 0.0) / sums[RR]


SOLVER = ConjugateGradients
