"""The two forms of a stack's gradient: operator by operator, or folded into one kernel and one stored image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.solvers.base import Map, Problem, ReadVector, SolverBase, Staged, State, Step, advanced
from halotile.storage.rim import Readable
from halotile.tasks.image_task import View
from halotile.tasks.operators.base import engines_of, with_engine
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total
from halotile.tasks.terms import (
    MISFIT,
    Contributions,
    FoldedGradient,
    Gradient,
    NormalImage,
    Sensitivity,
    Term,
    Wants,
)

REACH_OF_CELLS = 64
"""Additional reach, in pixels, of a convolution by Fourier transforms: its cells are fixed."""


@dataclass(frozen=True)
class Form:
    """Method that computes the gradient of a stack."""

    terms: tuple[Term, ...]
    folded: Normal | None = None
    """All operators in one kernel, where they fold and the job does not ask for the plain form."""
    apart: bool = False
    """Operators have a pass of their own, before that of the prior."""
    per_pass: int = 1
    """Iterations of one pass."""
    chosen: tuple[int, ...] | None = None
    """Numbers of the operators that take part; None for all."""

    def of(self, numbers: Sequence[int]) -> Form:
        """Return the same form of some of the operators."""
        return replace(self, chosen=tuple(numbers))

    @property
    def _taking_part(self) -> tuple[Term, ...]:
        return self.terms if self.chosen is None else tuple(self.terms[number] for number in self.chosen)

    @property
    def once(self) -> Form:
        """The same form for passes of one iteration."""
        return replace(self, per_pass=1)

    @property
    def near(self) -> tuple[Term, ...]:
        """The terms whose operators see a neighbourhood or a window."""
        return tuple(term for term in self._taking_part if term.operator.kind != "whole")

    @property
    def whole(self) -> tuple[Term, ...]:
        """The terms whose operators see all of the image: each is a task of its own."""
        return tuple(term for term in self._taking_part if term.operator.kind == "whole")

    @property
    def reach(self) -> int:
        """Receptive field, forward and adjoint together, of the operators that see a neighbourhood, in pixels."""
        far = 2 * max((term.operator.reach for term in self.near), default=0)
        return far + (REACH_OF_CELLS if self.in_still_cells else 0)

    @property
    def fused_reach(self) -> int:
        """The same for the operators that are computed in the pass of the prior."""
        return 0 if self.apart else self.reach

    def view(self, halo: int) -> View:
        """Return the view of a pass in which the gradient is read with a halo."""
        return View(halo) if self.apart or not self.near else self.own_view(halo)

    def own_view(self, halo: int = 0) -> View:
        """Return the view of the operators that see a neighbourhood, with the halo of the prior."""
        cells, repeats = self.in_still_cells, self.per_pass
        if self.folded is not None:
            return View(halo, self.folded.reach, 1, cells, repeats)
        return View(halo, max((term.operator.reach for term in self.near), default=0), 2, cells, repeats)

    @property
    def is_fft(self) -> bool:
        """True where convolutions are computed by Fourier transforms."""
        return "fft" in self._engines

    @property
    def in_still_cells(self) -> bool:
        """True where they are computed in fixed cells, hence on more than the requested region."""
        return self.is_fft and (self.folded is None or self.folded.still)

    @property
    def by_shard(self) -> bool:
        """True where bits depend on the requested region, so that it always has to be the same region."""
        return self.is_fft and not self.in_still_cells

    @property
    def _engines(self) -> set[str]:
        """The convolution engines; empty where there are no convolutions."""
        if self.folded is not None:
            return {self.folded.engine}
        return {engine for term in self.near for engine in engines_of(term.operator)}

    def describe(self) -> str:
        """Describe the form, for the plan."""
        if self.folded is None:
            engines = (
                "; Fourier transforms where kernels are large" if self.is_fft else "; direct convolutions"
            )
            count = len(self.terms)
            engine_text = engines if self._engines else ""
            return f"plain, {count} operator{'s' if count > 1 else ''} there and back{engine_text}"
        rows, columns = self.folded.kernel.shape[-2:]
        engine = "Fourier transforms" if self.is_fft else "direct convolution"
        return f"normal, all operators in one kernel of {rows} × {columns}; {engine}"

    def gradient(
        self, image: Readable, backprojection: Readable | None, *, records_misfit: bool = True
    ) -> Readable:
        """Return ``∇f`` without the operators that see the whole image; its misfit is recorded if ``records_misfit``."""
        if self.folded is None:
            return Gradient(image, self.near, records_misfit)
        assert backprojection is not None
        return FoldedGradient(image, self.folded, backprojection, records_misfit)

    def normal(self, image: Readable) -> Readable:
        """Return ``sum_i w_i A_i^T A_i x`` without the operators that see the whole image."""
        return NormalImage(image, self.near) if self.folded is None else self.folded(image)

    def map(
        self, wants: Wants, backprojection: Readable | None = None, *, records_misfit: bool = True
    ) -> Map:
        """Return gradient, normal image or sensitivity of the operators as a map; parts outside the pass are staged."""

        def near(image: Readable) -> Readable:
            if wants == "gradient":
                return self.gradient(image, backprojection, records_misfit=records_misfit)
            return self.normal(image) if wants == "normal" else Sensitivity(image, self.near)

        def whole(image: Readable) -> Contributions:
            return Contributions(image, self.terms, wants, self.chosen)

        if self.apart:
            return Staged(None, near)
        return Staged(near if self.near else None, whole) if self.whole else near


def choose_form(
    terms: tuple[Term, ...], dtype: np.dtype[Any], *, exact: bool, per_pass: int = 1, by_subsets: bool = False
) -> Form:
    """Choose the plain form where it is asked for, for subsets, or where an operator does not fold; the normal form otherwise.

    In a pass of several iterations, fixed cells would make each of them read whole cells around its region.
    So the cells are laid over the region that is read; and where operators do not fold, convolutions are
    direct.
    """
    folds = all(can_fold(term.operator) and term.fidelity.is_square for term in terms) and not (
        exact or by_subsets
    )
    direct = exact or (per_pass > 1 and not folds)
    decided = tuple(replace(term, operator=with_engine(term.operator, dtype, direct)) for term in terms)
    if not folds:
        return Form(decided, per_pass=per_pass)
    blurs = tuple(term.operator for term in decided if can_fold(term.operator))
    weights = tuple(term.weight for term in decided)
    folded = Normal(operators=blurs, weights=weights, still=per_pass == 1)
    return Form(decided, folded.with_engine(dtype, exact), per_pass=per_pass)


@dataclass(frozen=True)
class Backprojection(SolverBase):
    """``b = sum_i w_i A_i^T y_i``, in one pass; with it, the misfit of the zero image."""

    name: ClassVar[str] = "adjoint"
    vectors: ClassVar[Mapping[str, int]] = {"b": 2}

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        """Return minus the gradient at 0."""
        return Step({"b": Total((problem.gradient(problem.start),), (-1.0,))})

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Return the final state, with the misfit."""
        return advanced(state, **{MISFIT: sums[MISFIT]})


def check_per_pass(form: Form) -> None:
    """Refuse several iterations in a pass where operators need the image between them."""
    if form.per_pass > 1 and form.whole:
        number = next(n for n, term in enumerate(form.terms) if term is form.whole[0])
        raise ConfigError(
            f"solver.checkpoint_every is {form.per_pass}, and operators[{number}] ({form.whole[0].operator.name}) sees the "
            "whole image, which there is only where every iteration is stored. Write checkpoint_every: 1."
        )
