"""A solver run to its end: sweep after sweep, each from the images of one state to those of the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from halotile.errors import DamagedData, Diverged, ResumeRefused
from halotile.graphs.iterations.divergence import OBJECTIVE, Row, divergence, growth, shorter
from halotile.graphs.iterations.finite import check_finite
from halotile.graphs.iterations.stages import Stage, Stages
from halotile.graphs.runs.damage import damaged_among, image_digest
from halotile.graphs.solvers.base import (
    CHANGE,
    ERROR,
    LENGTH,
    PRIOR,
    RECOMPUTED,
    RESIDUAL,
    SPENT,
    Problem,
    Solver,
    State,
    Step,
    relative_change,
)
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.run_directory.checkpoints import Checkpoint, Ledger
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.sharded.vectors import Vectors
from halotile.storage.views import Constant
from halotile.tasks.contributions import Contributions
from halotile.tasks.exact_sums import add_exactly
from halotile.tasks.fidelity import MISFIT
from halotile.tasks.priors import denoised_in
from halotile.tasks.shared import Shared
from halotile.tasks.step import StepTask, Sum, View, Written

TINY = 1e-30
"""A mean square that counts as this at least: nobody tells 300 dB from more."""
RESOLUTION = 1e-6
"""The part of the misfit of 0 below which the normal form does not tell misfits apart, in single precision."""
COPIES_TO_GO_BACK = 3
"""Copies of the image of which one is no longer read, and not yet written over, when its misfit is known."""


@dataclass(frozen=True)
class Target:
    """What iterates are compared with."""

    reference: Readable | None = None
    peak: float = 1.0


@dataclass
class Iterations:
    """The iterations of one solver in one folder; they go on where they were left.

    Parameters
    ----------
    solver : Solver
        What is iterated.
    problem : Problem
        What it works on.
    vectors : Vectors
        Where its images lie.
    grid : Grid
        The blocks of a sweep.
    fingerprint : str
        Of the job: state and journals belong to it.
    view : Sight
        How far a step looks: what is read ahead.
    margin : int
        How far apart the windows of the operators may end.
    overlap : bool
        Whether reading and writing go on beside the computation.
    sweep : callable
        ``sweep(task, iteration, journal, ledger)`` does what is left of a sweep.
    gather : callable
        ``gather(contributions, writer, iteration, journal, ledger)`` adds up what operators contribute that see the
        whole image.
    own_view : Sight
        How far operators look that have a pass of their own.
    by_shard : bool
        Whether each shard is computed for itself.
    target : Target
        What iterates are compared with.
    io_threads : int
        Threads of a worker that read and write the pieces of a block side by side.
    """

    solver: Solver
    problem: Problem
    vectors: Vectors
    grid: Grid
    fingerprint: str
    view: View
    margin: int
    overlap: bool
    sweep: Callable[[StepTask, int, Journal, Ledger], None]
    gather: Callable[[Contributions, ShardWriter, int, Journal, Ledger], None] | None = None
    own_view: View = field(default_factory=View)
    by_shard: bool = False
    target: Target = field(default_factory=Target)
    io_threads: int = 1

    def __post_init__(self) -> None:
        self.vectors.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = Checkpoint(self.vectors.folder / "checkpoint")
        self.state, self.rows, self.aside, self.digests = self._resumed()
        if not self.rows:
            self.vectors.create()
        elif self.state.iteration:
            self._check_vectors()
            self._set_aside()

    @property
    def done(self) -> int:
        """Iterations so far. The state counts sweeps: the images between are stored nowhere."""
        return max(0, self._at(self.state.iteration))

    def _at(self, sweep: int) -> int:
        """The iteration that a sweep ends with; 0 and below for those before the first."""
        return self.problem.per_sweep * (sweep - self.solver.sweeps_before)

    def run(self, iterations: int, is_done: Callable[[State, Row], bool]) -> Iterator[Row]:
        """Iterate until ``is_done``, at most so many times; what each sweep came to.

        Raises
        ------
        Diverged
            When numbers grow without bound. The state stays that of the iteration before.
        """
        while self.done < iterations and not (self.rows and is_done(self.state, self.rows[-1])):
            began = time.perf_counter()
            sums, digests = self._swept()
            check_finite(sums, self.state)
            after = self.solver.next(self.problem, self.state, sums)
            row = self._row(sums, after) | {"seconds": time.perf_counter() - began}
            if wrong := divergence([*self.rows, row], self._floor):
                raise Diverged(f"{wrong}. {self._describe_kept()}. {shorter(self.problem.step_size)}")
            self.state = after
            self.rows.append(row)
            self.aside = self._good()
            self.digests = {
                name: [digest, *self.digests.get(name, [])][: self.vectors.copies[name]]
                for name, digest in digests.items()
            }
            self.checkpoint.write(
                {
                    "fingerprint": self.fingerprint,
                    "iteration": self.state.iteration,
                    "numbers": dict(self.state.numbers),
                    "rows": self.rows,
                    "aside": self.aside,
                    "digests": self.digests,
                }
            )
            self._set_aside()
            self._clear(self.state.iteration - 1)
            yield row

    def image(self, name: str = "x") -> Shared:
        """An image of the state as it is now."""
        return Shared(self.vectors.open(name, self.state.iteration))

    def _resumed(self) -> tuple[State, list[Row], int | None, dict[str, list[str]]]:
        kept = self.checkpoint.read()
        if kept is None:
            return State(), [], None, {}
        if kept["fingerprint"] != self.fingerprint:
            raise ResumeRefused(
                f"{self.vectors.folder} holds the state of another job. Write what it was, or run with --fresh to start over."
            )
        return State(kept["iteration"], kept["numbers"]), kept["rows"], kept.get("aside"), kept["digests"]

    def _check_vectors(self) -> None:
        """Refuse to go on from images that are not what was written: they cannot be made again."""
        for name, copies in self.solver.vectors.items():
            for age in range(min(copies - 1, self.state.iteration)):
                path = self.vectors.path(name, self.state.iteration - age)
                try:
                    if image_digest(path, self.vectors.layout, self.grid).hex() != self.digests[name][age]:
                        raise DamagedData(f"{path}: a shard of another place or time lies in it")
                except DamagedData as error:
                    raise DamagedData(
                        f"{error}: without it there is no going on. Run with --fresh to start over."
                    ) from None

    def _read(self) -> Callable[[str, int], Readable]:
        """The vectors of the state, each read once a block, and of those before it."""
        opened: dict[tuple[str, int], Readable] = {}

        def read(name: str, age: int) -> Readable:
            iteration = self.state.iteration - age
            if iteration <= 0:
                return self.problem.start
            if (name, age) not in opened:
                opened[name, age] = Shared(self.vectors.open(name, iteration), self.margin)
            return opened[name, age]

        return read

    def _swept(self) -> tuple[dict[str, float], dict[str, str]]:
        """One iteration, from the state to the next; its sums, and the digests of its images."""
        read = self._read()
        stages = Stages(self.problem, self.vectors, self.grid)
        step = self.solver.step(stages.problem, self.state, read)
        ahead = [
            image
            for age in range(self.solver.vectors.get("x", 1) - 1)
            if isinstance(image := read("x", age), Shared)
        ]
        parts = [self._done(stage, tuple(ahead)) for stage in stages.requested]
        paths = [self.vectors.path(name, self.state.iteration + 1) for name in self.vectors.copies]
        task = self._task(step, read)
        with self._books(self.grid, paths) as (journal, ledger):
            self.sweep(task, self.state.iteration, journal, ledger)
        digests = {name: journal.image_digest(place).hex() for place, name in enumerate(self.vectors.copies)}
        return _merged([*parts, add_up(ledger, len(self.grid))]), digests

    def _done(self, stage: Stage, ahead: tuple[Shared, ...]) -> dict[str, float]:
        """A stage, computed and stored, if it is not there yet; its sums. The images ``ahead`` are read before it computes."""
        iteration = self.state.iteration
        with self._books(stage.grid, [stage.path], f".{stage.number}") as (journal, ledger):
            if isinstance(stage.wanted, Contributions):
                assert self.gather is not None
                self.gather(stage.wanted, stage.writer, iteration, journal, ledger)
            else:
                task = StepTask(
                    grid=self.grid,
                    images=((stage.writer, stage.wanted),),
                    sums=(),
                    stored=ahead,
                    view=self.own_view,
                    denoised=(),
                    overlap=self.overlap,
                    io_threads=self.io_threads,
                )
                self.sweep(task, iteration, journal, ledger)
        return add_up(ledger, len(stage.grid))

    @contextmanager
    def _books(self, grid: Grid, paths: Sequence[Path], stage: str = "") -> Iterator[tuple[Journal, Ledger]]:
        """What is known of a pass of the iteration at hand over the blocks of ``grid``, which writes ``paths``.

        Nothing of it has to outlive a power cut: a pass without books begins anew. So they are synced only where the
        pass breaks off, and an iteration waits for the disk once, for its checkpoint.
        """
        name = f"{self.state.iteration}{stage}"
        path, fingerprint = self.vectors.folder / f"journal.{name}", f"{self.fingerprint}-{name}"
        try:
            journal = Journal.open(path, fingerprint, len(grid), images=len(paths))
        except (FileNotFoundError, DamagedData):
            journal = Journal.create(path, fingerprint, len(grid), images=len(paths), sync=False)
        ledger = Ledger(self.vectors.folder / f"sums.{name}")
        self._strike(journal, ledger, grid, paths)
        try:
            yield journal, ledger
        except BaseException:
            with suppress(OSError):  # what is lost with the disk is done again
                ledger.sync()
                journal.sync()
            raise

    def _strike(self, journal: Journal, ledger: Ledger, grid: Grid, paths: Sequence[Path]) -> None:
        """Blocks that are marked, and have lost their sums or a shard, are done again."""
        if not journal.done:
            return
        done, layout = journal.done, self.vectors.layout
        lost = {number for number in done if number not in ledger.sums}
        for image, path in enumerate(paths):
            lost.update(damaged_among(done, journal, path, layout, grid, image=image, thorough=False))
        journal.unmark(sorted(lost))

    def _clear(self, iteration: int) -> None:
        """Remove the books of an iteration that is over."""
        for name in ("journal", "sums"):
            for pattern in (f"{name}.{iteration}", f"{name}.{iteration}.*"):
                for path in self.vectors.folder.glob(pattern):
                    path.unlink(missing_ok=True)

    def _task(self, step: Step, read: Callable[[str, int], Readable]) -> StepTask:
        images = {name: step.images[name] for name in self.vectors.copies}
        written = {
            id(image): Written(place, self.grid.shape, np.dtype(self.vectors.layout.dtype))
            for place, image in enumerate(images.values())
        }
        named = {name: written[id(image)] for name, image in images.items()}
        sums = [
            Sum(s.name, s.kind, written.get(id(s.left), s.left), written.get(id(s.right), s.right))
            for s in step.sums
        ]
        if "x" in images:
            sums += _usual_sums(named["x"], read("x", 0), self.target.reference)
            sums += _prior_sums(self.problem.prior.density(read("x", 0)))
        before = [read(name, 0) for name in images]
        return StepTask(
            grid=self.grid,
            images=tuple(
                (self.vectors.writer(name, self.state.iteration + 1), image) for name, image in images.items()
            ),
            sums=tuple(sums),
            stored=tuple(image for image in before if isinstance(image, Shared)),
            view=self.view,
            denoised=tuple(part for image in images.values() for part in denoised_in(image)),
            overlap=self.overlap,
            by_shard=self.by_shard,
            io_threads=self.io_threads,
        )

    def _row(self, sums: Mapping[str, float], after: State) -> Row:
        row: Row = {"iteration": self._at(after.iteration)}
        if MISFIT in sums:
            row[MISFIT] = max(sums[MISFIT] + self.problem.misfit_of_zero, 0.0)
        row |= {
            name: after.numbers[name]
            for name in (MISFIT, RESIDUAL, RECOMPUTED, SPENT)
            if name in after.numbers
        }
        if MISFIT in row and PRIOR in sums:
            row[OBJECTIVE] = row[MISFIT] + sums[PRIOR]
        if LENGTH in sums:
            row[CHANGE] = relative_change(sums)
        if ERROR in sums:
            error = max(sums[ERROR] / math.prod(self.grid.shape), TINY)
            row["psnr"] = 10 * math.log10(self.target.peak**2 / error)
        return row

    def _good(self) -> int | None:
        """The iteration whose image was the last one before the objective began to grow; None where it does not grow.

        A row tells the misfit of the image that its iteration began with. So the good image is two iterations old when the
        first row grows, and the next sweep would write over it.
        """
        if self.vectors.copies.get("x", 0) < COPIES_TO_GO_BACK or not growth(self.rows, self._floor):
            return None
        return self.aside if self.aside is not None else self.state.iteration - 2

    @property
    def _floor(self) -> float:
        """The least misfit that is told from 0."""
        return RESOLUTION * self.problem.misfit_of_zero

    def _set_aside(self) -> None:
        """Have the files follow what the checkpoint says is set aside."""
        if self.aside is None:
            self.vectors.forget_aside("x")
        elif self.aside > 0:
            self.vectors.set_aside("x", self.aside)

    def _describe_kept(self) -> str:
        """Which image there is to go back to, and where."""
        if self.aside:
            good = self._at(self.aside)
            return f"The image of iteration {good}, before it grew, is kept in {self.vectors.aside('x')}"
        has_one = self.done and "x" in self.vectors.copies
        where = f" in {self.vectors.path('x', self.state.iteration)}" if has_one else ""
        if self.aside == 0:
            return f"It grew from the start: the image it began with is better than that of iteration {self.done}{where}"
        return f"The image of iteration {self.done} is kept{where}"


def add_up(ledger: Ledger, blocks: int) -> dict[str, float]:
    """The sums over all blocks: exactly rounded, hence the same however the image is cut into blocks."""
    assert len(ledger.sums) >= blocks
    names = ledger.sums[0].keys()
    return {
        name: add_exactly(part for number in range(blocks) for part in ledger.sums[number][name])
        for name in names
    }


def _merged(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several passes as one: what several of them noted is added up."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged


def _usual_sums(made: Written, before: Readable, reference: Readable | None) -> list[Sum]:
    sums = [Sum(CHANGE, "distance", made, before), Sum(LENGTH, "dot", made, made)]
    return sums + ([Sum(ERROR, "distance", made, reference)] if reference is not None else [])


def _prior_sums(density: Readable | None) -> list[Sum]:
    if density is None:
        return []
    return [Sum(PRIOR, "dot", density, Constant(density.shape, density.dtype, 1.0))]
