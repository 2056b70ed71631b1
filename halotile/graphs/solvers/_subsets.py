"""Base of solvers that take a subset of the operators in each iteration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from halotile.graphs.solvers.base import (
    EPOCH,
    Problem,
    ReadVector,
    SolverBase,
    SolverTraits,
    State,
    Step,
    advanced,
    relative_change,
)
from halotile.graphs.solvers.lanczos import Lanczos, is_spent, largest_eigenvalue
from halotile.graphs.subsets import SubsetOrder, check_order, ordered_subset
from halotile.tasks.options import Auto, check_whole
from halotile.tasks.terms import MISFIT

# Numbers of a state: the largest change in this epoch so far, and the sum of the misfits of its subsets.
LARGEST, SO_FAR = "largest", "so far"
PASSES_EACH = 6  # passes of Lanczos' method for each subset: its bound is a little larger than after 15


@dataclass(frozen=True)
class SubsetSolver(SolverBase):
    """A solver whose iterations see one of ``subsets`` interleaved parts of the operators each.

    Parameters
    ----------
    subsets : int or "auto"
        Number of subsets; auto: one for each operator.
    order : str
        ``cyclic`` or ``random``: a new order in every epoch.
    seed : int
        Seed of the random orders.
    """

    traits: ClassVar[SolverTraits] = SolverTraits(by_subsets=True)

    subsets: int | Auto = "auto"
    order: SubsetOrder = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.subsets != "auto":
            check_whole("subsets", self.subsets, 1)
        check_order(self.order, self.seed)

    def count(self, operators: int) -> int:
        return operators if self.subsets == "auto" else self.subsets

    def epoch(self, problem: Problem) -> int:
        return self.count(problem.operators)

    def part(self, problem: Problem, iteration: int) -> Problem:
        """Return the problem of the operators that an iteration takes."""
        subsets = self.count(problem.operators)
        return problem.subset(ordered_subset(problem.operators, subsets, iteration, order=self.order, seed=self.seed))

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state; at the end of an epoch, with its misfit and its largest change.

        The misfit of an epoch is the sum over its subsets, each of the image that its iteration began with.
        """
        largest = max(state.numbers.get(LARGEST, 0.0), relative_change(sums))
        misfit = state.numbers.get(SO_FAR, 0.0) + sums[MISFIT]
        if (state.passes + 1) % self.epoch(problem):
            return State(state.passes + 1, {LARGEST: largest, SO_FAR: misfit})
        return State(state.passes + 1, {MISFIT: misfit, EPOCH: largest})

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True at the end of an epoch in which no iteration changed the image by more than ``tol``.

        >>> [SubsetSolver().is_done(0.1, row) for row in ({"change": 0.01}, {"change": 0.01, "epoch_change": 0.05})]
        [False, True]
        """
        return row.get(EPOCH, 1.0) <= tol


@dataclass(frozen=True)
class SubsetNorms(Lanczos):
    """Bounds of ``|A_S|²`` of all subsets, one after the other, with the storage of one.

    Parameters
    ----------
    solver : SubsetSolver
        The solver whose subsets they are.
    """

    name: ClassVar[str] = "lanczos"

    solver: SubsetSolver

    def passes(self, operators: int) -> int:
        return PASSES_EACH * self.solver.count(operators)

    def epoch(self, problem: Problem) -> int:
        """Return the number of passes: a subset is used in those of its own."""
        return self.passes(problem.operators)

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return the next vector of a subset; the first one anew where nothing is left to find."""
        number, inner = divmod(state.passes, PASSES_EACH)
        subsets = self.solver.count(problem.operators)
        part = problem.subset(ordered_subset(problem.operators, subsets, number))
        within = State(inner, state.numbers)
        if inner and is_spent(within):
            within = State()
        return super().step(replace(part, start=problem.start), within, read)

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the next state, with the largest bound of the subsets that are finished."""
        inner = state.passes % PASSES_EACH
        within = super().next(problem, State(inner, state.numbers), sums)
        if inner + 1 == PASSES_EACH:
            bound = max(largest_eigenvalue(within), state.numbers.get(LARGEST, 0.0))
            return State(state.passes + 1, {LARGEST: bound})
        return advanced(state, **within.numbers)

    def is_spent(self, state: State) -> bool:
        """Return False: every subset has its passes."""
        return False

    def bound(self, state: State) -> float:
        """Return the largest bound of a subset."""
        return state.numbers[LARGEST]
