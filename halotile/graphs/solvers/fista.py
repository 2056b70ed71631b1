"""FISTA: proximal gradient descent from an extrapolated point."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers.base import MOMENTUM, Problem, ReadVector, SolverBase, State, Step, advanced
from halotile.graphs.solvers.pgd import proximal_step
from halotile.storage.rim import Readable
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True)
class Fista(SolverBase):
    """``x' = prox(z - step ∇f(z))`` with ``z = x + (t - 1) / t' (x - x before)``.

    ``z`` is never stored: two copies of x are read instead.

    References
    ----------
    A. Beck, M. Teboulle, A fast iterative shrinkage-thresholding algorithm for linear inverse problems,
    SIAM J. Imaging Sci. 2 (2009) 183-202.
    """

    name: ClassVar[str] = "fista"
    vectors: ClassVar[Mapping[str, int]] = {"x": 3}

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one proximal gradient step from the extrapolated point."""
        t = state.numbers.get("t", 1.0)
        before = state.numbers.get(MOMENTUM, 1.0)
        momentum = (before - 1) / t
        x = read("x", 0)
        ahead: Readable = x
        if momentum:
            ahead = problem.within(Total((x, read("x", 1)), (1 + momentum, -momentum)), x)
        return Step({"x": proximal_step(problem, ahead)})

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state, with the numbers of the momentum."""
        t = state.numbers.get("t", 1.0)
        return advanced(state, **{MOMENTUM: t, "t": (1 + math.sqrt(1 + 4 * t * t)) / 2})


SOLVER = Fista
