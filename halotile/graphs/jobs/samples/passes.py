"""The passes of posterior samples: each block on itself with a halo, or conjugate gradients on the whole image."""

import itertools
import math
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from halotile.errors import InputError
from halotile.graphs.iterations.iterate import PassWords
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.jobs.reconstruct.inversion import ReconstructWork
from halotile.graphs.kinds.base import Gather, Inspection, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.graphs.solvers.base import RESIDUAL, Problem, ReadVector, SolverBase, SolverTraits, State, Step, advanced
from halotile.graphs.solvers.cg import FIRST, ConjugateGradients
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.json_files import Checkpoint
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import Constant
from halotile.tasks.image_task import ImageTask, Shared
from halotile.tasks.operators.sum import Total
from halotile.tasks.posterior.gaussian import DOUBLE, SOLVED, Deviation, Solved, SquaredDraw

PHASE = "samples"
Solving = Generator[Pass | Gather, Sums, tuple[Shared, float]]


@dataclass(frozen=True)
class Layer:
    """One image of several."""

    images: Shared
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape[1:]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.images.dtype

    def read(self, region: Region) -> Pixels:
        count = self.images.shape[0]
        layer: Pixels = self.images.read(Region((0, *region.start), (count, *region.stop)))[self.number]
        return layer


