"""Base of all solvers: a state of a few numbers and a few stored images, and the step from one state to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from halotile.storage.rim import Readable
from halotile.storage.views import Constant
from halotile.tasks.image_task import Shared, Sum, Written
from halotile.tasks.priors.base import Prior, Within
from halotile.tasks.terms import Contributions

# Sums of every step: `|x' - x|²`, `|x'|²`, and with a reference `|x' - reference|²`.
CHANGE, LENGTH, ERROR = "change", "length", "error"


PRIOR = "prior"  # sum of each pixel's part of the prior, where the prior has a value

# Numbers of a state that are reported: the residual relative to the first, and 1 where it was just recomputed.
RESIDUAL, RECOMPUTED = "residual", "recomputed"
SPENT = "spent"  # reported as well: 1 where the residual is as short as rounding permits
# Number of a state: above 1 where the next step begins beyond the image, whose misfit is then not recorded.
MOMENTUM = "t before"
EPOCH = "epoch_change"  # reported at the end of an epoch of subsets: the largest change of its iterations

Map = Callable[[Readable], Readable]  # a map from an image to another image of the same shape


@dataclass(frozen=True)
class Staged:
    """A map that a pass computes in part: the rest is computed and stored before it."""

    within: Map | None
    """The part that the pass computes."""
    before: Callable[[Readable], Readable | Contributions]
    """The part that is computed before it."""

    def __call__(self, image: Readable) -> Readable:
        """Refuse the call: only the code that runs the passes knows where the stored part is."""
        raise TypeError("a staged map is run in two passes")


@dataclass(frozen=True)
class Problem:
    """``min f(x) + g(x)``: the operations of the stack and the prior that a solver uses, as lazy images."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    gradient: Map
    """``∇f`` at an image."""
    normal: Map
    """``sum_i w_i A_i^T A_i`` of an image."""
    prior: Prior
    start: Readable
    """The image that the solver starts from."""
    step_size: float = 1.0
    """``1 / |A|²``, or the step size that was asked for."""

    misfit_of_zero: float = 0.0
    """Constant to add to the misfit that is recorded."""

    reach: int = 0
    """Receptive field of the operators in a pass, forward and adjoint together, in pixels."""

    tol: float = 0.0
    """Tolerance at which the solver stops."""

    per_pass: int = 1
    """Iterations of one pass, for solvers that carry nothing but the image from one iteration to the next."""

    plain_gradient: Map | None = None
    """The gradient without recording the misfit; needed where ``per_pass`` is more than 1."""

    operators: int = 1
    """Number of operators."""

    sensitivity: Map | None = None
    """``sum_i w_i A_i^T 1``, for an image that only gives the shape."""

    parts: Callable[[Sequence[int]], Problem] | None = None
    """The problem of some of the operators."""

    bounds: tuple[float | None, float | None] | None = None
    """Least and greatest value of a pixel."""

    adapts: bool = False
    """The step size is halved where the objective rises, and a step leaves at least half of each pixel: the curvature
    grows where an image becomes darker, and that at the start is no bound."""

    def subset(self, numbers: Sequence[int]) -> Problem:
        """Return the problem of the operators of these numbers."""
        assert self.parts is not None
        return self.parts(numbers)

    @property
    def once(self) -> Problem:
        """The same problem with one iteration per pass."""
        return replace(self, per_pass=1, plain_gradient=None)

    def within(self, image: Readable, before: Readable) -> Readable:
        """Return the image inside the bounds, after a step from the image before."""
        if self.bounds is None:
            return image
        return Within(image, *self.bounds, before if self.adapts else None)

    def computed_once(self, image: Readable) -> Readable:
        """Return the same image, computed once per block: operators read nearly the same window in turn."""
        return Shared(image, self.reach, computed=True)

    def iterated(self, image: Readable, step: Callable[[Problem, Readable], Readable], margin: int) -> Readable:
        """Return the image after the iterations of one pass. Those between stay in memory, not on disk.

        ``image``: stored image, whose misfit is recorded; ``step``: one iteration; ``margin``: pixels by which parts of the step look beyond the part
        that is read first.
        """
        problem = self
        for _ in range(self.per_pass - 1):
            image = Shared(step(problem, image), margin, computed=True)
            assert self.plain_gradient is not None
            problem = replace(self, gradient=self.plain_gradient)
        return step(problem, image)

    def beginning_at(self, image: Readable) -> Problem:
        """Return the same problem with another starting image."""
        return replace(self, start=image)


