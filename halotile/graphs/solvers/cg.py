"""Conjugate gradients on the normal equations, one sweep an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers.base import Problem, State, Step, Vectors, advanced
from halotile.tasks.operators.sum import Total
from halotile.tasks.step import Sum

RR, PQ, RQ, QQ = "rr", "pq", "rq", "qq"


@dataclass(frozen=True)
class ConjugateGradients:
    """``N x = b``: for squares without a prior, the image of least misfit.

    ``x``, the residual ``r``, the direction ``p`` and ``q = N p`` are written in one sweep: the length that the residual is
    going to have, which the new direction needs, follows from sums over the sweep before.

    References
    ----------
    M. Hestenes, E. Stiefel, Methods of conjugate gradients for solving linear systems, J. Res. NBS 49 (1952).
    """

    name: ClassVar[str] = "cg"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2, "r": 2, "p": 2, "q": 2}

    def step(self, problem: Problem, state: State, read: Vectors) -> Step:
        """One step along the direction, and the direction after it. The first sweep only finds the residual."""
        if state.iteration == 0:
            start = problem.start
            residual = Total((problem.gradient(start),), (-1.0,))
            return self._made(problem, Total((start,), (1.0,)), residual, residual)
        alpha, beta = _coefficients(state.numbers)
        x, r, p, q = (read(name, 0) for name in ("x", "r", "p", "q"))
        residual = Total((r, q), (1.0, -alpha))
        return self._made(problem, Total((x, p), (1.0, alpha)), residual, Total((residual, p), (1.0, beta)))

    def _made(self, problem: Problem, x: Total, r: Total, p: Total) -> Step:
        direction = problem.held(p)
        q = problem.normal(direction)
        pairs = {RR: (r, r), PQ: (direction, q), RQ: (r, q), QQ: (q, q)}
        sums = tuple(Sum(name, "dot", left, right) for name, (left, right) in pairs.items())
        return Step({"x": x, "r": r, "p": direction, "q": q}, sums)

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """The next iteration, with the sums that its coefficients come from."""
        return advanced(state, **{name: sums[name] for name in (RR, PQ, RQ, QQ)})


def _coefficients(sums: Mapping[str, float]) -> tuple[float, float]:
    """How far along the direction, and how much of it is kept."""
    if sums[PQ] <= 0 or sums[RR] <= 0:
        return 0.0, 0.0  # nothing is left to gain
    alpha = sums[RR] / sums[PQ]
    after = sums[RR] - 2 * alpha * sums[RQ] + alpha**2 * sums[QQ]
    return alpha, max(after, 0.0) / sums[RR]


SOLVER = ConjugateGradients
