"""The run of a reconstruction: the step size found, the solver iterated, the image written."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from halotile.errors import DiskRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.iterations.divergence import Row
from halotile.graphs.iterations.gather import Gathering
from halotile.graphs.iterations.iterate import Iterations
from halotile.graphs.jobs.reconstruct.continuation import (
    ITERATE,
    is_behind,
    is_done,
    is_gone,
    keep_job,
    last_of,
)
from halotile.graphs.jobs.reconstruct.forms import Backprojection
from halotile.graphs.jobs.reconstruct.plan_value import NORM_ITERATIONS, ReconstructionPlan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.held_output import Claimed
from halotile.graphs.runs.outcome import Outcome, describe_full_disk, ended_by, failure_of
from halotile.graphs.runs.progress import Observer, Progress, describe_figures
from halotile.graphs.runs.session import Pass, Session
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import StatusFile
from halotile.graphs.runs.sweep import Sweep
from halotile.graphs.solvers.base import SPENT, Problem, Solver
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent, largest_eigenvalue
from halotile.storage.disk.durable import remove_partials
from halotile.storage.run_directory.checkpoints import Ledger
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import Constant
from halotile.tasks.contributions import Contributions
from halotile.tasks.fidelity import MISFIT
from halotile.tasks.step import StepTask, View

NORM, ADJOINT, WRITE = "norm", "adjoint", "write"
"""What the dashboard calls the sweeps."""
BEFORE = " before the first iteration"
STAGES = {
    NORM: ("read", "forward", "adjoint", "reduce"),
    ADJOINT: ("read", "reduce", "write"),
    ITERATE: ("read", "forward", "adjoint", "reduce", "write"),
    WRITE: ("read",),
}
"""What is done to a block in each of them; its sums are those of the solver."""


def reconstruct(
    plan: ReconstructionPlan, *, observer: Observer | None = None, cluster: Cluster | None = None
) -> Outcome:
    """Run a reconstruction to its end, or go on with one that was interrupted.

    Parameters
    ----------
    plan : ReconstructionPlan
        From :func:`halotile.graphs.jobs.reconstruct.plan_value.make_reconstruction_plan`.
    observer : callable, optional
        Called with a :class:`Progress` about twice a second.
    cluster : Cluster, optional
        A running cluster to use; by default the one the job names is started, and ended.

    Raises
    ------
    OutputRefused, ResumeRefused
        When the output is not this job's to write, another run is writing it, or it was moved or removed meanwhile.
    InputError
        When a measurement or another image that is read was changed meanwhile.
    Diverged
        When the solver's numbers grow without bound. The error says where the image from before they grew lies.
    BlockFailed
        When blocks failed after their retries.
    DiskRefused
        When the disk is full. What is done stays done.
    Stopped
        When SIGTERM or SIGUSR1 asked the run to drain.
    """
    directory = RunDirectory(plan.run_directory)
    with Signals() as signals, claim(plan, directory, signals) as claimed:
        return _Driver(plan, directory, claimed, signals, observer, cluster).run()


class _Driver:
    """The driver's state during one run."""

    def __init__(
        self,
        plan: ReconstructionPlan,
        directory: RunDirectory,
        claimed: Claimed,
        signals: Signals,
        observer: Observer | None,
        cluster: Cluster | None,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.claimed = claimed
        self.journal = claimed.journal
        self.signals = signals
        self.status = StatusFile(directory, plan, observer)
        self.session = Session(plan.run, plan.cluster, self.status, cluster)
        self.begun = False
        """Whether a sweep was begun."""
        self.at_hand = self.journal
        """The journal of the sweep at hand."""
        self.paces: dict[str, float | None] = {}
        """What a block took in the last sweep of each phase, in seconds."""

    def run(self) -> Outcome:
        """Every sweep that is left."""
        self.claimed.strike_damaged(self.journal.done, self.signals, thorough=True)
        keep_job(self.plan, self.directory)
        if self.journal.done and is_behind(self.directory, self.plan.job.solver):
            self.journal.unmark(list(self.journal.done))
            self.journal.sync()  # before another iteration's image is told to be there
        finished = len(self.journal.done) == len(self.plan.grid)
        self.status.earlier = len(self.plan.grid) * (self.plan.sweeps - 1) if finished else 0
        self.status.begin(self.status.progress("start", done=len(self.journal.done), failed=0))
        try:
            if not finished:
                self._tell_of_mending()
                with self.session:
                    self._solve()
            self.claimed.finish(self.signals)
        except BaseException as error:
            with suppress(OSError):
                self.journal.sync()
            state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            self.status.end(state, self._progress(), ended_by(error))
            raise
        self.journal.sync()
        if not self.plan.job.solver.keep_state:
            self.directory.forget_state()
        return self._conclude()

    def _solve(self) -> None:
        step_size = self._step_size()
        iterations = self._iterations(
            self.plan.solver, ITERATE, self._problem(step_size), self.plan.prior.reach()
        )
        iterations.target = self.plan.target
        solver, job = self.plan.solver, self.plan.job.solver
        with suppress(OSError):
            self.directory.write_iterations(iterations.rows)
        self.status.rows = iterations.rows
        self._note(iterations.rows[-1:])
        for row in iterations.run(job.iterations, lambda _, row: is_done(job.tol, row)):
            self._note([row])
            with suppress(OSError):
                self.directory.append_iteration(row)
            self.status.report(
                f"iteration {row['iteration']:.0f} of {job.iterations}: {describe_figures(row)}"
            )
        if left_out := job.iterations - iterations.done:
            spent = iterations.rows[-1].get(SPENT)
            why = ": rounding keeps its residual from getting shorter" if spent else ""
            self.status.report(f"{solver.name} is done {counted(left_out, 'iteration')} early{why}")
        self._write_output(iterations)

    def _tell_of_mending(self) -> None:
        """Say why a few blocks take a whole run."""
        if is_gone(self.directory):
            missing = len(self.plan.grid) - len(self.journal.done)
            written = counted(last_of(self.directory.read_output_iterations()), "iteration")
            self.status.report(
                f"to write {counted(missing, 'block')} anew: {written} from the start, for what the solver had was removed when "
                "the run ended (solver.keep_state: true keeps it)"
            )

    def _note(self, rows: list[Row]) -> None:
        """Have the status tell of an iteration."""
        for row in rows:
            self.status.figures = row | {"iterations": self.plan.job.solver.iterations}

    def _step_size(self) -> float:
        """What was asked for, or one over how much the slope of the problem changes at most."""
        requested = self.plan.job.solver.step
        if isinstance(requested, float | int):
            return float(requested)
        if not self.plan.finds_step:
            return 1.0
        norm = self._iterations(Lanczos(), NORM, begun(self.plan.problem()))
        for _ in norm.run(NORM_ITERATIONS, lambda state, _: is_spent(state)):
            pass
        square = largest_eigenvalue(norm.state)
        size = self.plan.step_for(square)
        self.status.report(f"|A|² is at most {square:.6g}: the step size is {size:.6g}")
        return size

    def _problem(self, step_size: float) -> Problem:
        """The problem; for the normal form, with the backprojection of all measurements."""
        if self.plan.form.folded is None:
            return self.plan.problem(step_size)
        problem = self.plan.problem()
        zeros = Constant(problem.shape, problem.dtype)
        made = self._iterations(
            Backprojection(), ADJOINT, problem.beginning_at(zeros), self.plan.form.fused_reach
        )
        for _ in made.run(1, lambda *_: False):
            pass
        return self.plan.problem(step_size, made.image("b"), made.state.numbers[MISFIT])

    def _iterations(self, solver: Solver, phase: str, problem: Problem, halo: int = 0) -> Iterations:
        form = self.plan.form
        if phase != ITERATE:
            form, problem = form.once, problem.once
        return Iterations(
            solver,
            problem,
            self.plan.vectors(solver, phase),
            self.plan.grid,
            self.plan.fingerprint,
            view=form.view(halo),
            margin=form.fused_reach,
            overlap=self.plan.overlap,
            sweep=partial(self._sweep, phase),
            gather=partial(self._gather, phase),
            own_view=form.own_view(),
            by_shard=form.by_shard,
            io_threads=self.plan.io_threads,
        )

    def _write_output(self, iterations: Iterations) -> None:
        self.directory.write_output_iterations(iterations.rows)
        image = iterations.image()
        task = StepTask(
            grid=self.plan.grid,
            images=((ShardWriter(self.plan.output, self.plan.layout), image),),
            sums=(),
            stored=(image,),
            view=View(),
            denoised=(),
            overlap=self.plan.overlap,
            io_threads=self.plan.io_threads,
        )
        self.status.earlier = len(self.plan.grid) * (self.plan.sweeps - 1)
        self._sweep(WRITE, task, 0, self.journal, None)

    def _sweep(
        self, phase: str, task: StepTask, iteration: int, journal: Journal, ledger: Ledger | None
    ) -> None:
        self._count_earlier(phase, iteration, len(journal.done))
        self.at_hand = journal
        sweep = Sweep(
            task,
            phase=phase,
            options=self.plan.run,
            claimed=self.claimed,
            journal=journal,
            directory=self.directory,
            signals=self.signals,
            status=self.status,
            import_folder=self.plan.job.import_folder,
            ledger=ledger,
            title=self._title(phase, iteration),
            iteration=iteration if phase in (NORM, ITERATE) else None,
            stages=(*STAGES[phase], *(("denoise",) if task.denoised else ())),
            seconds_per_block=self.paces.get(phase),
        )
        self._through(sweep)
        self.paces[phase] = sweep.seconds_per_block
        if sweep.bad:
            bad = tuple(sweep.bad[number] for number in sorted(sweep.bad))
            raise failure_of(self.plan, bad)

    def _gather(
        self,
        phase: str,
        wanted: Contributions,
        writer: ShardWriter,
        iteration: int,
        journal: Journal,
        ledger: Ledger,
    ) -> None:
        """Add up what operators contribute that see the whole image."""
        self._count_earlier(phase, iteration, 0)
        gathering = Gathering(
            wanted,
            writer=writer,
            folder=self.directory.state_path / "parts",
            options=self.plan.run,
            claimed=self.claimed,
            journal=journal,
            ledger=ledger,
            signals=self.signals,
            status=self.status,
            title=self._title(phase, iteration),
            import_folder=self.plan.job.import_folder,
        )
        self._through(gathering)

    def _through(self, work: Pass) -> None:
        self.session.through(work)
        if work.disk_error:
            raise DiskRefused(describe_full_disk(self.plan, work.disk_error, len(work.journal.done)))
        if work.untidy:
            remove_partials(self.plan.output)
            remove_partials(self.directory.state_path)

    def _count_earlier(self, phase: str, iteration: int, done: int) -> None:
        """Tell the status how many blocks came before a sweep."""
        before = {NORM: 0, ADJOINT: self.plan.before_solver - 1, ITERATE: self.plan.before_solver}
        if phase in before:
            self.status.earlier = len(self.plan.grid) * (before[phase] + iteration)
        if not self.begun:
            # What earlier runs did is no measure of how fast this one is.
            self.begun, self.status.resumed = True, self.status.earlier + done

    def _title(self, phase: str, iteration: int) -> str:
        """Which sweep it is, in words that follow on what happened."""
        if phase == ITERATE:
            each, all_of_them = self.plan.form.per_sweep, self.plan.job.solver.iterations
            before = iteration - self.plan.solver.sweeps_before
            if before < 0:
                return BEFORE
            first, last = before * each + 1, (before + 1) * each
            which = f"iteration {first}" if each == 1 else f"iterations {first} to {last}"
            return f" in {which} of {all_of_them}"
        return {NORM: " while the step size is found", ADJOINT: BEFORE}.get(phase, "")

    def _progress(self) -> Progress:
        return self.status.progress("stop", done=len(self.at_hand.done), failed=0)

    def _conclude(self) -> Outcome:
        self.status.earlier = len(self.plan.grid) * (self.plan.sweeps - 1)
        progress = self._progress()
        self.status.end("finished", progress, "")
        return Outcome.of(self.plan, progress)
