"""ADMM with a linearised x-step: one pass over the image per iteration, no inner solver."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.graphs.solvers.base import Problem, ReadVector, SolverBase, State, Step
from halotile.tasks.image_task import Shared
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True)
class Admm(SolverBase):
    """``x' = x - step/2 (∇f(x) + rho (x - z + u))``, ``z' = prox(x' + u)``, ``u' = u + x' - z'`` with
    ``rho = 1 / step``.

    The x-step of ADMM is replaced by one gradient step, which converges like it (the step is below 1 / (|A|² + rho)).

    References
    ----------
    S. Boyd et al., Distributed optimization and statistical learning via the alternating direction method of
    multipliers, Found. Trends Mach. Learn. 3 (2011); section 3.4 of E. Esser et al., SIAM J. Imaging Sci. 3 (2010).
    """

    name: ClassVar[str] = "admm"
    vectors: ClassVar[Mapping[str, int]] = {"z": 2, "x": 2, "u": 2}

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return all three updates in one pass: the x' that the prox reads around a block is computed once."""
        x, size = read("x", 0), problem.step_size
        # At first z is x, and u is 0.
        duals = (read("u", 0),) if state.passes else ()
        z = read("z", 0) if state.passes else x
        moved = Total((x, problem.gradient(x), z, *duals), (0.5, -size / 2, 0.5, *[-0.5 for _ in duals]))
        ahead = Shared(problem.within(moved, x), problem.prior.reach(), computed=True)
        pulled = Total((ahead, *duals), (1.0,) * (1 + len(duals)))
        denoised = Shared(problem.prior.prox(pulled, size), computed=True)
        dual = Total((ahead, *duals, denoised), (1.0,) * (1 + len(duals)) + (-1.0,))
        return Step({"z": denoised, "x": ahead, "u": dual})


SOLVER = Admm
