"""Declaration of the steps of a kind of job that iterates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Steps:
    """Steps of a job. The kind reports a row of figures after each, or after several at once: see ``RunView.report_row``.

    Parameters
    ----------
    unit : str
        Name of a step, such as ``iteration``: in a row, the key of the last one's number. Its key ``seconds`` has the duration of the row.
    losses : sequence of str
        Keys of figures that ought to fall; the first of them that a row has is its loss.
    shortened : callable
        ``shortened(job, rows)`` returns the same job with at most so many rows.
    counted : str
        The unit that progress counts.
    per_epoch : callable, optional
        Returns the number of steps that go through all data once, on average, from the figures of the plan.
    drawing : str
        What its drawing shows, if it makes one.
    """

    unit: str
    losses: Sequence[str]
    shortened: Callable[[Any, int], Any]
    counted: str = "block"
    per_epoch: Callable[[Mapping[str, Any]], float] | None = None
    drawing: str = ""
