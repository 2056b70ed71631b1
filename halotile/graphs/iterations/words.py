"""Names of a solver's passes, for reports and the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PassWords:
    """Names of the passes of a solver.

    Parameters
    ----------
    phase : str
        Name on the dashboard, and in the pass counts of the job.
    title : callable
        Returns the iteration of a pass as text that follows a message.
    is_numbered : bool
        Group passes on the dashboard by their number.
    """

    phase: str
    title: Callable[[int], str] = lambda _: ""
    is_numbered: bool = False
