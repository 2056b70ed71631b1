"""Detection of divergence: figures of the iterations that grow without bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from halotile.tasks.terms import MISFIT

OBJECTIVE = "objective"
"""The misfit plus the prior, where the prior has a value."""
GROWS = 1.01
"""An objective that grows by less than this factor in an iteration is at rest."""
LEAPS, LEAP = 3, 2.0
"""An objective that grows this often in a row by this factor diverges; momentum or a denoiser may make it
grow once."""
LONG, FAR, STEADY = 6, 8.0, 0.8
"""An objective also diverges that has grown for this many iterations, by this factor in all, and in the
second half of them nearly as fast as in the first: an image that drifts from a perfect start towards what its
denoiser favours does so more and more slowly."""

FigureRow = dict[str, float]
"""Figures of one iteration by name."""


def growth(rows: Sequence[FigureRow], floor: float) -> int:
    """Return how many of the last iterations in a row the objective grew; lower values count as ``floor``.

    Examples
    --------
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

    Examples
    --------
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
    return f"Write a smaller solver.step than {step_size:.3g}, or step: auto if it is not; poisson also needs a start above 0."
