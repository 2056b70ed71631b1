"""An inversion: operators, prior and solver as a problem on blocks, with its resource needs; and its passes, which compute the step size, iterate the solver and write the image."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.iterations import iterate
from halotile.graphs.jobs.reconstruct.costs import Backprojection, Form, footprint_of_operator, footprint_of_step
from halotile.graphs.jobs.reconstruct.job import ITERATE, Bounds, Reconstruction, is_behind, is_gone, last_of
from halotile.graphs.kinds.base import Footprint, Gather, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.graphs.plans.choices import describe_denoiser, describe_options
from halotile.graphs.plans.cutting import Halo, overlap_pays
from halotile.graphs.plans.trials.gpu_trials import on_device
from halotile.graphs.runs.records import remove_records
from halotile.graphs.solvers._subsets import SubsetNorms, SubsetSolver
from halotile.graphs.solvers.base import CHANGE, LENGTH, MOMENTUM, PRIOR, SPENT, Problem, Solver, State
from halotile.graphs.solvers.lanczos import Lanczos, begun
from halotile.graphs.watching.progress import describe_figures
from halotile.graphs.words import counted
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout, ShardWriter, Vectors
from halotile.storage.views import Constant, checked
from halotile.tasks.convolution.overlap_save import PERIOD
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.image_task import Denoised, ImageTask
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.operators.base import working_dtype
from halotile.tasks.priors.base import Prior, denoised_of
from halotile.tasks.terms import MISFIT
from halotile.tasks.trials.gpu_trial import Tuned

NORM_ITERATIONS = 15  # passes that compute the step size


@dataclass(frozen=True)
class Inversion:
    """``min f(x) + g(x)`` for the measurements of a job."""

    job: Reconstruction  # job with its number of workers decided
    output: OutputArray  # image
    form: Form  # method that computes the gradient of `f`
    prior: Prior  # `g`
    solver: Solver  # solver to iterate
    start: Readable  # first image
    target: iterate.Target  # reference that iterates are compared with
    io_threads: int = 1  # threads of a worker that read and write the parts of a block in parallel
    tuned: Tuned | None = None  # result of a trial of the GPU

    @property
    def grid(self) -> Grid:
        """The blocks of a pass."""
        return self.output.grid

    @property
    def halo(self) -> int:
        """Halo width of the pass of a step, in pixels."""
        return self.form.per_pass * (self.prior.reach() + self.form.fused_reach)

    @property
    def overlap(self) -> bool:
        """True where reading and writing run at the same time as computing."""
        return overlap_pays(self.job.run)

    @property
    def finds_step(self) -> bool:
        """True where the step size has to be computed first."""
        return self.job.solver.step == "auto" and self.solver.traits.takes_steps

    @property
    def adapts(self) -> bool:
        """True where the step size is found along the way: the curvature at the start is no bound."""
        return self.finds_step and any(term.at is not None for term in self.form.terms)

    @property
    def judges(self) -> bool:
        """True where a last pass finds the misfit of the image: where the step is not known to be safe."""
        return self.solver.traits.takes_steps and (self.adapts or not self.finds_step)

    @property
    def bounds(self) -> Bounds | None:
        """Least and greatest value of a pixel; counts come from images without numbers below 0."""
        if self.job.bounds != "auto":
            return self.job.bounds
        return (0.0, None) if self.form.terms[0].fidelity.is_of_counts else None

    @property
    def solver_passes(self) -> int:
        """Passes of the solver, at most, if no step is taken back."""
        iterations = self.job.solver.iterations // self.form.per_pass
        return self.solver.traits.passes_before + iterations + self.judges

    @property
    def before_iterations(self) -> int:
        """Passes before the first iteration."""
        return self.norm_passes + (self.form.folded is not None) + self.solver.traits.passes_before

    @property
    def _goes_back(self) -> bool:
        """True where the image before a misfit that grows is kept: where every iteration knows the misfit."""
        return self.solver.traits.takes_steps and not self.solver.traits.by_subsets

    @property
    def norm_solver(self) -> Lanczos:
        """The solver that finds the step size: by the norm of the stack, or of each subset."""
        return SubsetNorms(self.solver) if isinstance(self.solver, SubsetSolver) else Lanczos()

    @property
    def norm_passes(self) -> int:
        """Passes that compute the step size, at most."""
        norm = self.norm_solver
        count = norm.passes(len(self.form.terms)) if isinstance(norm, SubsetNorms) else NORM_ITERATIONS
        return count * self.finds_step

    @property
    def state_layout(self) -> Layout:
        """Layout of the solver's images: they are stored in the type of the computation."""
        dtype = str(working_dtype(np.result_type(*(term.measurement.dtype for term in self.form.terms))))
        return replace(self.output.layout.as_plain_array(), dtype=dtype)

    def vectors(self, solver: Solver, folder: str) -> Vectors:
        """Return the storage of a solver's images, with copies to go back to where they may diverge."""
        copies = dict(solver.vectors)
        if "x" in copies and self._goes_back:
            copies["x"] = max(copies["x"] + self.adapts, iterate.COPIES_TO_GO_BACK)
        state = RunDirectory.beside(self.output.path).state_path
        return Vectors(state / folder, self.state_layout, copies)

    @property
    def scratch_bytes(self) -> int:
        """Size of the solver's images at most."""
        staged = self.state_layout.size_bytes if self.form.apart or self.form.whole else 0
        staged *= 2 if self.solver.traits.by_subsets else 1  # two gradients, or one and a sensitivity
        spare_copy = self.state_layout.size_bytes if self._goes_back else 0
        return self.vectors(self.solver, "").size_bytes + spare_copy + staged

    @property
    def scratch_inodes(self) -> int:
        """Files and folders of the solver's images."""
        return self.state_layout.inodes * (self.scratch_bytes // self.state_layout.size_bytes)

    def step_footprint(self) -> Footprint:
        """Return the memory of one worker during a block of a pass."""
        return footprint_of_step(
            self.grid,
            self.form,
            self.prior,
            self.solver,
            self.state_layout,
            copies=2 if self.overlap else 1,
            io_threads=self.io_threads,
            host_bytes=self.tuned.host_bytes if self.tuned else None,
        )

    def operator_footprints(self) -> Iterator[Footprint]:
        """Yield the memory of one worker during each operator that sees the whole image."""
        step, denoised = self.step_footprint(), denoised_of(self.prior)
        on_gpu = denoised is not None and denoised.device != "cpu"
        for term in self.form.whole:
            dtype = np.dtype(self.state_layout.dtype)
            yield footprint_of_operator(term, self.grid.shape, dtype, step, on_gpu=on_gpu)

    def step_for(self, square: float) -> float:
        """Return a step size that does not diverge for a curvature-weighted ``|A|²`` of ``square``.

        Solvers that follow the slope of the prior beside that of the fidelity need a shorter step. The
        curvature of fidelities other than least squares is that at the start, and grows where the image falls
        below it: the step is halved.
        """
        if square <= 0:
            raise ConfigError(
                "|A|² is 0: the operators give 0 for every image, so the data say nothing about it. Look at their masks and "
                "weights, and write operators that see something."
            )
        steepness = self.prior.steepness() if self.solver.traits.prior_by == "slope" else 0.0
        is_square = all(term.at is None for term in self.form.terms)
        return (1.0 if is_square else 0.5) / (square + steepness)

    def problem(
        self, step_size: float = 1.0, backprojection: Readable | None = None, misfit_of_zero: float = 0.0
    ) -> Problem:
        """Return the problem that the solver works on; the normal form needs the backprojection, with its misfit."""
        counts = self.form.terms[0].fidelity.is_of_counts
        needs_it = self.form.folded is not None
        form = replace(self.form, folded=None) if needs_it and backprojection is None else self.form
        plain_gradient = form.map("gradient", backprojection, records_misfit=False) if form.per_pass > 1 else None
        return Problem(
            shape=self.grid.shape,
            dtype=np.dtype(self.state_layout.dtype),
            gradient=form.map("gradient", backprojection),
            normal=self.form.map("normal"),
            prior=self.prior,
            start=None if self.start is None else checked(self.start, "start", are_counts=counts),
            step_size=step_size,
            misfit_of_zero=misfit_of_zero,
            reach=form.fused_reach,
            tol=self.job.solver.tol,
            per_pass=form.per_pass,
            plain_gradient=plain_gradient,
            operators=len(form.terms),
            sensitivity=form.map("sensitivity"),
            bounds=self.bounds,
            adapts=self.adapts,
            parts=lambda numbers: replace(self, form=form.subset(numbers)).problem(step_size),
        )


SEED = 0  # seed of the random image that a trial denoises where there is no image yet


@dataclass(frozen=True)
class CutImage:
    """An image cut into blocks."""

    prior: Prior  # prior that acts on each block
    grid: Grid  # blocks
    # method that computes the gradient: it decides which region of a denoised image is requested at once
    form: Form


def denoising_of(cut: CutImage, layout: Layout, images: Iterable[Readable], output: OutputPath) -> DenoiseTask | None:
    """Return the denoising of a prior on a block, region by region, as a task; None where it denoises nothing.

    ``cut``: blocks and the prior; ``layout``: layout of the solver's images; ``images``: first that could be an iterate is denoised, else random
    numbers; ``output``: path of the result. Nothing is written there.
    """
    denoised = denoised_of(cut.prior)
    if denoised is None:
        return None
    fitting = (image for image in images if (image.shape, image.dtype) == (denoised.shape, denoised.dtype))
    return DenoiseTask(
        source=next(fitting, RandomImage(denoised.shape, denoised.dtype, SEED)),
        sides={},
        writer=ShardWriter(output, layout),
        grid=_grid(denoised, cut, layout),
        rim=denoised.rim,
        roles=denoised.roles,
        denoiser=denoised.denoiser,
        tiling=denoised.tiling,
        channels_out=1,
        device=denoised.device,
        precision=denoised.precision,
        on_nan="propagate",
        overlap=False,  # a region is waited for: the solver computes with it
        channels_last=denoised.channels_last,
        seals=denoised.seals,
    )


def _grid(denoised: Denoised, cut: CutImage, layout: Layout) -> Grid:
    """Return the regions requested at once: a block or a shard, with the margin of later iterations of a pass."""
    form, grid, spatial = cut.form, denoised.grid, denoised.roles.spatial
    edges = layout.shard if form.by_shard else grid.block
    # Along the rim of the image operators are not folded, and transforms are extended to whole cells.
    drawn_out = PERIOD // 2 if form.is_fft else 0
    around = 2 * (form.per_pass - 1) * (cut.prior.reach() + form.fused_reach + drawn_out)
    grown = (min(b + around * (axis in spatial), n) for axis, (b, n) in enumerate(zip(edges, grid.shape, strict=True)))
    return replace(grid, block=tuple(-(-edge // align) * align for edge, align in zip(grown, grid.align, strict=True)))


def describe_prior(prior: Prior, denoiser: Denoiser | None, halo: Halo, seals: Mapping[str, str]) -> dict[str, Any]:
    """Return a prior as JSON, with the weights of its denoiser by their digests."""
    described: dict[str, Any] = {"name": prior.name, **describe_options(prior)}
    if denoiser is None:
        return described
    return described | {
        "denoiser": describe_denoiser(denoiser),
        "weights": {path.name: seals[str(path)] for path in denoiser.files()},
        "depth": [list(pair) for pair in halo.depth],
    }


def describe_denoised(denoised: Denoised, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the boundary rule of a denoised image as JSON, with its device and tiles on a GPU."""
    return {"boundary": list(denoised.rim.rules), **on_device(denoised, previous)}


NORM, ADJOINT, WRITE = "norm", "adjoint", "write"  # phases, besides that of the iterations
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
                f"image by {last.get(CHANGE, 1.0):.3g} of its norm. Write a larger solver.iterations to reach it"
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
                f"to rewrite damaged blocks, the run repeats {written} from the start, because the state of the solver was removed when "
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
        self,
        at: RunView,
        solver: Solver,
        phase: str,
        problem: Problem,
        halo: int = 0,
        words: iterate.PassWords | None = None,
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
            or iterate.PassWords(
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


ROUNDED = 1e-6  # share of an objective by which rounding alone may raise it


@dataclass
class JudgedIterations(iterate.Iterations):
    """Iterations that take back a step after which the objective has risen, where the step size adapts.

    The step size is doubled until it is halved for the first time, by such a rise. Momentum may raise the objective as well:
    it is dropped before the step is halved. Of a solver that keeps more than the image the step is halved and not taken back.
    """

    def judge(self) -> Generator[Pass | Gather, Sums, bool]:
        """Yield a pass that finds the misfit of the image; return False where it takes back the last step."""
        sums, _ = yield from self._step(judges=True)
        row: iterate.FigureRow = {MISFIT: sums[MISFIT] + self.problem.misfit_of_zero}
        row[iterate.OBJECTIVE] = row[MISFIT] + sums.get(PRIOR, 0.0)
        if self._goes_back(row):
            return False
        first = next((before for before in self.rows if MISFIT in before), row)
        pairs = ((row[MISFIT], first[MISFIT]), (row[iterate.OBJECTIVE], iterate.objective_of(first)))
        rounding = max(self._floor, iterate.RESOLUTION**2 * sums[LENGTH] / self._step_size)
        times = iterate.LEAP if self.solver.traits.by_subsets else iterate.GROWS
        is_worse = all(not after <= times * max(before, rounding) for after, before in pairs)
        if is_worse and (self._knows_objective or isinstance(self.problem.start, Constant)):
            raise self._diverged(
                f"iteration {self.done}: its image has a misfit of {row[MISFIT]:.4g}, and the start has one of {first[MISFIT]:.4g}"
            )
        return True

    def _goes_back(self, row: iterate.FigureRow) -> bool:
        """Adapt the step size to a row; return to the image before the last step where that made the objective rise."""
        if not (self.problem.adapts and self._knows_objective and MISFIT in row):
            return False
        factor, was_halved = self.factor
        only_image = self.solver.vectors.keys() == {"x"} and not self.solver.traits.by_subsets
        last = next((before for before in reversed(self.rows) if MISFIT in before), row)
        before = iterate.objective_of(last)
        if iterate.objective_of(row) <= before + ROUNDED * abs(before):
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
