"""What a solver is: a state that is a few numbers and a few stored images, and the step from one to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from halotile.storage.rim import Readable
from halotile.tasks.contributions import Contributions
from halotile.tasks.priors import Prior
from halotile.tasks.shared import Shared
from halotile.tasks.step import Sum

CHANGE, LENGTH, ERROR = "change", "length", "error"
"""Sums that every step takes: ``|x' - x|²``, ``|x'|²``, and with a reference ``|x' - reference|²``."""


PRIOR = "prior"
"""The sum of what each pixel adds to the prior, where that can be told."""

RESIDUAL, RECOMPUTED = "residual", "recomputed"
"""Numbers of a state that are told: how long the residual is, against the first one, and whether it was just computed anew."""
SPENT = "spent"
"""Another one: whether it is as short as rounding lets it be."""

Map = Callable[[Readable], Readable]
"""From an image to another one of its shape."""


@dataclass(frozen=True)
class Staged:
    """A map that a sweep computes in part: the rest is computed before it, and stored."""

    within: Map | None
    """What the sweep computes."""
    before: Callable[[Readable], Readable | Contributions]
    """The rest."""

    def __call__(self, image: Readable) -> Readable:
        """Refused: what is stored before is known to whoever runs the sweeps."""
        raise TypeError("a staged map is run in two passes")


@dataclass(frozen=True)
class Problem:
    """``min f(x) + g(x)``: what a solver asks of the stack and the prior, as lazy images."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    gradient: Map
    """``∇f`` at an image."""
    normal: Map
    """``sum_i w_i A_i^T A_i`` of an image."""
    prior: Prior
    start: Readable
    """Where the solver begins."""
    step_size: float = 1.0
    """``1 / |A|²``, or what was asked for."""

    misfit_of_zero: float = 0.0
    """What is to be added to the misfit that is noted."""

    reach: int = 0
    """How far, in pixels, the operators look in a sweep, there and back."""

    tol: float = 0.0
    """How small is small enough."""

    per_sweep: int = 1
    """Iterations that a sweep makes, for solvers that carry nothing from one to the next but the image."""

    untold: Map | None = None
    """The gradient where nobody asks for the misfit; needed where ``per_sweep`` is more than 1."""

    @property
    def once(self) -> Problem:
        """The same for sweeps of one iteration."""
        return replace(self, per_sweep=1, untold=None)

    def held(self, image: Readable) -> Readable:
        """The same image, computed once for each block: operators ask for nearly the same window one after the other."""
        return Shared(image, self.reach, computed=True)

    def swept(self, image: Readable, step: Callable[[Problem, Readable], Readable], margin: int) -> Readable:
        """The image after the iterations of one sweep. Those between are held for a block, and stored nowhere.

        Parameters
        ----------
        image : Readable
            The one that is stored, whose misfit is told.
        step : callable
            One iteration.
        margin : int
            How far, in pixels, parts of it look at the image beyond the part that is read first.
        """
        problem = self
        for _ in range(self.per_sweep - 1):
            image = Shared(step(problem, image), margin, computed=True)
            assert self.untold is not None
            problem = replace(self, gradient=self.untold)
        return step(problem, image)

    def beginning_at(self, image: Readable) -> Problem:
        """The same from another image."""
        return replace(self, start=image)


@dataclass(frozen=True)
class State:
    """A moment between two sweeps, without its pixels: these are the vectors of this iteration."""

    iteration: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a sweep makes: new vectors by name, and sums by name."""

    images: Mapping[str, Readable]
    sums: tuple[Sum, ...] = ()


Vectors = Callable[[str, int], Readable]
"""``read(name, age)``: a vector of the state, or of the one ``age`` iterations before it."""


@dataclass(frozen=True)
class Traits:
    """What others must know of a solver, as it declares it.

    Parameters
    ----------
    prior_by : str, optional
        ``prox``: the prior acts on the gradient step; ``slope``: beside it; None: it knows no prior.
    takes_steps : bool
        It follows the gradient by a step size, and diverges where that is too long.
    is_memoryless : bool
        It carries nothing but the image from one iteration to the next, so that one pass can make several.
    passes_before : int
        Passes before its first step, which leave the image as it was: they are no iterations.
    fidelities : tuple of str, optional
        Names of the data fidelities that it can work on; None: all.
    reads_measurements : bool
        It reads the measurements in every iteration, not only before the first.
    for_jobs : bool
        A job may name it.
    """

    prior_by: Literal["prox", "slope"] | None = "prox"
    takes_steps: bool = True
    is_memoryless: bool = False
    passes_before: int = 0
    fidelities: tuple[str, ...] | None = None
    reads_measurements: bool = True
    for_jobs: bool = True


DEFAULT_TRAITS = Traits()


class Solver(Protocol):
    """``init``, ``step``, ``next`` and ``is_done`` on an explicit state; whoever iterates stores what they name.

    Its options are the fields of its dataclass.
    """

    name: ClassVar[str]
    vectors: ClassVar[Mapping[str, int]]
    """The stored vectors, with how many copies of each are kept: one more than are read. ``x`` is the image."""
    traits: ClassVar[Traits]

    def init(self, problem: Problem) -> State:
        """Return the state before the first pass."""
        ...

    def step(self, problem: Problem, state: State, read: Vectors) -> Step:
        """Return what the next pass makes."""
        ...

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the state after it."""
        ...

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the figures of an iteration show that no other one is needed."""
        ...


class SolverBase:
    """A solver that begins with an empty state, and is done when the image is at rest."""

    traits: ClassVar[Traits] = DEFAULT_TRAITS

    def init(self, problem: Problem) -> State:
        """Return the state before the first pass: it has no numbers."""
        return State()

    def is_done(self, tol: float, row: Mapping[str, float]) -> bool:
        """Return True where the image changed by no more than ``tol``, relative to its length.

        Examples
        --------
        >>> SolverBase().is_done(0.0, {"iteration": 1, "change": 0.1}), SolverBase().is_done(0.01, {"change": 0.001})
        (False, True)
        """
        return row.get(CHANGE, 1.0) <= tol


def images_read(solver: Solver) -> int:
    """How many stored images a step reads: of each vector one copy fewer than are kept."""
    return sum(solver.vectors.values()) - len(solver.vectors)


def advanced(state: State, **numbers: float) -> State:
    """The state one iteration later, with numbers replaced."""
    return State(state.iteration + 1, {**state.numbers, **numbers})


def relative_change(sums: Mapping[str, float]) -> float:
    """``|x' - x| / |x'|``; 1 where ``x'`` is 0 and ``x`` is not.

    Examples
    --------
    >>> relative_change({"change": 4.0, "length": 16.0})
    0.5
    """
    change, length = sums[CHANGE], sums[LENGTH]
    return math.sqrt(change / length) if length > 0 else float(change > 0)
