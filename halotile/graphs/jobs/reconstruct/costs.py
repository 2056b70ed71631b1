"""Costs of a reconstruction: memory of one worker, the model by which plans are refused, and bytes that an iteration reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.kinds.base import Footprint
from halotile.graphs.plans.needs import IMPORTS_BYTES, MIB, MODEL, PROCESS, TILES, gpu_bytes, pinned
from halotile.graphs.solvers import base
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.sharded.layout import Layout
from halotile.tasks.devices.gpu import BUFFERS
from halotile.tasks.image_task import Denoised, View
from halotile.tasks.operators.base import Operator, Shape, engines_of, with_engine
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total
from halotile.tasks.options import Auto
from halotile.tasks.priors.base import Prior, denoised_of
from halotile.tasks.terms import MISFIT, Contributions, FoldedGradient, Gradient, NormalImage, Sensitivity, Term, Wants

# Windows that a gradient holds at once: the operator's input, the measurement, their difference, and scratch.
IMAGES_OF_A_GRADIENT = 9
IMAGES_OF_A_STEP = 5  # further windows that a step holds: its image, the gradient step, the prior's input and output
# Transforms of kernels, and of cells of an image with the cells, where convolutions use Fourier transforms.
TRANSFORMS_BYTES = 96 * MIB
COPIES = 3  # images and measurements at once that an operator is assumed to need where it does not declare this


IMAGES, OPERATORS = "the solver's images", "the operators"


def footprint_of_step(
    grid: Grid,
    form: Form,
    prior: Prior,
    solver: base.Solver,
    layout: Layout,
    *,
    copies: int,
    io_threads: int,
    host_bytes: int | None,
) -> Footprint:
    """Return the memory of one worker during a block of a pass.

    ``layout``: of the solver's images; ``copies``: blocks in memory at once; ``host_bytes``: of a GPU's libraries, if measured.
    """
    size = np.dtype(layout.dtype).itemsize
    before = (form.per_pass - 1) * (prior.reach() + form.reach)
    step = size * _window(grid, before + prior.reach())
    window = size * _window(grid, before + prior.reach() + form.reach)
    read = base.images_read(solver)
    core, shard = size * math.prod(grid.block), size * math.prod(layout.shard)
    denoised = denoised_of(prior)
    model, tiles = _denoiser(denoised)
    on_gpu = denoised is not None and denoised.device != "cpu"
    return {
        PROCESS: IMPORTS_BYTES + (gpu_bytes(host_bytes) if on_gpu else 0),
        MODEL: model,
        IMAGES: copies * (read * window + len(solver.vectors) * core)
        + 2 * io_threads * shard
        + (IMAGES_OF_A_STEP + form.per_pass - 1) * step,
        OPERATORS: IMAGES_OF_A_GRADIENT * window + (TRANSFORMS_BYTES if form.is_fft else 0),
        # On a GPU the tiles are there, and the pixels pass through pinned memory on their way: two parts each way.
        TILES: 2 * BUFFERS * pinned(step) if on_gpu else tiles,
    }


def footprint_of_operator(
    term: Term, image: Shape, dtype: np.dtype[np.generic], step: Footprint, *, on_gpu: bool
) -> Footprint:
    """Return the footprint of an operator that sees the whole image, plus the model that ``step`` keeps."""
    size = dtype.itemsize
    measured = math.prod(term.measurement.shape) * max(size, term.measurement.dtype.itemsize)
    return {
        **step,
        IMAGES: 3 * size * math.prod(image),  # the image, what this one adds, and the sum so far
        OPERATORS: bytes_of_operator(term.operator, image, size, measured) + 2 * measured,
        # The tiles on a CPU have been freed by then; pinned memory stays.
        TILES: step[TILES] if on_gpu else 0,
    }


def bytes_of_operator(operator: Operator, image: Shape, size: int, measured: int) -> int:
    """Return the bytes that an operator which sees the whole image holds, for pixels of ``size`` bytes."""
    declared = getattr(operator, "memory_bytes", None)
    return declared(image) if declared else COPIES * (size * math.prod(image) + measured)


def _window(grid: Grid, halo: int) -> int:
    """Return the pixels of a block with its halo, inside the image."""
    edges = (min(n, b + 2 * halo) for n, b in zip(grid.shape[-2:], grid.block[-2:], strict=True))
    return math.prod(edges) * math.prod(grid.block[:-2])


def _denoiser(denoised: Denoised | None) -> tuple[int, int]:
    """Return the bytes of a prior's model, and of the tiles that it computes at once."""
    if denoised is None:
        return 0, 0
    denoiser, tiling = denoised.denoiser, denoised.tiling
    depth = (max(pair) for pair in tiling.depth)
    window = math.prod(n + 2 * d for n, d in zip(tiling.tile, depth, strict=True))
    weights = 2 * sum(path.stat().st_size for path in denoiser.files())
    return weights, int(window * tiling.batch * (denoiser.bytes_per_pixel() + 8))


