"""The names of a solver's passes, for reports and the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PassWords:
    """How the passes of a solver are named.

    Parameters
    ----------
    phase : str
        On the dashboard, and in the counts of the job.
    stages : tuple of str
        What is done to a block.
    title : callable
        Returns which iteration one of these passes belongs to, to follow on what happened.
    is_numbered : bool
        The dashboard groups passes by their number.
    """

    phase: str
    stages: tuple[str, ...] = ()
    title: Callable[[int], str] = lambda _: ""
    is_numbered: bool = False
