"""Proximal gradient descent; with a denoiser as prior, plug and play."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers.base import Problem, ReadVector, SolverBase, SolverTraits, State, Step
from halotile.storage.rim import Readable
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True)
class ProximalGradient(SolverBase):
    """``x' = prox(x - step ∇f(x))``."""

    name: ClassVar[str] = "pgd"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2}
    traits: ClassVar[SolverTraits] = SolverTraits(is_memoryless=True)

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one gradient step and the prox, in one pass."""
        return Step({"x": problem.iterated(read("x", 0), proximal_step, problem.reach)})


def proximal_step(problem: Problem, image: Readable) -> Readable:
    """Return ``prox(x - step ∇f(x))``, inside the bounds."""
    size = problem.step_size
    ahead = Total((image, problem.gradient(image)), (1.0, -size))
    return problem.within(problem.prior.prox(ahead, size), image)


SOLVER = ProximalGradient