@dataclass(frozen=True)
class State:
    """The state between two passes, without its pixels, which are the vectors after these passes."""

    passes: int = 0
    """Number of passes so far; one may hold several iterations."""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Results of a pass: new vectors by name, and sums by name."""

    images: Mapping[str, Readable]
    sums: tuple[Sum, ...] = ()


# `read(name, age)`: a vector of the state, or of the state `age` iterations before it.
ReadVector = Callable[[str, int], Readable]


@dataclass(frozen=True)
class SolverTraits:
    """Properties that a solver declares for the planner and the rules.

    Parameters
    ----------
    prior_by : str, optional
        ``prox``: the prior acts after the gradient step; ``slope``: beside it; None: the solver has no prior.
    takes_steps : bool
        The solver follows the gradient by a step size, and diverges where that is too long.
    is_memoryless : bool
        Only the image is carried from one iteration to the next, so that one pass can make several iterations.
    passes_before : int
        Passes before the first step, which leave the image as it is and do not count as iterations.
    needs_squares : bool
        The solver works on least squares alone.
    reads_measurements : bool
        The measurements are read in every iteration, not only before the first.
    for_jobs : bool
        The solver can be named in a job.
    by_subsets : bool
        Each iteration sees a subset of the operators: a :class:`SubsetSolver`.
    multiplies : bool
        The image is multiplied by what the counts of a measurement suggest: nothing may be below 0.
    """

    prior_by: Literal["prox", "slope"] | None = "prox"
    takes_steps: bool = True
    is_memoryless: bool = False
    passes_before: int = 0
    needs_squares: bool = False
    reads_measurements: bool = True
    for_jobs: bool = True
    by_subsets: bool = False
    multiplies: bool = False


DEFAULT_TRAITS = SolverTraits()


class Solver(Protocol):
    """``init``, ``step``, ``next`` and ``is_done`` on an explicit state; the caller stores the named images.

    The options of a solver are the fields of its dataclass.
    """

    name: ClassVar[str]
    vectors: ClassVar[Mapping[str, int]]
    """The stored vectors, with the number of copies of each: one more than are read. ``x`` is the image."""
    traits: ClassVar[SolverTraits]

    def init(self, problem: Problem) -> State:
        """Return the state before the first pass."""
        ...

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return the results of the next pass."""
        ...

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the state after it."""
        ...

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the figures of an iteration show that no further one is needed."""
        ...

    def epoch(self, problem: Problem) -> int:
        """Return the number of passes until every operator has been used once."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return notes of a plan on its options."""
        ...


class SolverBase:
    """A solver that starts with an empty state and is done when the image is at rest."""

    traits: ClassVar[SolverTraits] = DEFAULT_TRAITS

    def init(self, problem: Problem) -> State:
        """Return the state before the first pass, which has no numbers."""
        return State()

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the state of the next iteration, which has no numbers."""
        return advanced(state)

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the image changed by no more than ``tol``, relative to its length.

        >>> SolverBase().is_done(0.0, {"iteration": 1, "change": 0.1}), SolverBase().is_done(0.01, {"change": 0.001})
        (False, True)
        """
        return row.get(CHANGE, 1.0) <= tol

    def epoch(self, problem: Problem) -> int:
        """Return 1: every pass uses all operators."""
        return 1

    def notes(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()


def usual_sums(written: Written, before: Readable, reference: Readable | None, prior: Prior) -> list[Sum]:
    """Return the sums of a step that writes ``x``: its change, its length, its error, and the value of the prior."""
    sums = [Sum(CHANGE, "distance", written, before), Sum(LENGTH, "dot", written, written)]
    if reference is not None:
        sums.append(Sum(ERROR, "distance", written, reference))
    if (density := prior.density(before)) is not None:
        sums.append(Sum(PRIOR, "dot", density, Constant(density.shape, density.dtype, 1.0)))
    return sums


def images_read(solver: Solver) -> int:
    """Return the number of stored images that a step reads: of each vector one copy fewer than are kept."""
    return sum(solver.vectors.values()) - len(solver.vectors)


def advanced(state: State, **numbers: float) -> State:
    """Return the state one pass later, with some numbers replaced."""
    return State(state.passes + 1, {**state.numbers, **numbers})


def relative_change(sums: Mapping[str, float]) -> float:
    """Return ``|x' - x| / |x'|``; 1 where ``x'`` is 0 and ``x`` is not.

    >>> relative_change({"change": 4.0, "length": 16.0})
    0.5
    """
    change, length = sums[CHANGE], sums[LENGTH]
    return math.sqrt(change / length) if length > 0 else float(change > 0)
