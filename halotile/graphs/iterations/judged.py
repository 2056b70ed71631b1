"""Iterations whose steps and whose last image are judged by the objective."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from halotile.graphs.iterations.divergence import GROWS, LEAP, OBJECTIVE, FigureRow, objective_of
from halotile.graphs.iterations.iterate import RESOLUTION, Iterations
from halotile.graphs.kinds.base import Gather, Pass, Sums
from halotile.graphs.runs.passes.records import remove_records
from halotile.graphs.solvers.base import LENGTH, MOMENTUM, PRIOR, State
from halotile.storage.views import Constant
from halotile.tasks.terms import MISFIT

ROUNDED = 1e-6
"""Share of an objective by which rounding alone may raise it."""


@dataclass
class JudgedIterations(Iterations):
    """Iterations that take back a step after which the objective has risen, where the step size adapts.

    The step size is doubled until it is halved for the first time, by such a rise. Momentum may raise the objective as well:
    it is dropped before the step is halved. Of a solver that keeps more than the image the step is halved and not taken back.
    """

    def judge(self) -> Generator[Pass | Gather, Sums, bool]:
        """Yield a pass that finds the misfit of the image; return False where it takes back the last step."""
        sums, _ = yield from self._step(judges=True)
        row: FigureRow = {MISFIT: sums[MISFIT] + self.problem.misfit_of_zero}
        row[OBJECTIVE] = row[MISFIT] + sums.get(PRIOR, 0.0)
        if self._goes_back(row):
            return False
        first = next((before for before in self.rows if MISFIT in before), row)
        pairs = ((row[MISFIT], first[MISFIT]), (row[OBJECTIVE], objective_of(first)))
        rounding = max(self._floor, RESOLUTION**2 * sums[LENGTH] / self._step_size)
        times = LEAP if self.solver.traits.by_subsets else GROWS
        is_worse = all(not after <= times * max(before, rounding) for after, before in pairs)
        if is_worse and (self._knows_objective or isinstance(self.problem.start, Constant)):
            raise self._diverged(
                f"iteration {self.done}: its image has a misfit of {row[MISFIT]:.4g}, and the start has one of {first[MISFIT]:.4g}"
            )
        return True

    def _goes_back(self, row: FigureRow) -> bool:
        """Adapt the step size to a row; return to the image before the last step where that made the objective rise."""
        if not (self.problem.adapts and self._knows_objective and MISFIT in row):
            return False
        factor, was_halved = self.factor
        only_image = self.solver.vectors.keys() == {"x"} and not self.solver.traits.by_subsets
        last = next((before for before in reversed(self.rows) if MISFIT in before), row)
        before = objective_of(last)
        if objective_of(row) <= before + ROUNDED * abs(before):
            self.factor = factor * (2 if only_image and not was_halved else 1), was_halved
            return False
        if self.state.numbers.get(MOMENTUM, 1.0) <= 1:
            self.factor = factor / 2, True
        if only_image:
            remove_records(self.vectors.folder, str(self.state.passes))
            self.state = State(self.state.passes - 1)
            self.rows.pop()
            self.digests = {name: digests[1:] for name, digests in self.digests.items()}
            self._write_checkpoint()
        return only_image

    @property
    def _knows_objective(self) -> bool:
        """True where the recorded objective is what the solver minimises."""
        prior = self.problem.prior
        follows_envelope = self.solver.traits.prior_by == "slope" and prior.steepness() > 0
        is_known = not prior.is_there or prior.density(self.problem.start) is not None
        return is_known and not follows_envelope
