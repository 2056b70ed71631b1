"""What an iteration reads and writes: in one pass, and if its denoiser had a pass of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from halotile.graphs.forms import Form
from halotile.graphs.solvers.base import Solver
from halotile.storage.grid import Grid
from halotile.tasks.priors import Prior


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
    written = len(solver.vectors) * size * math.prod(grid.shape)
    image = size * math.prod(grid.shape)

    def moved(halo: int) -> int:
        return read * size * pixels_read(grid, halo + form.reach) + _measured(grid, form, size, halo)

    fused = moved(wide) + written
    if not wide:
        return Traffic(fused, None)
    # The prior's pass reads the step with its halo; the change is taken against the vector it began with.
    return Traffic(fused, moved(0) + image + size * pixels_read(grid, wide) + image + written)


def _measured(grid: Grid, form: Form, size: int, halo: int) -> int:
    """What is read of the measurements, or of what they were folded into."""
    if form.folded is not None:
        return size * pixels_read(grid, halo)
    whole = math.prod(grid.shape)
    return sum(
        round(
            term.measurement.dtype.itemsize
            * pixels_read(grid, halo + term.operator.reach)
            * math.prod(term.measurement.shape)
            / whole
        )
        for term in form.terms
    )


def pixels_read(grid: Grid, halo: int) -> int:
    """Pixels that are read where each block reads so far around itself on the last two axes, inside the image.

    Examples
    --------
    >>> pixels_read(Grid((8, 8), (4, 8), ((0, 0), (0, 0))), 1)
    80
    """
    lengths = list(grid.shape)
    for axis in (-2, -1):
        length, block = grid.shape[axis], grid.block[axis]
        lengths[axis] = sum(
            min(length, start + block + halo) - max(0, start - halo) for start in range(0, length, block)
        )
    return math.prod(lengths)
