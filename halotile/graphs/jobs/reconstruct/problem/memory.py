"""Memory of one worker for a reconstruction: the model by which plans are refused."""

from __future__ import annotations

import math

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
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.devices.streams import BUFFERS
from halotile.tasks.operators.base import Operator, Shape
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