# Pixels of the gradient that may be computed twice, per pixel of the image, before it gets a pass of its own.
MOST_COMPUTED_TWICE = 0.5


def comes_apart(requested: bool | Auto, form: Form, prior: Prior, grid: Grid, solver: base.Solver) -> bool:
    """Return True where operators have a pass of their own, before that of the prior.

    In one pass the gradient is computed on each block with the prior's halo; in two it is written and read
    once more. One pass is used as long as it computes little twice.

    ``requested``: fuse them: True, False or `auto`; ``form, prior, grid, solver``: computation, and its blocks.
    """
    if not prior.reach() or solver.traits.prior_by == "slope" or not form.near or form.whole or form.per_pass > 1:
        return False
    if requested != "auto":
        return not requested
    return computed_twice(grid, grid.block, form, prior) > MOST_COMPUTED_TWICE


def computed_twice(grid: Grid, shard: tuple[int, ...], form: Form, prior: Prior) -> float:
    """Return the gradient pixels that one pass computes more than once, per image pixel and iteration.

    Each block is computed at once, or each ``shard`` where shards are computed separately.

    >>> from halotile.tasks.priors.none import NoPrior
    >>> computed_twice(Grid((8, 8), (4, 4), ((0, 0), (0, 0))), (2, 2), Form(()), NoPrior())
    0.0
    """
    if form.by_shard:
        grid = replace(grid, block=tuple(map(min, shard, grid.shape)))
    halo = prior.reach()
    around = [halo + later * (halo + form.reach) for later in range(form.per_pass)]
    computed = sum(pixels_read(grid, View(wide)) for wide in around)
    return computed / (form.per_pass * math.prod(grid.shape)) - 1


@dataclass(frozen=True)
class Traffic:
    """Bytes of one iteration, read and written, without compression."""

    fused: int  # with operators and prior in one pass
    # with the gradient written and read again by the prior; None where the prior reads no other pixel, or an operator
    # sees the whole image
    unfused: int | None


def traffic_of(grid: Grid, form: Form, prior: Prior, solver: base.Solver, dtype: np.dtype[np.generic]) -> Traffic:
    """Return the bytes that an iteration of a solver moves, as a sum over its blocks.

    ``grid``: blocks; ``form``: method that computes the gradient; ``prior``: prior that acts on the gradient step; ``solver``: solver whose vectors
    are read and written; ``dtype``: type in which the vectors are stored.
    """
    size, wide = dtype.itemsize, prior.reach()
    read = base.images_read(solver)
    image = size * math.prod(grid.shape)
    written = len(solver.vectors) * image
    gathered = _gathered(form, image)

    def moved(halo: int) -> int:
        acted_on = 0 if solver.traits.prior_by == "slope" else halo
        return read * size * pixels_read(grid, form.own_view(halo)) + (
            0 if not solver.traits.reads_measurements else _measured(grid, form, size, acted_on)
        )

    fused = (moved(wide) + written + gathered) // form.per_pass
    if form.per_pass > 1:
        return Traffic(fused, traffic_of(grid, form.once, prior, solver, dtype).unfused)
    if not wide or gathered:
        return Traffic(fused, None)
    # The prior's pass reads the gradient and the images, each with its halo.
    return Traffic(fused, moved(0) + image + (1 + read) * size * pixels_read(grid, View(wide)) + written)


def _gathered(form: Form, image: int) -> int:
    """Return the bytes moved by operators that see the whole image: each reads it, and its sum goes up a tree."""
    measured = sum(term.measurement.dtype.itemsize * math.prod(term.measurement.shape) for term in form.whole)
    return measured + (3 * image * len(form.whole) + 2 * image if form.whole else 0)


