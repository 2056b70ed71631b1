"""The passes of a reconstruction: the step size found, the solver iterated, the image written."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

from halotile.graphs.amounts import counted
from halotile.graphs.iterations.iterate import Iterations
from halotile.graphs.iterations.words import PassWords
from halotile.graphs.jobs.base import Gather, OutputArray, Pass, PassCount, Place, Sums
from halotile.graphs.jobs.reconstruct.continuation import ITERATE, is_behind, is_gone, last_of
from halotile.graphs.jobs.reconstruct.forms import Backprojection
from halotile.graphs.jobs.reconstruct.inversion import NORM_ITERATIONS, Inversion
from halotile.graphs.runs.progress import describe_figures
from halotile.graphs.solvers.base import SPENT, Problem, Solver
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent, largest_eigenvalue
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import Constant
from halotile.tasks.fidelity import MISFIT
from halotile.tasks.step import StepTask, View

NORM, ADJOINT, WRITE = "norm", "adjoint", "write"
"""Phases, beside that of the iterations."""
BEFORE = " before the first iteration"
STAGES = {
    NORM: ("read", "forward", "adjoint", "reduce"),
    ADJOINT: ("read", "reduce", "write"),
    ITERATE: ("read", "forward", "adjoint", "reduce", "write"),
    WRITE: ("read",),
}
"""What is done to a block in each phase."""

Passes = Generator[Pass | Gather, Sums, None]


@dataclass(frozen=True)
class ReconstructWork(Inversion):
    """An inversion as passes over blocks."""

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The image."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """Passes that find the step size, one for the normal form, the iterations, the writing of the image."""
        return (
            PassCount(NORM, self.grid, NORM_ITERATIONS * self.finds_step),
            PassCount(ADJOINT, self.grid, int(self.form.folded is not None)),
            PassCount(ITERATE, self.grid, self.solver_passes),
            PassCount(WRITE, self.grid),
        )

    @property
    def keeps_state(self) -> bool:
        """Keep the solver's images, so that more iterations can follow."""
        return self.job.solver.keep_state

    def is_outdated(self, directory: RunDirectory) -> bool:
        """Return True where the output holds the image of another iteration than the one that is asked for."""
        return is_behind(directory, self.job.solver, self.solver)

    def run(self, at: Place) -> Passes:
        """Yield all passes."""
        self._report_mending(at)
        step_size = yield from self._step_size(at)
        problem = yield from self._problem(at, step_size)
        iterations = self._iterations(at, self.solver, ITERATE, problem, self.prior.reach())
        iterations.target = self.target
        choice = self.job.solver
        with suppress(OSError):
            at.directory.write_iterations(iterations.rows)
        at.report_row(iterations.rows, choice.iterations)
        while not iterations.is_over(choice.iterations, choice.tol):
            row = yield from iterations.iterate()
            at.report_row(iterations.rows, choice.iterations)
            with suppress(OSError):
                at.directory.append_iteration(row)
            at.report(f"iteration {row['iteration']:.0f} of {choice.iterations}: {describe_figures(row)}")
        if left_out := choice.iterations - iterations.done:
            spent = iterations.rows[-1].get(SPENT)
            why = ": rounding keeps its residual from getting shorter" if spent else ""
            at.report(f"{self.solver.name} is done {counted(left_out, 'iteration')} early{why}")
        at.directory.write_output_iterations(iterations.rows)
        yield self._writing(iterations)

    def _report_mending(self, at: Place) -> None:
        """Report why a few blocks take a whole run."""
        if is_gone(at.directory):
            written = counted(last_of(at.directory.read_output_iterations()), "iteration")
            at.report(
                f"to write damaged blocks anew: {written} from the start, for what the solver had was removed when "
                "the run ended (solver.keep_state: true keeps it)"
            )

    def _step_size(self, at: Place) -> Generator[Pass | Gather, Sums, float]:
        """Return the step size that was asked for, or one over the largest change of the problem's slope."""
        asked = self.job.solver.step
        if isinstance(asked, float | int):
            return float(asked)
        if not self.finds_step:
            return 1.0
        norm = self._iterations(at, Lanczos(), NORM, begun(self.problem()))
        while not (norm.is_over(NORM_ITERATIONS) or (norm.rows and is_spent(norm.state))):
            yield from norm.iterate()
        square = largest_eigenvalue(norm.state)
        size = self.step_for(square)
        at.report(f"|A|² is at most {square:.6g}: the step size is {size:.6g}")
        return size

    def _problem(self, at: Place, step_size: float) -> Generator[Pass | Gather, Sums, Problem]:
        """Return the problem; for the normal form, with the backprojection of all measurements."""
        if self.form.folded is None:
            return self.problem(step_size)
        problem = self.problem()
        zeros = Constant(problem.shape, problem.dtype)
        made = self._iterations(
            at, Backprojection(), ADJOINT, problem.beginning_at(zeros), self.form.fused_reach
        )
        if not made.is_over(1):
            yield from made.iterate()
        return self.problem(step_size, made.image("b"), made.state.numbers[MISFIT])

    def _iterations(
        self, at: Place, solver: Solver, phase: str, problem: Problem, halo: int = 0
    ) -> Iterations:
        form = self.form
        if phase != ITERATE:
            form, problem = form.once, problem.once
        titles = {NORM: " while the step size is found", ADJOINT: BEFORE}
        return Iterations(
            solver,
            problem,
            self.vectors(solver, phase),
            self.grid,
            at.fingerprint,
            view=form.view(halo),
            margin=form.fused_reach,
            overlap=self.overlap,
            words=PassWords(
                phase,
                STAGES[phase],
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
        """Return which iteration a pass makes, in words that follow on what happened."""
        each, all_of_them = self.form.per_sweep, self.job.solver.iterations
        before = number - self.solver.traits.passes_before
        if before < 0:
            return BEFORE
        first, last = before * each + 1, (before + 1) * each
        which = f"iteration {first}" if each == 1 else f"iterations {first} to {last}"
        return f" in {which} of {all_of_them}"

    def _writing(self, iterations: Iterations) -> Pass:
        """Return the pass that writes the image."""
        image = iterations.image()
        task = StepTask(
            grid=self.grid,
            images=((ShardWriter(self.output.path, self.output.layout), image),),
            sums=(),
            stored=(image,),
            view=View(),
            denoised=(),
            overlap=self.overlap,
            io_threads=self.io_threads,
        )
        return Pass(WRITE, task, self.output, stages=STAGES[WRITE])
