"""The two forms of a stack's gradient: as it is written, or folded into one kernel and one stored image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.solvers.base import Map, Problem, SolverBase, Staged, State, Step, Vectors, advanced
from halotile.storage.rim import Readable
from halotile.tasks.contributions import Contributions, Wants
from halotile.tasks.fidelity import L2, MISFIT, FoldedGradient, Gradient, NormalImage, Term
from halotile.tasks.operators.base import engines_of, with_engine
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total
from halotile.tasks.step import View

REACH_OF_CELLS = 64
"""How much farther, in pixels, a convolution by Fourier transforms looks: its cells lie still, whatever is asked for."""


@dataclass(frozen=True)
class Form:
    """How the gradient of a stack is computed."""

    terms: tuple[Term, ...]
    folded: Normal | None = None
    """All operators in one kernel, where they fold and the job does not keep to the plain form."""
    apart: bool = False
    """Whether operators have a pass of their own, before that of the prior."""
    per_sweep: int = 1
    """Iterations that a sweep makes."""

    @property
    def once(self) -> Form:
        """The same for sweeps of one iteration."""
        return replace(self, per_sweep=1)

    @property
    def near(self) -> tuple[Term, ...]:
        """The terms whose operators see a neighbourhood or a window."""
        return tuple(term for term in self.terms if term.operator.kind != "whole")

    @property
    def whole(self) -> tuple[Term, ...]:
        """The terms whose operators see all of the image: each is a task of its own."""
        return tuple(term for term in self.terms if term.operator.kind == "whole")

    @property
    def reach(self) -> int:
        """How far, in pixels, the operators look that see a neighbourhood, there and back."""
        far = 2 * max((term.operator.reach for term in self.near), default=0)
        return far + (REACH_OF_CELLS if self.in_still_cells else 0)

    @property
    def fused_reach(self) -> int:
        """The same of those that are computed in the pass of the prior."""
        return 0 if self.apart else self.reach

    def view(self, halo: int) -> View:
        """How far a sweep looks in which something acts on the gradient that looks so far."""
        return View(halo) if self.apart or not self.near else self.own_view(halo)

    def own_view(self, halo: int = 0) -> View:
        """How far the operators look that see a neighbourhood, and what acts on what they give."""
        cells, repeats = self.in_still_cells, self.per_sweep
        if self.folded is not None:
            return View(halo, self.folded.reach, 1, cells, repeats)
        return View(halo, max((term.operator.reach for term in self.near), default=0), 2, cells, repeats)

    @property
    def is_fft(self) -> bool:
        """Whether convolutions are computed by Fourier transforms."""
        return "fft" in self._engines

    @property
    def in_still_cells(self) -> bool:
        """Whether they are computed in cells that lie still, hence wider than what is asked for."""
        return self.is_fft and (self.folded is None or self.folded.still)

    @property
    def by_shard(self) -> bool:
        """Whether bits depend on the region that is asked for, so that it has to be the same region always."""
        return self.is_fft and not self.in_still_cells

    @property
    def _engines(self) -> set[str]:
        """How convolutions are computed; nothing where there are none."""
        if self.folded is not None:
            return {self.folded.engine}
        return {engine for term in self.near for engine in engines_of(term.operator)}

    def describe(self) -> str:
        """The form, for the plan."""
        if self.folded is None:
            engines = (
                "; Fourier transforms where kernels are large" if self.is_fft else "; direct convolutions"
            )
            count = len(self.terms)
            told = engines if self._engines else ""
            return f"plain, {count} operator{'s' if count > 1 else ''} there and back{told}"
        rows, columns = self.folded.kernel.shape[-2:]
        engine = "Fourier transforms" if self.is_fft else "direct convolution"
        return f"normal, all operators in one kernel of {rows} × {columns}; {engine}"

    def gradient(self, image: Readable, backprojection: Readable | None, *, told: bool = True) -> Readable:
        """``∇f``, without the operators that see the whole image; its misfit is noted where it is to be ``told``."""
        if self.folded is None:
            return Gradient(image, self.near, told)
        assert backprojection is not None
        return FoldedGradient(image, self.folded, backprojection, told)

    def normal(self, image: Readable) -> Readable:
        """``sum_i w_i A_i^T A_i x``, without the operators that see the whole image."""
        return NormalImage(image, self.near) if self.folded is None else self.folded(image)

    def map(self, wants: Wants, backprojection: Readable | None = None, *, told: bool = True) -> Map:
        """Gradient or normal image of all operators; what is not computed in a sweep, staged."""

        def near(image: Readable) -> Readable:
            if wants == "gradient":
                return self.gradient(image, backprojection, told=told)
            return self.normal(image)

        def whole(image: Readable) -> Contributions:
            return Contributions(image, self.whole, wants)

        if self.apart:
            return Staged(None, near)
        return Staged(near if self.near else None, whole) if self.whole else near


def choose_form(terms: tuple[Term, ...], dtype: np.dtype[Any], *, exact: bool, per_sweep: int = 1) -> Form:
    """The plain form where it is asked for, or where something does not fold; the normal form otherwise.

    In a sweep of several iterations each of them would draw what it reads out to whole cells, were they to lie still. So they
    are laid over what is read; and where operators do not fold, convolutions are direct.
    """
    folds = all(can_fold(term.operator) and isinstance(term.fidelity, L2) for term in terms) and not exact
    direct = exact or (per_sweep > 1 and not folds)
    decided = tuple(replace(term, operator=with_engine(term.operator, dtype, direct)) for term in terms)
    if not folds:
        return Form(decided, per_sweep=per_sweep)
    blurs = tuple(term.operator for term in decided if can_fold(term.operator))
    weights = tuple(term.weight for term in decided)
    folded = Normal(operators=blurs, weights=weights, still=per_sweep == 1)
    return Form(decided, folded.with_engine(dtype, exact), per_sweep=per_sweep)


@dataclass(frozen=True)
class Backprojection(SolverBase):
    """``b = sum_i w_i A_i^T y_i``, in one sweep; with it, the misfit of the image that is 0."""

    name: ClassVar[str] = "adjoint"
    vectors: ClassVar[Mapping[str, int]] = {"b": 2}

    def step(self, problem: Problem, state: State, read: Vectors) -> Step:
        """Minus the gradient at 0."""
        return Step({"b": Total((problem.gradient(problem.start),), (-1.0,))})

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        """Done, with the misfit."""
        return advanced(state, **{MISFIT: sums[MISFIT]})


def check_per_pass(form: Form) -> None:
    """Refuse several iterations in a pass where operators need the image between them."""
    if form.per_sweep > 1 and form.whole:
        number = next(n for n, term in enumerate(form.terms) if term is form.whole[0])
        raise ConfigError(
            f"solver.checkpoint_every is {form.per_sweep}, and operators[{number}] ({form.whole[0].operator.name}) sees the "
            "whole image, which there is only where every iteration is stored. Write checkpoint_every: 1."
        )
