"""Memory of one worker for a reconstruction: the model by which plans are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from halotile.graphs.amounts import bytes_text
from halotile.graphs.jobs.reconstruct.problem.forms import Form
from halotile.graphs.plans.resources.memory import IMPORTS_BYTES, MIB, gpu_bytes, pinned
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


@dataclass(frozen=True, slots=True)
class StepFootprint:
    """Bytes that one worker holds at once, by purpose."""

    imports_bytes: int
    model_bytes: int
    vectors_bytes: int
    operators_bytes: int
    tiles_bytes: int

    @property
    def total_bytes(self) -> int:
        """The projected peak."""
        return sum(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        """Describe the largest parts, largest first."""
        parts = {
            "the program itself": self.imports_bytes,
            "the denoiser's model": self.model_bytes,
            "the denoiser's tiles": self.tiles_bytes,
            "the solver's images": self.vectors_bytes,
            "the operators": self.operators_bytes,
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{bytes_text(count)} are {purpose}" for purpose, count in largest)


def footprint_of_step(
    grid: Grid,
    form: Form,
    prior: Prior,
    solver: Solver,
    layout: Layout,
    *,
    overlap: bool,
    io_threads: int = 1,
    measured: int | None = None,
) -> StepFootprint:
    """Return the footprint of one block of an iteration.

    Parameters
    ----------
    grid : Grid
        The blocks.
    form : Form
        Method that computes the gradient.
    prior : Prior
        The prior that acts on the gradient step.
    solver : Solver
        The solver whose vectors are read and written.
    layout : Layout
        Layout of the vectors.
    overlap : bool
        The next read and the last write run at the same time as the computation.
    io_threads : int
        Threads that read and write in parallel, each with a part of its own.
    measured : int, optional
        Resident memory of a process that has opened a GPU, where a trial measured it.
    """
    size, copies = np.dtype(layout.dtype).itemsize, 2 if overlap else 1
    before = (form.per_pass - 1) * (prior.reach() + form.reach)
    step = size * _window(grid, before + prior.reach())
    window = size * _window(grid, before + prior.reach() + form.reach)
    read = images_read(solver)
    core, shard = size * math.prod(grid.block), size * math.prod(layout.shard)
    denoised = denoised_of(prior)
    model, tiles = _denoiser(denoised)
    on_gpu = denoised is not None and denoised.device != "cpu"
    return StepFootprint(
        imports_bytes=IMPORTS_BYTES + (gpu_bytes(measured) if on_gpu else 0),
        model_bytes=model,
        vectors_bytes=copies * (read * window + len(solver.vectors) * core)
        + 2 * io_threads * shard
        + (IMAGES_OF_A_STEP + form.per_pass - 1) * step,
        operators_bytes=IMAGES_OF_A_GRADIENT * window + (TRANSFORMS_BYTES if form.is_fft else 0),
        # On a GPU the tiles are there, and the pixels pass through pinned memory on their way: two parts each way.
        tiles_bytes=2 * BUFFERS * pinned(step) if on_gpu else tiles,
    )


def footprint_of_operator(
    term: Term, image: Shape, dtype: np.dtype[np.generic], step: StepFootprint, *, on_gpu: bool
) -> StepFootprint:
    """Return the footprint of an operator that sees the whole image, plus the model that ``step`` keeps."""
    size = dtype.itemsize
    measured = math.prod(term.measurement.shape) * max(size, term.measurement.dtype.itemsize)
    return StepFootprint(
        imports_bytes=step.imports_bytes,
        model_bytes=step.model_bytes,
        vectors_bytes=3 * size * math.prod(image),  # the image, what this one adds, and the sum so far
        operators_bytes=bytes_of_operator(term.operator, image, size, measured) + 2 * measured,
        # The tiles on a CPU have been freed by then; pinned memory stays.
        tiles_bytes=step.tiles_bytes if on_gpu else 0,
    )


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
