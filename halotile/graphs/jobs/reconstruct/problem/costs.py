"""Costs of a reconstruction: memory of one worker, the model by which plans are refused, and bytes that an iteration reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from halotile.graphs.jobs.reconstruct.problem.forms import Form
from halotile.graphs.plans.resources.memory import (
    IMPORTS_BYTES,
    MIB,
    MODEL,
    PROCESS,
    TILES,
    Footprint,
    gpu_bytes,
    pinned,
)
from halotile.graphs.solvers.base import Solver, images_read
from halotile.storage.grid import Grid
from halotile.storage.sharded.output import Layout
from halotile.tasks.devices.gpu import BUFFERS
from halotile.tasks.image_task import Denoised, View
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.options import Auto
from halotile.tasks.priors.base import Prior, denoised_of
from halotile.tasks.terms import Term

IMAGES_OF_A_GRADIENT = 9
"""Windows that a gradient holds at once: the operator's input, the measurement, their difference, and scratch."""
IMAGES_OF_A_STEP = 5
"""Further windows that a step holds: its image, the gradient step, the prior's input and output."""
TRANSFORMS_BYTES = 96 * MIB
"""Transforms of kernels, and of cells of an image with the cells, where convolutions use Fourier transforms."""
COPIES = 3
"""Images and measurements at once that an operator is assumed to need where it does not declare this."""


IMAGES, OPERATORS = "the solver's images", "the operators"


def footprint_of_step(
    grid: Grid,  # blocks
    form: Form,  # method that computes the gradient
    prior: Prior,  # prior that acts on the gradient step
    solver: Solver,  # solver whose vectors are read and written
    layout: Layout,  # layout of the vectors
    *,
    overlap: bool,  # the next read and the last write run during the computation
    io_threads: int = 1,  # threads that read and write in parallel, each with a part of its own
    # resident memory of a process that has opened a GPU, where a trial measured it
    measured: int | None = None,
) -> Footprint:
    """Return the footprint of one block of an iteration."""
    size, copies = np.dtype(layout.dtype).itemsize, 2 if overlap else 1
    before = (form.per_pass - 1) * (prior.reach() + form.reach)
    step = size * _window(grid, before + prior.reach())
    window = size * _window(grid, before + prior.reach() + form.reach)
    read = images_read(solver)
    core, shard = size * math.prod(grid.block), size * math.prod(layout.shard)
    denoised = denoised_of(prior)
    model, tiles = _denoiser(denoised)
    on_gpu = denoised is not None and denoised.device != "cpu"
    return {
        PROCESS: IMPORTS_BYTES + (gpu_bytes(measured) if on_gpu else 0),
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


MOST_COMPUTED_TWICE = 0.5
"""Pixels of the gradient that may be computed twice, per pixel of the image, before it gets a pass of its own."""


def comes_apart(requested: bool | Auto, form: Form, prior: Prior, grid: Grid, solver: Solver) -> bool:
    """Return True where operators have a pass of their own, before that of the prior.

    In one pass the gradient is computed on each block with the prior's halo; in two it is written and read
    once more. One pass is used as long as it computes little twice.

    ``requested``: fuse them: True, False or `auto`; ``form, prior, grid, solver``: computation, and its blocks.
    """
    if (
        not prior.reach()
        or solver.traits.prior_by == "slope"
        or not form.near
        or form.whole
        or form.per_pass > 1
    ):
        return False
    if requested != "auto":
        return not requested
    return computed_twice(grid, grid.block, form, prior) > MOST_COMPUTED_TWICE


def computed_twice(grid: Grid, shard: tuple[int, ...], form: Form, prior: Prior) -> float:
    """Return the gradient pixels that one pass computes more than once, per image pixel and iteration.

    Each block is computed at once, or each ``shard`` where shards are computed separately.

    Examples
    --------
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


def traffic_of(grid: Grid, form: Form, prior: Prior, solver: Solver, dtype: np.dtype[np.generic]) -> Traffic:
    """Return the bytes that an iteration of a solver moves, as a sum over its blocks.

    ``grid``: blocks; ``form``: method that computes the gradient; ``prior``: prior that acts on the gradient step; ``solver``: solver whose vectors
    are read and written; ``dtype``: type in which the vectors are stored.
    """
    size, wide = dtype.itemsize, prior.reach()
    read = images_read(solver)
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
                grid,
                View(
                    halo + (form.per_pass - 1) * (halo + form.reach), term.operator.reach, cells=form.is_fft
                ),
            )
            * math.prod(term.measurement.shape)
            / pixels
        )
        for term in form.near
    )


def pixels_read(grid: Grid, view: View) -> int:
    """Return the pixels that blocks read with a halo of this width on the last two axes, inside the image.

    Examples
    --------
    >>> pixels_read(Grid((8, 8), (4, 8), ((0, 0), (0, 0))), View(1))
    80
    """
    lengths = list(grid.shape)
    for axis in (-2, -1):
        length, block = grid.shape[axis], grid.block[axis]
        spans = (view.span(core, min(length, core + block), length) for core in range(0, length, block))
        lengths[axis] = sum(stop - start for start, stop in spans)
    return math.prod(lengths)
