"""What an iteration reads and writes: in one pass, and if its denoiser had a pass of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from halotile.graphs.forms import REACH_OF_CELLS, Form
from halotile.graphs.solvers.base import Solver
from halotile.storage.grid import Grid
from halotile.tasks.overlap_save import snapped
from halotile.tasks.priors import Prior

BESIDE = ("gd",)
"""Solvers whose prior acts beside the gradient, not on it."""
BLIND = ("cg",)
"""Solvers that read no measurement after their first iteration."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one iteration, read and written, without compression.

    Parameters
    ----------
    fused : int
        As it is run: each vector is read once, by the operators and the prior together.
    unfused : int or None
        With the gradient step written and read again by the prior; None where the prior looks at no other pixel.
    """

    fused: int
    unfused: int | None


def traffic_of(grid: Grid, form: Form, prior: Prior, solver: Solver, dtype: np.dtype[np.generic]) -> Traffic:
    """What an iteration of a solver moves, as a sum over its blocks.

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
    dtype : dtype
        What they are stored in.
    """
    size, wide = dtype.itemsize, prior.reach()
    read = sum(solver.vectors.values()) - len(solver.vectors)
    image = size * math.prod(grid.shape)
    written = len(solver.vectors) * image

    def moved(halo: int) -> int:
        acted_on = 0 if solver.name in BESIDE else halo
        return read * size * _seen(grid, form, halo) + (
            0 if solver.name in BLIND else _measured(grid, form, size, acted_on)
        )

    fused = moved(wide) + written
    if not wide:
        return Traffic(fused, None)
    # The prior's pass reads the step with its halo; the change is taken against the vector it began with.
    return Traffic(fused, moved(0) + image + size * pixels_read(grid, wide) + image + written)


def _seen(grid: Grid, form: Form, halo: int) -> int:
    """Pixels of a vector that its operators and the prior look at."""
    if form.is_fft:
        return pixels_read(grid, halo, form.reach - REACH_OF_CELLS, cells=True)
    return pixels_read(grid, halo + form.reach)


def _measured(grid: Grid, form: Form, size: int, halo: int) -> int:
    """What is read of the measurements, or of what they were folded into."""
    if form.folded is not None:
        return size * pixels_read(grid, halo)
    whole = math.prod(grid.shape)
    return sum(
        round(
            term.measurement.dtype.itemsize
            * pixels_read(grid, halo, term.operator.reach, cells=form.is_fft)
            * math.prod(term.measurement.shape)
            / whole
        )
        for term in form.terms
    )


def pixels_read(grid: Grid, halo: int, reach: int = 0, *, cells: bool = False) -> int:
    """Pixels that are read where each block looks so far around itself on the last two axes, inside the image.

    Parameters
    ----------
    grid : Grid
        The blocks.
    halo, reach : int
        How far, in pixels: what acts on the result of a convolution, and the convolution.
    cells : bool
        Whether the convolution is computed in whole cells.

    Examples
    --------
    >>> pixels_read(Grid((8, 8), (4, 8), ((0, 0), (0, 0))), 1)
    80
    """
    lengths = list(grid.shape)
    for axis in (-2, -1):
        length, block = grid.shape[axis], grid.block[axis]
        lengths[axis] = 0
        for core in range(0, length, block):
            start, stop = max(0, core - halo), min(length, core + block + halo)
            if cells:
                start, stop = snapped(start, stop, 0, length)
            lengths[axis] += min(length, stop + reach) - max(0, start - reach)
    return math.prod(lengths)
