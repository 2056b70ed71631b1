"""Gradient descent on ordered subsets of the operators, with a prox: stochastic where their order is random."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.errors import ConfigError
from halotile.graphs.solvers._subsets import SubsetSolver
from halotile.graphs.solvers.base import Problem, ReadVector, State, Step
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True)
class SubsetDescent(SubsetSolver):
    """``x' = prox(x - step_e ∇f_S(x))``, where the prox has the step ``step_e / subsets``.

    With a constant step it ends in a neighbourhood of the minimum; a step that decays over the epochs ``e`` ends at it.

    Parameters
    ----------
    decay : float
        ``step_e = step / (1 + decay e)``.

    References
    ----------
    D. Bertsekas, Incremental proximal methods for large scale convex optimization, Math. Program. 129 (2011) 163-195.
    """

    name: ClassVar[str] = "sgd"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2}

    decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < math.inf:
            raise ConfigError(f"decay is {self.decay}. Write 0 for a constant step, or more.")

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one proximal step down the gradient of a subset."""
        x, subsets = read("x", 0), self.count(problem.operators)
        size = problem.step_size / (1 + self.decay * (state.passes // subsets))
        slope = self.part(problem, state.passes).gradient(x)
        ahead = problem.prior.prox(Total((x, slope), (1.0, -size)), size / subsets)
        return Step({"x": problem.within(ahead, x)})


SOLVER = SubsetDescent