@dataclass(frozen=True)
class SampleWork(Work):
    """Mean, standard deviation and draws, written by one pass."""

    maps: tuple[OutputArray, ...]
    solved: Solved
    overlap: bool

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The mean, the standard deviation and the draws, where they are wanted."""
        return self.maps

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """One pass, counted for each output."""
        return (PassCount(PHASE, self.maps[0].grid, len(self.maps)),)

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        images = Shared(self.solved, computed=True)
        yield self._written([Layer(images, number) for number in range(self.solved.shape[0])])

    def _written(self, images: Sequence[Readable]) -> Pass:
        """Return the pass that writes the outputs: of the mean, the standard deviation and the draws those that are wanted."""
        has_std = any(output.key == "output.std" for output in self.maps)
        wanted = images if has_std else (images[0], *images[2:])
        writers = (ShardWriter(output.path, output.layout) for output in self.maps)
        chosen = tuple(zip(writers, wanted, strict=True))
        first, *also = self.maps
        task = ImageTask(grid=first.grid, images=chosen, overlap=self.overlap)
        return Pass(PHASE, task, first, also=tuple(also))


SUM = "sum"  # phase of the pass after each solution, which adds it to what is kept
MOST = 20_000  # passes after which a solution is given up
# Pixels that the residual may be left in alone: a larger image is solved more exactly, as its worst place counts.
ALONE = 1024**2


@dataclass(frozen=True)
class Kept(SolverBase):
    """The mean, and the sum of the squares of the draws so far, after so many passes as there are solutions."""

    name: ClassVar[str] = SUM
    vectors: ClassVar[Mapping[str, int]] = {"mean": 2, SUM: 2}
    traits: ClassVar[SolverTraits] = SolverTraits(prior_by=None, takes_steps=False, for_jobs=False)

    added: Readable  # the mean, then the square of each draw
    residual: float

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        if state.passes == 0:
            return Step({"mean": self.added, SUM: Constant(problem.shape, problem.dtype)})
        return Step({"mean": read("mean", 0), SUM: Total((read(SUM, 0), self.added), (1.0, 1.0))})

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        return advanced(state, **{RESIDUAL: self.residual})


@dataclass(frozen=True)
class WholeWork(SampleWork):
    """The same for operators that see far: solutions on the whole domain one after another, by conjugate gradients on disk."""

    inversion: ReconstructWork  # grid, storage and cost of a solution

    @property
    def _phases(self) -> tuple[str, ...]:
        return ("mean", *(f"draw-{draw}" for draw in self.solved.draws))

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """Passes for each solution, about, and one that adds it; then the one that writes."""
        grid, times = self.inversion.grid, self.inversion.solver_passes
        each = ((PassCount(phase, grid, times), PassCount(SUM, grid)) for phase in self._phases)
        return (*itertools.chain.from_iterable(each), *super().passes)

    @property
    def scratch(self) -> tuple[int, int]:
        """Bytes, and files with folders, of the solver's images, of sums, and of draws that are stored at the end."""
        layout = self.inversion.state_layout
        images = self.inversion.scratch_bytes // layout.size_bytes + sum(Kept.vectors.values())
        images += self.solved.keeps_draws * len(self.solved.draws)
        return images * layout.size_bytes, images * layout.inodes

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        of, whole, draws = replace(self.solved.posterior, dtype=DOUBLE), self.inversion, self.solved.draws
        folder, estimator = at.directory.state_path, self.solved.estimator
        kept = whole.iterations(at, Kept(whole.start, 0.0), SUM, whole.problem(), words=PassWords(SUM))
        for number, (phase, draw) in enumerate(zip(self._phases, (None, *draws), strict=True)):
            if number >= kept.state.passes:
                solution, residual = yield from self._solution(at, phase, draw)
                kept.solver = Kept(solution if draw is None else SquaredDraw(solution, of, estimator, draw), residual)
                yield from kept.iterate()
            self._put_away(folder, phase)
        at.directory.write_output_iterations(kept.rows)
        mean = Total((kept.image("mean"), Constant(of.domain.shape, DOUBLE, float(of.prior.mean))), (1.0, 1.0))
        stored = self._phases[1:] if self.solved.keeps_draws else ()
        drawn = (Total((mean, open_source(folder / f"{phase}.x")), (1.0, 1.0)) for phase in stored)
        images: tuple[Readable, ...] = mean, Deviation(kept.image(SUM), of, estimator, len(draws)), *drawn
        yield self._written([of.frame.forward(image) for image in images])

    def _solution(self, at: RunView, phase: str, draw: int | None) -> Solving:
        """Solve for the mean, or a draw, until its error is below the tolerance; return it with its residual."""
        prior, tol = self.solved.posterior.prior, self.solved.tol
        inversion = replace(self.inversion, form=Form(self.solved.posterior.terms(draw)))
        problem, solver = inversion.problem(), ConjugateGradients()
        words = PassWords(phase, lambda number: f" in iteration {number} of {phase}")
        iterations = inversion.iterations(at, solver, phase, problem, words=words)
        if not iterations.rows:
            yield from iterations.iterate()
        pixels = min(math.prod(problem.shape), ALONE)
        side = math.sqrt(iterations.state.numbers[FIRST]) or 1.0
        wanted = SOLVED * tol * math.sqrt(prior.least * pixels) / side
        iterations.problem = replace(problem, tol=wanted)
        while not iterations.is_over(MOST, wanted):
            yield from iterations.iterate()
        residual = iterations.rows[-1][RESIDUAL]
        reached = f"a residual of {residual:.2e} of its side after {iterations.done} iterations, and posterior.tol: {tol:g} takes {wanted:.2e}"
        if residual > wanted:
            raise InputError(
                f"the equations of {phase} are not solved: {reached}. Write a larger posterior.tol, or a smaller prior.range than {prior.range:.4g}."
            )
        at.report(f"{phase}: {reached}")
        return iterations.image(), residual

    def _put_away(self, state: Path, phase: str) -> None:
        """Remove the solver's images of a solution that is kept; of a draw that is stored at the end, all but itself."""
        saved = Checkpoint(state / phase / "checkpoint").read()
        if saved and self.solved.keeps_draws and phase != self._phases[0]:
            vectors = self.inversion.vectors(ConjugateGradients(), phase)
            with suppress(FileNotFoundError):  # it was moved before an interruption
                vectors.path("x", saved["iteration"]).rename(state / f"{phase}.x")
        shutil.rmtree(state / phase, ignore_errors=True)

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> Inspection:
        """Return the residual of each solution, relative to its side."""
        rows = RunDirectory.beside(self.maps[0].path).read_output_iterations()
        residuals = [row[RESIDUAL] for row in rows]
        return Inspection({"residuals": residuals}, [("residuals", f"{max(residuals):.2e} of the side at most")])
