"""Small problems for solvers, swept in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.graphs.jobs.reconstruct.inversion import NORM_ITERATIONS
from halotile.graphs.kinds.base import Gather
from halotile.graphs.plans.plan import Plan
from halotile.graphs.solvers.base import CHANGE, LENGTH, Problem, Solver, State
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent, largest_eigenvalue
from halotile.registry import find
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable, Rim
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.storage.sharded.output import Layout, Vectors
from halotile.storage.views import Constant
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.image_task import Denoised, Shared, View
from halotile.tasks.inner_tiles import Roles, Tiling
from halotile.tasks.operators.base import InMemory, Operator, OperatorKind, Shape, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.priors.base import Prior
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.priors.pnp import Plugged
from halotile.tasks.priors.tv import Variation
from halotile.tasks.terms import MISFIT, Gradient, NormalImage, Sensitivity, Term
from tests.graphs.inline import WORDS, InlineIterations, inline
from tests.support import dncnn_weights, work_of

Pixels = NDArray[Any]


def solver_of(name: str, **options: Any) -> Any:
    """A solver by its name."""
    return find("solvers", name).SOLVER(**options)


def kernel(edge: int) -> Pixels:
    """A gaussian."""
    line = np.exp(-((np.arange(edge) - edge // 2) ** 2) / (0.08 * edge**2 + 0.1))
    square = np.outer(line, line)
    normed: Pixels = (square / square.sum()).astype("float32")
    return normed


def blurs(boundary: str, edges: tuple[int, ...] = (3, 5, 9)) -> tuple[Operator, ...]:
    """Blurs of several widths."""
    return tuple(Blur(kernel=kernel(edge), boundary=boundary) for edge in edges)


def terms_of(image: Pixels, operators: tuple[Operator, ...], noise: float = 0.01) -> tuple[Term, ...]:
    """What the operators measure of an image, with noise."""
    rng = np.random.default_rng(8)

    def measured(operator: Operator) -> InMemory:
        pixels = read_all(operator.forward(InMemory(image)))
        return InMemory(pixels + (noise * rng.standard_normal(pixels.shape)).astype(image.dtype))

    return tuple(Term(operator, measured(operator), 1.0 / (number + 1)) for number, operator in enumerate(operators))


def scene(shape: tuple[int, int] = (150, 133)) -> Pixels:
    """An image of waves and a little noise."""
    rng = np.random.default_rng(1)
    y, x = np.mgrid[: shape[0], : shape[1]]
    pixels: Pixels = (np.sin(y / 9) * np.cos(x / 7) / 3 + 0.5 + 0.05 * rng.random(shape)).astype("float32")
    return pixels


def prior_of(
    name: str, image: Pixels, block: int = 64, tile: int = 40, folder: Path = Path(), weight: float = 0.3
) -> Prior:
    """A prior by its name, whose denoiser works on tiles of blocks."""
    if name in ("none", "l1"):
        return NoPrior() if name == "none" else Sparse(weight=0.02)
    if name == "tv":
        denoised = denoised_by(TotalVariation(strength=1.0, iterations=6), image, block, tile)
        return Variation(denoised=denoised, weight=0.05)
    denoiser: Denoiser = Gaussian(sigma=0.7)
    if name == "dncnn":
        denoiser = DnCNN(depth=5, width=8, weights=str(dncnn_weights(folder / "w.safetensors")))
    return Plugged(denoiser=denoiser, denoised=denoised_by(denoiser, image, block, tile), weight=weight)


def denoised_by(denoiser: Denoiser, image: Pixels, block: int, tile: int) -> Denoised:
    """A denoiser of images such as this one, in tiles."""
    reach = denoiser.receptive_field()
    assert reach is not None
    depth = ((reach, reach),) * 2
    least = tuple(min(144, n) for n in image.shape) if denoiser.convolutional else (1, 1)
    tiling = Tiling((tile, tile), depth, (1, 1), least, image.shape, 1, 1, None, "float32")
    grid = Grid(image.shape, (block, block), depth, (1, 1), least)
    return Denoised(
        InMemory(image),
        denoiser,
        tiling,
        Roles(("y", "x"), (0, 1), None),
        grid,
        Rim.everywhere(denoiser.boundary, 2),
        channels_last=denoiser.convolutional,
    )


def problem_of(image: Pixels, terms: tuple[Term, ...], prior: Prior | None = None, step: float = 1.0) -> Problem:
    """What a solver asks for, of a stack."""
    return Problem(
        shape=image.shape,
        dtype=image.dtype,
        gradient=lambda x: Gradient(x, terms),
        normal=lambda x: NormalImage(x, terms),
        prior=prior or NoPrior(),
        start=Constant(image.shape, image.dtype),
        step_size=step,
        reach=2 * max(term.operator.reach for term in terms),
        operators=len(terms),
        sensitivity=lambda x: Sensitivity(x, terms),
        parts=lambda numbers: problem_of(image, tuple(terms[n] for n in numbers), prior, step),
    )


@dataclass
class Interrupted(Exception):
    """A pass was cut short."""


def iterations_of(
    solver: Solver, problem: Problem, folder: Path, *, block: int = 64, halo: int = 40, **options: Any
) -> InlineIterations:
    """A solver on disk, in blocks of this size and files of ``shard``² pixels."""
    shape, shard = problem.shape, (options.pop("shard", 32),) * 2
    layout = Layout(shape, str(problem.dtype), shard, (16, 16), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
    return InlineIterations(
        solver,
        problem,
        Vectors(folder, layout, {**solver.vectors, **options.pop("copies", {})}),
        Grid(shape, tuple(min(block, n) for n in shape), ((0, 0), (0, 0))),
        "a job",
        view=View(halo),
        margin=16,
        overlap=False,
        words=WORDS,
        run_pass=options.pop("run_pass", inline),
        **options,
    )


def finished(run: InlineIterations, iterations: int) -> InlineIterations:
    """The same run after so many iterations."""
    list(run.run(iterations, lambda *_: False))
    assert run.done == iterations
    return run


def figures_of(run: InlineIterations) -> list[dict[str, float]]:
    """What the iterations came to, but for the time they took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.rows]