def _measured(grid: Grid, form: Form, size: int, halo: int) -> int:
    """Return the bytes read of the measurements, or of the images that they were folded into."""
    if form.folded is not None:
        return size * pixels_read(grid, View(halo + (form.per_pass - 1) * (halo + form.reach)))
    pixels = math.prod(grid.shape)
    return sum(
        round(
            term.measurement.dtype.itemsize
            * pixels_read(
                grid, View(halo + (form.per_pass - 1) * (halo + form.reach), term.operator.reach, cells=form.is_fft)
            )
            * math.prod(term.measurement.shape)
            / pixels
        )
        for term in form.near
    )


def pixels_read(grid: Grid, view: View) -> int:
    """Return the pixels that blocks read with a halo of this width on the last two axes, inside the image.

    >>> pixels_read(Grid((8, 8), (4, 8), ((0, 0), (0, 0))), View(1))
    80
    """
    lengths = list(grid.shape)
    for axis in (-2, -1):
        length, block = grid.shape[axis], grid.block[axis]
        spans = (view.span(core, min(length, core + block), length) for core in range(0, length, block))
        lengths[axis] = sum(stop - start for start, stop in spans)
    return math.prod(lengths)


REACH_OF_CELLS = 64  # additional reach, in pixels, of a convolution by Fourier transforms: its cells are fixed


@dataclass(frozen=True)
class Form:
    """Method that computes the gradient of a stack."""

    terms: tuple[Term, ...]
    # All operators in one kernel, where they fold and the job does not ask for the plain form.
    folded: Normal | None = None
    apart: bool = False  # operators have a pass of their own, before that of the prior
    per_pass: int = 1  # iterations of one pass
    chosen: tuple[int, ...] | None = None  # numbers of the operators that take part; None for all

    def subset(self, numbers: Sequence[int]) -> Form:
        """Return the same form of some of the operators."""
        return replace(self, chosen=tuple(numbers))

    @property
    def _taking_part(self) -> tuple[Term, ...]:
        return self.terms if self.chosen is None else tuple(self.terms[number] for number in self.chosen)

    @property
    def once(self) -> Form:
        """The same form for passes of one iteration."""
        return replace(self, per_pass=1)

    @property
    def near(self) -> tuple[Term, ...]:
        """The terms whose operators see a neighbourhood or a window."""
        return tuple(term for term in self._taking_part if term.operator.kind != "whole")

    @property
    def whole(self) -> tuple[Term, ...]:
        """The terms whose operators see all of the image: each is a task of its own."""
        return tuple(term for term in self._taking_part if term.operator.kind == "whole")

    @property
    def reach(self) -> int:
        """Receptive field, forward and adjoint together, of the operators that see a neighbourhood, in pixels."""
        far = 2 * max((term.operator.reach for term in self.near), default=0)
        return far + (REACH_OF_CELLS if self.in_still_cells else 0)

    @property
    def fused_reach(self) -> int:
        """The same for the operators that are computed in the pass of the prior."""
        return 0 if self.apart else self.reach

    def view(self, halo: int) -> View:
        """Return the view of a pass in which the gradient is read with a halo."""
        return View(halo) if self.apart or not self.near else self.own_view(halo)

    def own_view(self, halo: int = 0) -> View:
        """Return the view of the operators that see a neighbourhood, with the halo of the prior."""
        cells, repeats = self.in_still_cells, self.per_pass
        if self.folded is not None:
            return View(halo, self.folded.reach, 1, cells, repeats)
        return View(halo, max((term.operator.reach for term in self.near), default=0), 2, cells, repeats)

    @property
    def is_fft(self) -> bool:
        """True where convolutions are computed by Fourier transforms."""
        return "fft" in self._engines

    @property
    def in_still_cells(self) -> bool:
        """True where they are computed in fixed cells, hence on more than the requested region."""
        return self.is_fft and (self.folded is None or self.folded.still)

    @property
    def by_shard(self) -> bool:
        """True where bits depend on the requested region, so that it always has to be the same region."""
        return self.is_fft and not self.in_still_cells

    @property
    def _engines(self) -> set[str]:
        """The convolution engines; empty where there are no convolutions."""
        if self.folded is not None:
            return {self.folded.engine}
        return {engine for term in self.near for engine in engines_of(term.operator)}

    def describe(self) -> str:
        """Describe the form, for the plan."""
        if self.folded is None:
            engines = "; Fourier transforms where kernels are large" if self.is_fft else "; direct convolutions"
            count = len(self.terms)
            engine_text = engines if self._engines else ""
            return f"plain, {count} operator{'s' if count > 1 else ''} there and back{engine_text}"
        rows, columns = self.folded.kernel.shape[-2:]
        engine = "Fourier transforms" if self.is_fft else "direct convolution"
        return f"normal, all operators in one kernel of {rows} × {columns}; {engine}"

    def gradient(self, image: Readable, backprojection: Readable | None, *, records_misfit: bool = True) -> Readable:
        """Return ``∇f`` without the operators that see the whole image; its misfit is recorded if ``records_misfit``."""
        if self.folded is None:
            return Gradient(image, self.near, records_misfit)
        assert backprojection is not None
        return FoldedGradient(image, self.folded, backprojection, records_misfit)

    def normal(self, image: Readable) -> Readable:
        """Return ``sum_i w_i A_i^T A_i x`` without the operators that see the whole image."""
        return NormalImage(image, self.near) if self.folded is None else self.folded(image)

    def map(self, wants: Wants, backprojection: Readable | None = None, *, records_misfit: bool = True) -> base.Map:
        """Return gradient, normal image or sensitivity of the operators as a map; parts outside the pass are staged."""

        def near(image: Readable) -> Readable:
            if wants == "gradient":
                return self.gradient(image, backprojection, records_misfit=records_misfit)
            return self.normal(image) if wants == "normal" else Sensitivity(image, self.near)

        def whole(image: Readable) -> Contributions:
            return Contributions(image, self.terms, wants, self.chosen)

        if self.apart:
            return base.Staged(None, near)
        return base.Staged(near if self.near else None, whole) if self.whole else near


