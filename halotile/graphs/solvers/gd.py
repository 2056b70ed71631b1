"""Gradient descent; with a denoiser as prior, regularisation by denoising (RED)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers.base import Problem, ReadVector, SolverBase, SolverTraits, State, Step
from halotile.storage.rim import Readable
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True)
class GradientDescent(SolverBase):
    """``x' = x - step (∇f(x) + slope of g at x)``."""

    name: ClassVar[str] = "gd"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2}
    traits: ClassVar[SolverTraits] = SolverTraits(prior_by="slope", is_memoryless=True)

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return one step down the gradient from the current image."""
        margin = max(problem.reach, problem.prior.reach())
        return Step({"x": problem.iterated(read("x", 0), step_down, margin)})


def step_down(problem: Problem, image: Readable) -> Readable:
    """Return ``x - step (∇f(x) + slope of g at x)``, inside the bounds."""
    size, prior = problem.step_size, problem.prior.slope(image)
    slopes = (problem.gradient(image), prior) if prior is not None else (problem.gradient(image),)
    return problem.within(Total((image, *slopes), (1.0,) + (-size,) * len(slopes)), image)


SOLVER = GradientDescent
