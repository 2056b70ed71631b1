"""Expectation maximisation on ordered subsets (OSEM), for counts; with one subset, MLEM or Richardson-Lucy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halotile.errors import InputError
from halotile.graphs.solvers._subsets import SubsetSolver
from halotile.graphs.solvers.base import CHANGE, LENGTH, Problem, ReadVector, SolverTraits, State, Step
from halotile.graphs.subsets import SubsetOrder
from halotile.tasks.operators.sum import Multiplied


@dataclass(frozen=True)
class OrderedSubsetsEM(SubsetSolver):
    """``x' = x A_S^T(w y / (A_S x + background)) / A_S^T w``: for counts, and operators without negative numbers.

    The sensitivity ``A_S^T w`` is computed in every pass, and not stored. Pixels that a subset does not see stay.

    References
    ----------
    H. Hudson, R. Larkin, Accelerated image reconstruction using ordered subsets of projection data, IEEE Trans. Med.
    Imaging 13 (1994) 601-609.
    """

    name: ClassVar[str] = "osem"
    vectors: ClassVar[Mapping[str, int]] = {"x": 2}
    traits: ClassVar[SolverTraits] = SolverTraits(prior_by=None, takes_steps=False, by_subsets=True, multiplies=True)

    order: SubsetOrder = "cyclic"

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        if state.passes == 0 and sums[CHANGE] == sums[LENGTH] == 0:
            raise InputError(
                "the first image is 0 everywhere, and solver osem multiplies it: it would stay 0. Write a start above 0."
            )
        return super().next(problem, state, sums)

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return the image times the correction of a subset."""
        x, part = read("x", 0), self.part(problem, state.passes)
        assert part.sensitivity is not None
        return Step({"x": Multiplied(x, part.gradient(x), part.sensitivity(x))})


SOLVER = OrderedSubsetsEM
