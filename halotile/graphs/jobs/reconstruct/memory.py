"""How much memory one worker needs for a reconstruction: the model that plans are refused by."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from halotile.graphs.amounts import bytes_text
from halotile.graphs.jobs.reconstruct.forms import Form
from halotile.graphs.jobs.reconstruct.prior import denoised_of
from halotile.graphs.plans.memory import IMPORTS_BYTES, MIB, gpu_bytes, pinned
from halotile.graphs.solvers.base import Solver, images_read
from halotile.storage.grid import Grid
from halotile.storage.sharded.output import Layout
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.devices.streams import BUFFERS
from halotile.tasks.fidelity import Term
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.priors import Prior

IMAGES_OF_A_GRADIENT = 9
"""Windows that a gradient holds at once: what an operator sees, what was measured, their difference, and scratch."""
IMAGES_OF_A_STEP = 5
"""Windows that a step holds besides: its image, the gradient step, what the prior reads and makes."""
TRANSFORMS_BYTES = 96 * MIB
"""Transforms of kernels, and cells of an image with theirs, where convolutions go by Fourier transforms."""
COPIES = 3
"""Images and measurements at once that an operator is taken to need where it does not say."""


@dataclass(frozen=True, slots=True)
class StepFootprint:
    """Bytes that one worker holds at once, by what they are for."""

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
        """What takes most, largest first."""
        parts = {
            "the program itself": self.imports_bytes,
            "the denoiser's model": self.model_bytes,
            "the denoiser's tiles": self.tiles_bytes,
            "the solver's images": self.vectors_bytes,
            "the operators": self.operators_bytes,
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{bytes_text(count)} are {what}" for what, count in largest)


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
    """The footprint of one block of an iteration.

    Parameters
    ----------
    grid : Grid
        The blocks.
    form : Form
        How the gradient is computed.
    prior : Prior
        What acts on the gradient step.
    solver : Solver
        Whose vectors are read and written.
    layout : Layout
        That of the vectors.
    overlap : bool
        Whether the next read and the last write go on beside the computation.
    io_threads : int
        Threads that read and write side by side, each with a piece of its own.
    measured : int, optional
        Resident memory of a process that has opened a GPU, where a trial told it.
    """
    size, copies = np.dtype(layout.dtype).itemsize, 2 if overlap else 1
    before = (form.per_sweep - 1) * (prior.reach() + form.reach)
    step = size * _window(grid, before + prior.reach())
    seen = size * _window(grid, before + prior.reach() + form.reach)
    read = images_read(solver)
    core, shard = size * math.prod(grid.block), size * math.prod(layout.shard)
    denoised = denoised_of(prior)
    model, tiles = _denoiser(denoised)
    on_gpu = denoised is not None and denoised.device != "cpu"
    return StepFootprint(
        imports_bytes=IMPORTS_BYTES + (gpu_bytes(measured) if on_gpu else 0),
        model_bytes=model,
        vectors_bytes=copies * (read * seen + len(solver.vectors) * core)
        + 2 * io_threads * shard
        + (IMAGES_OF_A_STEP + form.per_sweep - 1) * step,
        operators_bytes=IMAGES_OF_A_GRADIENT * seen + (TRANSFORMS_BYTES if form.is_fft else 0),
        # On a GPU they are there, and the pixels pass through pinned memory on their way: two pieces each way.
        tiles_bytes=2 * BUFFERS * pinned(step) if on_gpu else tiles,
    )


def footprint_of_operator(
    term: Term, image: Shape, dtype: np.dtype[np.generic], step: StepFootprint, *, on_gpu: bool
) -> StepFootprint:
    """The footprint of an operator that sees the whole image, in a task of its own; a worker that does a ``step`` too keeps its model."""
    size = dtype.itemsize
    measured = math.prod(term.measurement.shape) * max(size, term.measurement.dtype.itemsize)
    return StepFootprint(
        imports_bytes=step.imports_bytes,
        model_bytes=step.model_bytes,
        vectors_bytes=3 * size * math.prod(image),  # the image, what this one adds, and the sum so far
        operators_bytes=bytes_of_operator(term.operator, image, size, measured) + 2 * measured,
        # Of tiles on a CPU nothing is left by then; pinned memory stays.
        tiles_bytes=step.tiles_bytes if on_gpu else 0,
    )


def bytes_of_operator(operator: Operator, image: Shape, size: int, measured: int) -> int:
    """What an operator that sees the whole image holds while it works: pixels of ``size`` bytes, a measurement of so many."""
    own = getattr(operator, "memory_bytes", None)
    return own(image) if own else COPIES * (size * math.prod(image) + measured)


def _window(grid: Grid, halo: int) -> int:
    """Pixels of a block with what lies around it, inside the image."""
    edges = (min(n, b + 2 * halo) for n, b in zip(grid.shape[-2:], grid.block[-2:], strict=True))
    return math.prod(edges) * math.prod(grid.block[:-2])


def _denoiser(denoised: Denoised | None) -> tuple[int, int]:
    """Bytes of a prior's model, and of the tiles that it computes at once."""
    if denoised is None:
        return 0, 0
    denoiser, tiling = denoised.denoiser, denoised.tiling
    depth = (max(pair) for pair in tiling.depth)
    window = math.prod(n + 2 * d for n, d in zip(tiling.tile, depth, strict=True))
    weights = 2 * sum(path.stat().st_size for path in denoiser.files())
    return weights, int(window * tiling.batch * (denoiser.bytes_per_pixel() + 8))