def norm_of(problem: Problem, folder: Path) -> float:
    """``|A|²`` as a run finds it."""
    run = iterations_of(Lanczos(), begun(problem), folder, block=128, shard=128)
    list(run.run(NORM_ITERATIONS, lambda state, _: is_spent(state)))
    return largest_eigenvalue(run.state)


def in_memory(solver: Solver, problem: Problem, iterations: int) -> tuple[Pixels, list[Mapping[str, float]]]:
    """The same iterations on whole images in memory: the truth that passes must meet, bit by bit."""
    state, told = State(), list[Mapping[str, float]]()
    images: list[dict[str, Readable]] = [{}]

    def read(name: str, age: int) -> Readable:
        k = len(images) - 1 - age
        return images[k][name] if k > 0 else problem.start

    for _ in range(iterations):
        step = solver.step(problem, state, read)
        made: dict[str, Readable] = {name: InMemory(read_all(image)) for name, image in step.images.items()}
        by_image = {id(step.images[name]): image for name, image in made.items()}
        sums = {MISFIT: 0.0}
        if "x" in made:
            after, before = (read_all(each).astype(float) for each in (made["x"], read("x", 0)))
            sums |= {CHANGE: float(np.sum((after - before) ** 2)), LENGTH: float(np.sum(after**2))}
        for wanted in step.sums:
            a, b = (read_all(by_image.get(id(part), part)).astype(float) for part in (wanted.left, wanted.right))
            sums[wanted.name] = float(np.sum(a * b))
        told.append(sums)
        state = solver.next(problem, state, sums)
        images.append(made)
    return read_all(images[-1]["x"]), told


def iterations_of_plan(plan: Plan, run_pass: Callable[..., None]) -> InlineIterations:
    """The solver of a plan, begun; what was measured, backprojected, is taken to be 1 everywhere."""
    work = work_of(plan)
    back = Shared(Constant(plan.grid.shape, np.dtype("float32"), 1.0)) if work.form.folded else None
    return InlineIterations(
        work.solver,
        work.problem(0.1, back),
        work.vectors(work.solver, "iterate"),
        plan.grid,
        "a job",
        view=work.form.view(work.prior.reach()),
        margin=work.form.fused_reach,
        own_view=work.form.own_view(),
        overlap=False,
        words=WORDS,
        run_pass=run_pass,
        by_shard=work.form.by_shard,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBlur:
    """A blur that says it has to see the whole image."""

    name: ClassVar[str] = "whole blur"
    kind: ClassVar[OperatorKind] = "whole"
    reach: ClassVar[int] = 0

    blur: Blur

    def measured(self, image: Shape) -> Shape:
        return self.blur.measured(image)

    def forward(self, image: Readable) -> Readable:
        return self.blur.forward(InMemory(read_all(image)))

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        return self.blur.adjoint(InMemory(read_all(measurement)), image)


def gathered(folder: Path) -> Any:
    """Contributions added up in this process."""

    def gather(wanted: Gather, iteration: int, journal: Journal, ledger: Ledger) -> None:
        assert wanted.folder == folder
        folder.mkdir(exist_ok=True)
        parts = [wanted.work.compute([each]) for each in wanted.terms]
        part = wanted.work.keep(wanted.work.add(parts))
        assert not list(folder.iterdir())
        ledger.enter({0: {name: [sum(values.values())] for name, values in part.sums.items()}})
        journal.mark({0: part.digest})

    return gather
