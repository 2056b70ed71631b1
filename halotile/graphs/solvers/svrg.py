"""Gradient descent on ordered subsets whose variance a stored full gradient takes away."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers._subsets import LARGEST, SubsetSolver
from halotile.graphs.solvers.base import EPOCH, Problem, ReadVector, State, Step, relative_change
from halotile.tasks.operators.sum import Total
from halotile.tasks.options import check_whole
from halotile.tasks.terms import MISFIT


@dataclass(frozen=True)
class ReducedVariance(SubsetSolver):
    """``x' = prox(x - step/3 (∇f_S(x) - ∇f_S(w) + ∇f(w) / subsets))`` with an anchor ``w``: ends at the minimum.

    The first iteration, and then one after every ``epochs`` epochs, makes the image the anchor and computes the
    gradient of all operators. Of any number of operators two images are kept besides ``x``.

    Parameters
    ----------
    epochs : int
        Epochs from one anchor to the next.

    References
    ----------
    L. Xiao, T. Zhang, A proximal stochastic gradient method with progressive variance reduction, SIAM J. Optim. 24
    (2014) 2057-2075.
    """

    name: ClassVar[str] = "svrg"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2, "w": 2, "g": 2}

    epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("epochs", self.epochs, 1)

    def notes(self) -> tuple[str, ...]:
        """Return a note on an order in which the corrections of subsets in a row may add up."""
        cyclic = "solver.order: cyclic makes svrg diverge where many operators in a row see the same part of the image; random does not"
        return (cyclic,) if self.order == "cyclic" else ()

    def _place(self, problem: Problem, iteration: int) -> tuple[int, int]:
        """Return the number of the anchor, and that of the iteration since: 0 is that of the anchor itself."""
        return divmod(iteration, 1 + self.epochs * self.count(problem.operators))

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one step along the gradient of a subset, corrected by the difference of two at the anchor."""
        x, subsets, size = read("x", 0), self.count(problem.operators), problem.step_size / 3
        anchors, since = self._place(problem, state.passes)
        if since == 0:
            w, g = x, problem.computed_once(problem.gradient(x))
            ahead = Total((x, g), (1.0, -size / subsets))
        else:
            w, g = read("w", 0), read("g", 0)
            part = self.part(problem, state.passes - anchors - 1)
            parts = (x, part.gradient(x), part.gradient(w), g)
            ahead = Total(parts, (1.0, -size, size, -size / subsets))
        return Step({"x": problem.within(problem.prior.prox(ahead, size / subsets), x), "w": w, "g": g})

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state; after an anchor with its misfit, and the largest change since the one before."""
        largest, change = state.numbers.get(LARGEST, 0.0), relative_change(sums)
        _, since = self._place(problem, state.passes)
        if since:
            return State(state.passes + 1, {LARGEST: max(largest, change)})
        before = {EPOCH: largest} if state.passes else {}
        return State(state.passes + 1, {MISFIT: sums[MISFIT], LARGEST: change, **before})


SOLVER = ReducedVariance
