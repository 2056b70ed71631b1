"""A solver run to its end: pass after pass, each from the images of one state to those of the next."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from halotile.errors import DamagedData, Diverged, InputError, ResumeRefused
from halotile.graphs.kinds.base import Gather, Pass, Records, Sums
from halotile.graphs.runs.records import image_digest, remove_records
from halotile.graphs.solvers import base
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.run_directory.json_files import Checkpoint
from halotile.storage.sharded.output import ShardWriter, Vectors, create_metadata
from halotile.tasks.image_task import ImageTask, Shared, Sum, View, Written
from halotile.tasks.operators.sum import Total
from halotile.tasks.priors.base import denoised_in
from halotile.tasks.terms import MISFIT, Adding, Contributions


@dataclass(frozen=True)
class PassWords:
    """Names of the passes of a solver."""

    phase: str  # name on the dashboard, and in the pass counts of the job
    # returns the iteration of a pass as text that follows a message
    title: Callable[[int], str] = lambda _: ""
    is_numbered: bool = False  # group passes on the dashboard by their number


def check_finite(sums: Mapping[str, float], state: base.State, epoch: int = 1) -> None:
    """Refuse the input when sums of a solver are not finite in its first epoch; later ones are caused by the solver itself.

    >>> check_finite({"misfit": float("nan")}, base.State(passes=1))
    >>> check_finite({"misfit": 2.0, "error": float("nan")}, base.State())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    halotile.errors.InputError: the first pass gave error nan: some pixel of the reference is NaN or infinite. ...
    """
    wild = [name for name, value in sums.items() if not math.isfinite(value)]
    if not wild or state.passes >= epoch:
        return
    which = f"pass {state.passes + 1}" if state.passes else "the first pass"
    came = f"{which} gave {wild[0]} {sums[wild[0]]}"
    if wild == [base.ERROR]:
        raise InputError(
            f"{came}: some pixel of the reference is NaN or infinite. Replace it by a number, or leave the reference out."
        )
    raise InputError(
        f"{came}: some pixel of the data, of start, or of what an operator reads (a mask) is NaN or infinite. Replace it "
        "by a number. To leave a pixel out, write 0 in its place, and a mask that is 0 there."
        + (" Or write a smaller solver.step, if it is not auto." if state.passes else "")
    )


@dataclass(frozen=True)
class Stage:
    """An image that is computed before the pass that reads it."""

    number: int  # its number among the stages of the step; it may read those before it
    wanted: Readable | Contributions  # image to compute, by a pass or as a sum over operators
    writer: ShardWriter  # writer of the stored image

    @property
    def path(self) -> OutputPath:
        """Path of the stored image."""
        return path_of(self.writer.path)


def merge_sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sums of several passes as one mapping: values noted by several of them are added up."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged


class StagedStep:
    """The stages of one step.

    Parameters
    ----------
    problem : Problem
        The problem whose maps may be staged.
    vectors : Vectors
        Vectors beside which the stages are stored.

    Attributes
    ----------
    problem : Problem
        The same problem, to build the step from: staged images are read from where they will be stored.
    requested : list of Stage
        Images that have to be computed before the pass of the step, in this order.
    """

    def __init__(self, problem: base.Problem, vectors: Vectors) -> None:
        self.vectors = vectors
        self.requested: list[Stage] = []
        self.problem = self._staged(problem)

    def _staged(self, problem: base.Problem) -> base.Problem:
        """Return the problem, and those of its parts, with maps that read what will be stored."""
        sensitivity, parts = problem.sensitivity, problem.parts
        return replace(
            problem,
            gradient=self._stored(problem.gradient),
            normal=self._stored(problem.normal),
            sensitivity=sensitivity and self._stored(sensitivity),
            parts=parts and (lambda numbers: self._staged(parts(numbers))),
        )

    def _stored(self, operation: base.Map) -> base.Map:
        if not isinstance(operation, base.Staged):
            return operation
        staged = operation

        def mapped(image: Readable) -> Readable:
            before = self._add_stage(staged.before(image))
            if staged.within is None:
                return before
            return Total((staged.within(image), before), (1.0, 1.0))

        return mapped

    def _add_stage(self, image: Readable | Contributions) -> Shared:
        number = len(self.requested)
        path = self.vectors.folder / f"stage.{number}"
        create_metadata(path, self.vectors.layout, self.vectors.disk)
        writer = ShardWriter(path, self.vectors.layout, self.vectors.disk)
        self.requested.append(Stage(number, image, writer))
        return Shared(open_source(path))


TINY = 1e-30  # least mean square: a PSNR above 300 dB means nothing
RESOLUTION = 1e-6  # fraction of the misfit of 0 below which the normal form cannot resolve misfits in single precision
COPIES_TO_GO_BACK = 3  # copies of the image that are kept, so that one is not yet overwritten when its misfit is known


ADJOINT = "adjoint"  # name of sums over operators on the dashboard


@dataclass(frozen=True)
class Target:
    """The reference that iterates are compared with."""

    reference: Readable | None = None

    @property
    def peak(self) -> float:
        """Value that a PSNR relates errors to: the range of an integer type, 1 of floats."""
        if self.reference is None or self.reference.dtype.kind not in "iu":
            return 1.0
        return float(np.iinfo(str(self.reference.dtype)).max)


@dataclass
class Iterations:
    """The iterations of one solver in one folder; they are resumed from their checkpoint."""

    solver: base.Solver  # solver to iterate
    problem: base.Problem  # problem that it solves
    vectors: Vectors  # storage of its images
    grid: Grid  # blocks of a pass
    fingerprint: str  # fingerprint of the job: state and journals belong to it
    view: View  # receptive field of a step: the reads that can be prefetched
    margin: int  # largest distance, in pixels, between the ends of the operators' windows
    overlap: bool  # read and write at the same time as computing
    words: PassWords  # names of the passes
    parts: Path = Path()  # folder of the partial sums while operators that see the whole image are added up
    import_folder: str | None = None  # folder that imports of the user's own code start from
    own_view: View = field(default_factory=View)  # receptive field of operators that have a pass of their own
    by_shard: bool = False  # compute each shard separately
    target: Target = field(default_factory=Target)  # reference that iterates are compared with
    io_threads: int = 1  # threads of a worker that read and write the parts of a block in parallel

    def __post_init__(self) -> None:
        self.vectors.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = Checkpoint(self.vectors.folder / "checkpoint")
        self.factor = 1.0, False  # on the step size, and whether it was halved
        self.state, self.rows, self.aside, self.digests = self._resumed()
        if not self.rows:
            self.vectors.create()
        elif self.state.passes:
            self._check_vectors()
            self._set_aside()

    @property
    def done(self) -> int:
        """Number of iterations so far."""
        return max(0, self._iteration_of(self.state.passes))

    def _iteration_of(self, pass_number: int) -> int:
        """Return the number of the iteration that a pass ends with; 0 and below before the first iteration."""
        return self.problem.per_pass * (pass_number - self.solver.traits.passes_before)

    def is_over(self, iterations: int, tol: float = 0.0) -> bool:
        """Return True after so many iterations, or once the solver is done."""
        return self.done >= iterations or bool(self.rows and self.solver.is_done(tol, self.rows[-1]))

    def iterate(self) -> Generator[Pass | Gather, Sums, FigureRow]:
        """Yield the passes of one iteration, or of several in one pass; return its figures."""
        began = time.perf_counter()
        sums, digests = yield from self._step()
        check_finite(sums, self.state, self.solver.epoch(self.problem))
        after = self.solver.next(self.problem, self.state, sums)
        row = self._row(sums, after) | {"seconds": time.perf_counter() - began}
        if self._goes_back(row):
            return row
        if wrong := divergence([*self.rows, row], self._floor):
            raise self._diverged(wrong)
        self.state = after
        self.rows.append(row)
        self.aside = self._last_good_iteration()
        self.digests = {
            name: [digest, *self.digests.get(name, [])][: self.vectors.copies[name]] for name, digest in digests.items()
        }
        self._write_checkpoint()
        self._set_aside()
        remove_records(self.vectors.folder, str(self.state.passes - 1))
        return row

    def _goes_back(self, row: FigureRow) -> bool:
        return False

    def _diverged(self, wrong: str) -> Diverged:
        step_size = self._step_size if self.solver.traits.takes_steps else None
        return Diverged(f"{wrong}. {self._describe_kept()}. {mend(step_size)}")

    @property
    def _step_size(self) -> float:
        return self.problem.step_size * self.factor[0]

    def _write_checkpoint(self) -> None:
        self.checkpoint.write(
            {
                "fingerprint": self.fingerprint,
                "iteration": self.state.passes,
                "numbers": dict(self.state.numbers),
                "factor": self.factor,
                "rows": self.rows,
                "aside": self.aside,
                "digests": self.digests,
            }
        )

    def image(self, name: str = "x") -> Shared:
        """Return an image of the current state."""
        return Shared(self.vectors.open(name, self.state.passes))

    def _resumed(self) -> tuple[base.State, list[FigureRow], int | None, dict[str, list[str]]]:
        saved = self.checkpoint.read()
        if saved is None:
            return self.solver.init(self.problem), [], None, {}
        if saved["fingerprint"] != self.fingerprint:
            raise ResumeRefused(
                f"{self.vectors.folder} holds the state of another job. Write what it was, or run with --fresh to start over."
            )
        self.factor = saved["factor"][0], saved["factor"][1]
        state = base.State(saved["iteration"], saved["numbers"])
        return state, saved["rows"], saved.get("aside"), saved["digests"]

    def _check_vectors(self) -> None:
        """Refuse to resume from images that differ from what was written: they cannot be computed again."""
        for name, copies in self.solver.vectors.items():
            for age in range(min(copies - 1, self.state.passes)):
                path = self.vectors.path(name, self.state.passes - age)
                try:
                    if image_digest(path, self.vectors.layout, self.grid).hex() != self.digests[name][age]:
                        raise DamagedData(f"{path}: it contains a shard of another place or time")
                except DamagedData as error:
                    raise DamagedData(
                        f"{error}: without it there is no going on. Run with --fresh to start over."
                    ) from None

    def _read(self) -> Callable[[str, int], Readable]:
        """Return a function that reads the vectors of the state, each once for a block, and older copies of them."""
        opened: dict[tuple[str, int], Readable] = {}

        def read(name: str, age: int) -> Readable:
            iteration = self.state.passes - age
            if iteration <= 0:
                return self.problem.start
            if (name, age) not in opened:
                opened[name, age] = Shared(self.vectors.open(name, iteration), self.margin)
            return opened[name, age]

        return read

    def _step(self, *, judges: bool = False) -> Generator[Pass | Gather, Sums, tuple[dict[str, float], dict[str, str]]]:
        """Yield the passes of one step, or of a first one with all operators; return its sums, and the digests of its images."""
        read, solver, state, name = self._read(), self.solver, self.state, ""
        problem = replace(self.problem, step_size=self._step_size)
        if judges:
            problem, state, name = problem.once, base.State(), ".judge"
            if solver.traits.by_subsets:
                solver = replace(cast(Any, solver), subsets=1)
        stages = StagedStep(problem, self.vectors)
        step = solver.step(stages.problem, state, read)
        ahead = tuple(
            image for age in range(self.solver.vectors.get("x", 1) - 1) if isinstance(image := read("x", age), Shared)
        )
        parts: list[Mapping[str, Any]] = []
        for stage in stages.requested:
            stored = yield self._stage_pass(stage, ahead, f"{name}.{stage.number}")
            parts.append(stored.values)
        paths = [self.vectors.path(name, self.state.passes + 1) for name in self.vectors.copies]
        done = yield self._pass(self._task(step, read), self._records(name, paths))
        return merge_sums([*parts, done.values]), dict(zip(self.vectors.copies, done.digests, strict=True))

    def _stage_pass(self, stage: Stage, ahead: tuple[Shared, ...], name: str) -> Pass | Gather:
        """Return the pass that computes and stores a stage. The images ``ahead`` are read before it computes."""
        records = self._records(name, [stage.path])
        if isinstance(stage.wanted, Contributions):
            contributions = stage.wanted
            adding = Adding(
                ADJOINT, str(self.parts), contributions.image, contributions.wants, stage.writer, self.import_folder
            )
            return Gather(
                self.words.phase,
                adding,
                contributions.numbered(),
                math.prod(contributions.shape) * contributions.image.dtype.itemsize,
                self.parts,
                records,
                number=self.state.passes,
                title=self.words.title(self.state.passes),
            )
        task = ImageTask(
            grid=self.grid,
            images=((stage.writer, stage.wanted),),
            stored=ahead,
            view=self.own_view,
            overlap=self.overlap,
            io_threads=self.io_threads,
        )
        return self._pass(task, records)

    def _pass(self, task: ImageTask, records: Records) -> Pass:
        words, number = self.words, self.state.passes
        return Pass(
            words.phase,
            task,
            records,
            number=number,
            title=words.title(number),
            iteration=number if words.is_numbered else None,
        )

    def _records(self, stage: str, paths: Sequence[OutputPath]) -> Records:
        return Records(self.vectors.folder, f"{self.state.passes}{stage}", tuple(paths), self.vectors.layout)

    def _task(self, step: base.Step, read: Callable[[str, int], Readable]) -> ImageTask:
        images = {name: step.images[name] for name in self.vectors.copies}
        written = {
            id(image): Written(number, self.grid.shape, np.dtype(self.vectors.layout.dtype))
            for number, image in enumerate(images.values())
        }
        named = {name: written[id(image)] for name, image in images.items()}
        sums = [
            Sum(s.name, s.kind, written.get(id(s.left), s.left), written.get(id(s.right), s.right)) for s in step.sums
        ]
        if "x" in images:
            sums += base.usual_sums(named["x"], read("x", 0), self.target.reference, self.problem.prior)
        before = [read(name, 0) for name in images]
        return ImageTask(
            grid=self.grid,
            images=tuple((self.vectors.writer(name, self.state.passes + 1), image) for name, image in images.items()),
            sums=tuple(sums),
            stored=tuple(image for image in before if isinstance(image, Shared)),
            view=self.view,
            denoised=tuple(part for image in images.values() for part in denoised_in(image)),
            overlap=self.overlap,
            by_shard=self.by_shard,
            io_threads=self.io_threads,
        )

    def _row(self, sums: Mapping[str, float], after: base.State) -> FigureRow:
        row: FigureRow = {"iteration": self._iteration_of(after.passes)}
        if MISFIT in sums and not self.solver.traits.by_subsets:
            row[MISFIT] = max(sums[MISFIT] + self.problem.misfit_of_zero, 0.0)
        row |= {
            name: after.numbers[name]
            for name in (MISFIT, base.RESIDUAL, base.RECOMPUTED, base.SPENT, base.EPOCH)
            if name in after.numbers
        }
        if MISFIT in row and base.PRIOR in sums:
            row[OBJECTIVE] = row[MISFIT] + sums[base.PRIOR]
        if base.LENGTH in sums:
            row[base.CHANGE] = base.relative_change(sums)
        if base.ERROR in sums:
            error = max(sums[base.ERROR] / math.prod(self.grid.shape), TINY)
            row["psnr"] = 10 * math.log10(self.target.peak**2 / error)
        return row

    def _last_good_iteration(self) -> int | None:
        """Return the iteration with the last image before the objective began to grow; None without growth.

        A row has the misfit of the image that its iteration began with. So the good image is two iterations
        old when the first row grows, and the next pass would overwrite it.
        """
        if self.vectors.copies.get("x", 0) < COPIES_TO_GO_BACK or not growth(self.rows, self._floor):
            return None
        return self.aside if self.aside is not None else self.state.passes - 2

    @property
    def _floor(self) -> float:
        """Return the least misfit that can be distinguished from 0."""
        return RESOLUTION * self.problem.misfit_of_zero

    def _set_aside(self) -> None:
        """Move the files of images that the checkpoint has set aside."""
        if self.aside is None:
            self.vectors.forget_aside("x")
        elif self.aside > 0:
            self.vectors.set_aside("x", self.aside)

    def _describe_kept(self) -> str:
        """Describe which earlier image is kept, and where."""
        if self.aside:
            good = self._iteration_of(self.aside)
            return f"The image of iteration {good}, before it grew, is kept in {self.vectors.aside('x')}"
        has_one = self.done and "x" in self.vectors.copies
        where = f" in {self.vectors.path('x', self.state.passes)}" if has_one else ""
        if self.aside == 0:
            return f"The objective grew from the first iteration: the start image is better than that of iteration {self.done}{where}"
        return f"The image of iteration {self.done} is kept{where}"


OBJECTIVE = "objective"  # the misfit plus the prior, where the prior has a value
GROWS = 1.01  # an objective that grows by less than this factor in an iteration is at rest
# An objective that grows this often in a row by this factor diverges; momentum or a denoiser may make it grow once.
LEAPS, LEAP = 3, 2.0
# An objective also diverges that has grown for this many iterations, by this factor in all, and in the second half of
# them nearly as fast as in the first: an image that drifts from a perfect start towards what its denoiser favours does
# so more and more slowly.
LONG, FAR, STEADY = 6, 8.0, 0.8

FigureRow = dict[str, float]  # figures of one iteration by name


def growth(rows: Sequence[FigureRow], floor: float) -> int:
    """Return how many of the last iterations in a row the objective grew; lower values count as ``floor``.

    >>> growth([{"misfit": misfit} for misfit in (9.0, 1.0, 5.0, 40.0)], 0.0)
    2
    >>> growth([{"misfit": misfit} for misfit in (9.0, 1.0, 5.0, 5.01)], 0.0)
    0
    """
    return max(0, len(_growing_values(rows, floor)) - 1)


def objective_of(row: FigureRow) -> float:
    """Return the objective of a row: the misfit where the prior has no value."""
    return row.get(OBJECTIVE, row[MISFIT])


def divergence(rows: Sequence[FigureRow], floor: float) -> str:
    """Describe the fault of the last row, if any: a value that is not a number, or growth that does not end.

    >>> rows = [{"iteration": n, "misfit": 10.0**n} for n in range(1, 5)]
    >>> divergence(rows, 0.0)
    'iteration 4: in 3 iterations the misfit grew from 10 to 1e+04'
    >>> divergence(rows[:3], 0.0)
    ''
    >>> divergence([{"iteration": n, "misfit": 1.5**n} for n in range(9)], 0.0)
    'iteration 8: in 8 iterations the misfit grew from 1 to 25.63'
    >>> divergence([{"iteration": n, "misfit": (1 - 0.9**n) ** 2} for n in range(30)], 1e-6)
    ''
    """
    row = rows[-1]
    where = f"iteration {row['iteration']:.0f}"
    if wild := [name for name, value in row.items() if not math.isfinite(value)]:
        return f"{where}: {wild[0]} is {row[wild[0]]}"
    grown = _growing_values(rows, floor)
    if _leaps(grown):
        grown = grown[-LEAPS - 1 :]
    elif not _keeps_growing(grown):
        return ""
    quantity = OBJECTIVE if OBJECTIVE in row else MISFIT
    first = [row for row in rows if MISFIT in row][-len(grown)]
    iterations = f"{row['iteration'] - first['iteration']:.0f} iterations"
    return f"{where}: in {iterations} the {quantity} grew from {grown[0]:.4g} to {grown[-1]:.4g}"


def _growing_values(rows: Sequence[FigureRow], floor: float) -> list[float]:
    """Return the objective from where it began to grow to the last row; only the last where it does not."""
    values = [max(objective_of(row), floor) for row in rows if MISFIT in row]
    first = len(values) - 1
    while first > 0 and values[first] > GROWS * values[first - 1]:
        first -= 1
    return values[first:]


def _leaps(grown: Sequence[float]) -> bool:
    last = grown[-LEAPS - 1 :]
    return len(last) > LEAPS and all(after > LEAP * before for before, after in itertools.pairwise(last))


def _keeps_growing(grown: Sequence[float]) -> bool:
    if len(grown) <= LONG or grown[-1] < FAR * grown[0]:
        return False
    middle = grown[len(grown) // 2]
    return math.log(grown[-1] / middle) >= STEADY * math.log(middle / max(grown[0], 1e-300))


def mend(step_size: float | None) -> str:
    """Return the advice to shorten the step size; without one, to look at the input."""
    if step_size is None:
        return "Look at the data, and at what operators read, such as masks."
    return f"Write a smaller solver.step than {step_size:.3g}, or step: auto if the job sets a number. With a fidelity of counts, also check that start is above 0."