def choose_form(
    terms: tuple[Term, ...], dtype: np.dtype[Any], *, exact: bool, per_pass: int = 1, by_subsets: bool = False
) -> Form:
    """Choose the plain form where it is asked for, for subsets, or where an operator does not fold; the normal form otherwise.

    In a pass of several iterations, fixed cells would make each of them read whole cells around its region.
    So the cells are laid over the region that is read; and where operators do not fold, convolutions are
    direct.
    """
    folds = all(can_fold(term.operator) and term.fidelity.is_square for term in terms) and not (exact or by_subsets)
    direct = exact or (per_pass > 1 and not folds)
    decided = tuple(replace(term, operator=with_engine(term.operator, dtype, direct)) for term in terms)
    if not folds:
        return Form(decided, per_pass=per_pass)
    blurs = tuple(term.operator for term in decided if can_fold(term.operator))
    weights = tuple(term.weight for term in decided)
    folded = Normal(operators=blurs, weights=weights, still=per_pass == 1)
    return Form(decided, folded.with_engine(dtype, exact), per_pass=per_pass)


@dataclass(frozen=True)
class Backprojection(base.SolverBase):
    """``b = sum_i w_i A_i^T y_i``, in one pass; with it, the misfit of the zero image."""

    name: ClassVar[str] = "adjoint"
    vectors: ClassVar[Mapping[str, int]] = {"b": 2}

    def step(self, problem: base.Problem, state: base.State, read: base.ReadVector) -> base.Step:
        """Return minus the gradient at 0."""
        return base.Step({"b": Total((problem.gradient(problem.start),), (-1.0,))})

    def next(self, problem: base.Problem, state: base.State, sums: Mapping[str, float]) -> base.State:
        """Return the final state, with the misfit."""
        return base.advanced(state, **{MISFIT: sums[MISFIT]})


def check_per_pass(form: Form) -> None:
    """Refuse several iterations in a pass where operators need the image between them."""
    if form.per_pass > 1 and form.whole:
        number = next(n for n, term in enumerate(form.terms) if term is form.whole[0])
        raise ConfigError(
            f"solver.checkpoint_every is {form.per_pass}, and operators[{number}] ({form.whole[0].operator.name}) sees the "
            "whole image, which there is only where every iteration is stored. Write checkpoint_every: 1."
        )
