"""The passes of a reconstruction: compute the step size, iterate the solver, write the image."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

from halotile.graphs.amounts import counted
from halotile.graphs.iterations.iterate import (
    GROWS,
    LEAP,
    OBJECTIVE,
    RESOLUTION,
    FigureRow,
    Iterations,
    PassWords,
    objective_of,
)
from halotile.graphs.jobs.reconstruct.costs import Backprojection
from halotile.graphs.jobs.reconstruct.inversion import Inversion
from halotile.graphs.jobs.reconstruct.job import ITERATE, is_behind, is_gone, last_of
from halotile.graphs.kinds.base import Gather, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.graphs.runs.passes.records import remove_records
from halotile.graphs.solvers.base import CHANGE, LENGTH, MOMENTUM, PRIOR, SPENT, Problem, Solver, State
from halotile.graphs.solvers.lanczos import begun
from halotile.graphs.watching.progress import describe_figures
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import Constant
from halotile.tasks.image_task import ImageTask
from halotile.tasks.terms import MISFIT

NORM, ADJOINT, WRITE = "norm", "adjoint", "write"
"""Phases, besides that of the iterations."""
BEFORE = " before the first iteration"

Passes = Generator[Pass | Gather, Sums, None]


@dataclass(frozen=True)
class ReconstructWork(Inversion, Work):
    """An inversion as passes over blocks."""

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The image."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """Passes for the step size, one for the normal form, the iterations, and the writing of the image."""
        return (
            PassCount(NORM, self.grid, self.norm_passes),
            PassCount(ADJOINT, self.grid, int(self.form.folded is not None)),
            PassCount(ITERATE, self.grid, self.solver_passes),
            PassCount(WRITE, self.grid),
        )

    @property
    def keeps_state(self) -> bool:
        """True where the solver's images are kept, so that more iterations can follow."""
        return self.job.solver.keep_state

    def is_outdated(self, directory: RunDirectory) -> bool:
        """Return True where the output holds the image of another iteration than the requested one."""
        return is_behind(directory, self.job.solver, self.solver)

    def run(self, at: RunView) -> Passes:
        """Yield all passes."""
        self._report_repair(at)
        step_size = yield from self._step_size(at)
        problem = yield from self._problem(at, step_size)
        iterations = self.iterations(at, self.solver, ITERATE, problem, self.prior.reach())
        iterations.target = self.target
        choice = self.job.solver
        with suppress(OSError):
            at.directory.write_iterations(iterations.rows)
        at.report_row(iterations.rows, choice.iterations)
        is_judged = False
        while not is_judged:
            while not iterations.is_over(choice.iterations, choice.tol):
                row = yield from iterations.iterate()
                at.report_row(iterations.rows, choice.iterations)
                with suppress(OSError):
                    at.directory.write_iterations(iterations.rows)
                back = "" if row in iterations.rows[-1:] else ", taken back"
                at.report(f"iteration {row['iteration']:.0f} of {choice.iterations}{back}: {describe_figures(row)}")
            is_judged = not self.judges or (yield from iterations.judge())
        self._report_end(at, iterations)
        at.directory.write_output_iterations(iterations.rows)
        yield self._write_pass(iterations)

    def _report_end(self, at: RunView, iterations: JudgedIterations) -> None:
        """Report iterations that were left out, or a tolerance that was not reached."""
        choice, last = self.job.solver, iterations.rows[-1]
        if choice.tol and not self.solver.is_done(choice.tol, last):
            at.report(
                f"solver.tol: {choice.tol:g} is not reached after {counted(choice.iterations, 'iteration')}: the last one changed the "
                f"image by {last.get(CHANGE, 1.0):.3g} of its length. Write more solver.iterations for it"
            )
        if left_out := choice.iterations - iterations.done:
            is_spent = last.get(SPENT)
            why = ": rounding keeps its residual from getting shorter" if is_spent else ""
            at.report(f"{self.solver.name} is done {counted(left_out, 'iteration')} early{why}")

    def _report_repair(self, at: RunView) -> None:
        """Report why a few blocks need a whole run."""
        if is_gone(at.directory):
            written = counted(last_of(at.directory.read_output_iterations()), "iteration")
            at.report(
                f"to write damaged blocks anew: {written} from the start, for what the solver had was removed when "
                "the run ended (solver.keep_state: true keeps it)"
            )

    def _step_size(self, at: RunView) -> Generator[Pass | Gather, Sums, float]:
        """Return the requested step size, or the inverse of the largest curvature of the problem."""
        requested = self.job.solver.step
        if isinstance(requested, float | int):
            return float(requested)
        if not self.finds_step:
            return 1.0
        solver = self.norm_solver
        norm = self.iterations(at, solver, NORM, begun(self.problem()))
        while not (norm.is_over(self.norm_passes) or (norm.rows and solver.is_spent(norm.state))):
            yield from norm.iterate()
        square = solver.bound(norm.state)
        size = self.step_for(square)
        which = "|A|² of a subset" if self.solver.traits.by_subsets else "|A|²"
        at.report(f"{which} is at most {square:.6g}: the step size is {size:.6g}")
        return size

    def _problem(self, at: RunView, step_size: float) -> Generator[Pass | Gather, Sums, Problem]:
        """Return the problem; for the normal form, with the backprojection of all measurements."""
        if self.form.folded is None:
            return self.problem(step_size)
        problem = self.problem()
        zeros = Constant(problem.shape, problem.dtype)
        backprojection = self.iterations(
            at, Backprojection(), ADJOINT, problem.beginning_at(zeros), self.form.fused_reach
        )
        if not backprojection.is_over(1):
            yield from backprojection.iterate()
        return self.problem(step_size, backprojection.image("b"), backprojection.state.numbers[MISFIT])

    def iterations(
        self, at: RunView, solver: Solver, phase: str, problem: Problem, halo: int = 0, words: PassWords | None = None
    ) -> JudgedIterations:
        """Return the iterations of a solver, whose images are in a folder named like its phase."""
        form = self.form
        if phase != ITERATE:
            form, problem = form.once, problem.once
        titles = {NORM: " while the step size is found", ADJOINT: BEFORE}
        return JudgedIterations(
            solver,
            problem,
            self.vectors(solver, phase),
            self.grid,
            at.fingerprint,
            view=form.view(halo),
            margin=form.fused_reach,
            overlap=self.overlap,
            words=words
            or PassWords(
                phase,
                self._title if phase == ITERATE else lambda _: titles[phase],
                is_numbered=phase in (NORM, ITERATE),
            ),
            parts=at.directory.state_path / "parts",
            import_folder=self.job.import_folder,
            own_view=form.own_view(),
            by_shard=form.by_shard,
            io_threads=self.io_threads,
        )

    def _title(self, number: int) -> str:
        """Return the iteration of a pass, as text that follows a message."""
        per_pass, all_of_them = self.form.per_pass, self.job.solver.iterations
        before = min(number - self.solver.traits.passes_before, all_of_them // per_pass - 1)
        if before < 0:
            return BEFORE
        first, last = before * per_pass + 1, (before + 1) * per_pass
        which = f"iteration {first}" if per_pass == 1 else f"iterations {first} to {last}"
        return f" in {which} of {all_of_them}"

    def _write_pass(self, iterations: JudgedIterations) -> Pass:
        """Return the pass that writes the image."""
        image = iterations.image()
        task = ImageTask(
            grid=self.grid,
            images=((ShardWriter(self.output.path, self.output.layout), image),),
            stored=(image,),
            overlap=self.overlap,
            io_threads=self.io_threads,
        )
        return Pass(WRITE, task, self.output)


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
