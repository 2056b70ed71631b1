"""``|A|²``: an upper bound of the largest eigenvalue of the normal operator, by the Lanczos method."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halotile.graphs.solvers.base import Problem, ReadVector, SolverBase, SolverTraits, State, Step, advanced
from halotile.storage.views import Constant
from halotile.tasks.image_task import Sum
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.operators.sum import Total

SEED = 0
VV, VW, WW = "vv", "vw", "ww"
TINY = 1e-12  # ratio to the vector before below which a vector is rounding error: there is no new direction left
# Safety factor for rounding, and for eigenvalues so close together that a residual shows only one of them.
MARGIN = 1.001


@dataclass(frozen=True)
class Lanczos(SolverBase):
    """``N v = next v' + alpha v + back v before``: one pass per iteration, 15 of them are accurate to 1 %.

    ``v`` and ``w = N v`` are written in one pass. The vectors are scaled by a prediction of their length,
    which follows from sums over the pass before; the actual length is measured, so rounding does not
    accumulate.

    References
    ----------
    C. Lanczos, An iteration method for the solution of the eigenvalue problem of linear differential and integral
    operators, J. Res. NBS 45 (1950) 255-282.
    """

    name: ClassVar[str] = "lanczos"
    vectors: ClassVar[Mapping[str, int]] = {"v": 3, "w": 2}
    traits: ClassVar[SolverTraits] = SolverTraits(prior_by=None, takes_steps=False, for_jobs=False)

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return the next vector, and the normal operator applied to it."""
        v = problem.computed_once(problem.start if state.passes == 0 else self._next_vector(state, read))
        w = problem.normal(v)
        pairs = {VV: (v, v), VW: (v, w), WW: (w, w)}
        return Step({"v": v, "w": w}, tuple(Sum(name, "dot", *pair) for name, pair in pairs.items()))

    def _next_vector(self, state: State, read: ReadVector) -> Total:
        last = recurrence(state)[-1]
        parts = [("w", 0, 1.0), ("v", 0, -last.alpha), ("v", 1, -last.back)]
        if state.passes == 1:
            del parts[-1]  # the first vector has no predecessor
        return Total(tuple(read(name, age) for name, age, _ in parts), tuple(w / last.scale for *_, w in parts))

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state, with the sums of all iterations before."""
        return advanced(state, **{f"{name} {state.passes}": sums[name] for name in (VV, VW, WW)})

    def is_spent(self, state: State) -> bool:
        """Return True where further passes find nothing."""
        return is_spent(state)

    def bound(self, state: State) -> float:
        return largest_eigenvalue(state)


def begun(problem: Problem) -> Problem:
    """Return the problem at the first vector: noise around 1, as well-preserved images are often nearly even."""
    noise = RandomImage(problem.shape, problem.dtype, SEED)
    return problem.beginning_at(Total((noise, Constant(problem.shape, problem.dtype, 1.0)), (1.0, 1.0)))


@dataclass(frozen=True)
class RecurrenceRow:
    """One row of the recurrence: ``N v = scale v' + alpha v + back v before``."""

    alpha: float
    back: float
    scale: float


def recurrence(state: State) -> list[RecurrenceRow]:
    """Return the rows so far; fewer where no new direction is left."""
    rows: list[RecurrenceRow] = []
    for k in range(state.passes):
        vv, vw, ww = (state.numbers[f"{name} {k}"] for name in (VV, VW, WW))
        before = state.numbers[f"{VV} {k - 1}"] if k else 0.0
        alpha = vw / vv
        back = rows[-1].scale * vv / before if k else 0.0
        residual = ww - alpha**2 * vv - back**2 * before
        rows.append(RecurrenceRow(alpha, back, math.sqrt(max(residual, TINY * ww) / vv)))
        if residual <= TINY * ww:
            break
    return rows


def is_spent(state: State) -> bool:
    """Return True where the vectors so far span everything: another one would be rounding error."""
    return state.passes > len(recurrence(state)) or recurrence(state)[-1].scale < math.sqrt(TINY)


def largest_eigenvalue(state: State) -> float:
    """Return a bound of the largest eigenvalue of ``N``: that of the rows so far plus the length of its residual.

    The eigenvalue of the rows is below the largest, and some eigenvalue of ``N`` is within the residual. That
    it is the largest is an assumption: the first vector has to have a component along its eigenvector that
    the passes could amplify.

    References
    ----------
    Y. Zhou, R.-C. Li, Bounding the spectrum of large Hermitian matrices, Linear Algebra Appl. 435 (2011) 480-493.

    Examples
    --------
    >>> round(largest_eigenvalue(State(1, {"vv 0": 2.0, "vw 0": 6.0, "ww 0": 20.0})), 9)
    4.004
    """
    rows = recurrence(state)
    matrix = np.diag([row.alpha for row in rows])
    for k in range(1, len(rows)):
        matrix[k, k - 1] = matrix[k - 1, k] = math.sqrt(rows[k - 1].scale * rows[k].back)
    values, vectors = np.linalg.eigh(matrix)
    return MARGIN * float(values[-1] + rows[-1].scale * abs(vectors[-1, -1]))


SOLVER = Lanczos
