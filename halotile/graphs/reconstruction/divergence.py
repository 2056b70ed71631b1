"""Divergence: the rows of the iterations tell when numbers grow without bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from halotile.tasks.fidelity import MISFIT

OBJECTIVE = "objective"
"""The misfit and the prior together, where the prior can be told."""
GROWTH = 2.0
"""What grows by this much in each of a few iterations diverges: it may grow once, and less, with momentum or a denoiser."""
GROWING = 3
"""How many iterations in a row these are."""

Row = dict[str, float]
"""What is told of an iteration."""


def growth(rows: Sequence[Row], floor: float) -> int:
    """In how many iterations in a row, up to the last one, the objective grew; what is below ``floor`` counts as that.

    Examples
    --------
    >>> growth([{"misfit": misfit} for misfit in (9.0, 1.0, 5.0, 40.0)], 0.0)
    2
    >>> growth([{"misfit": misfit} for misfit in (9.0, 1.0, 5.0, 6.0)], 0.0)
    0
    """
    values = [max(row.get(OBJECTIVE, row[MISFIT]), floor) for row in rows if MISFIT in row]
    count = 0
    for before, after in reversed([*itertools.pairwise(values)]):
        if after <= GROWTH * before:
            break
        count += 1
    return count


def divergence(rows: Sequence[Row], floor: float) -> str:
    """What is wrong with the last row, if anything: a number that is none, or growth that does not end.

    Examples
    --------
    >>> rows = [{"iteration": n, "misfit": 10.0**n} for n in range(1, 5)]
    >>> divergence(rows, 0.0)
    'iteration 4: in 3 iterations the misfit grew from 10 to 1e+04'
    >>> divergence(rows[:3], 0.0)
    ''
    """
    row = rows[-1]
    where = f"iteration {row['iteration']:.0f}"
    if wild := [name for name, value in row.items() if not math.isfinite(value)]:
        return f"{where}: {wild[0]} is {row[wild[0]]}"
    if growth(rows, floor) < GROWING:
        return ""
    told = OBJECTIVE if OBJECTIVE in row else MISFIT
    return f"{where}: in {GROWING} iterations the {told} grew from {rows[-GROWING - 1][told]:.4g} to {row[told]:.4g}"


def shorter(step_size: float) -> str:
    """What to write instead."""
    return f"Write a smaller solver.step than {step_size:.3g}, or step: auto if it is not; poisson also needs a start above 0."
