"""Continuation of a solver: iterations of earlier runs, and whether the requested end follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halotile.errors import ResumeRefused
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.reconstruct.job import SolverChoice
from halotile.graphs.kinds.base import IterationRows
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.json_files import Checkpoint

if TYPE_CHECKING:
    from halotile.graphs.solvers.base import Solver

ITERATE = "iterate"
"""Folder of the solver's state."""


def end_of(rows: IterationRows, choice: SolverChoice, solver: Solver) -> int | None:
    """Return the iteration that a solver ends with, if the rows are enough to decide it.

    Examples
    --------
    >>> from halotile.graphs.solvers.base import SolverBase
    >>> rows = [{"iteration": n, "change": change} for n, change in enumerate((0.5, 0.1, 0.02), 1)]
    >>> [end_of(rows, SolverChoice(iterations=n, tol=tol), SolverBase()) for n, tol in ((3, 0.0), (2, 0.0), (9, 0.2), (9, 0.0))]
    [3, 2, 2, None]
    """
    ends = (row for row in rows if row["iteration"] == choice.iterations or solver.is_done(choice.tol, row))
    return next((int(row["iteration"]) for row in ends), None)


def last_of(rows: IterationRows) -> int:
    """Return the number of the last iteration of the rows; 0 where there are none.

    Examples
    --------
    >>> last_of([{"iteration": 2}, {"iteration": 4}]), last_of([])
    (4, 0)
    """
    return int(rows[-1]["iteration"]) if rows else 0


@dataclass(frozen=True)
class Reached:
    """Iterations that earlier runs reached."""

    rows: IterationRows  # figures of each iteration
    written: int  # iteration whose image the output holds, or is about to hold; 0 before the first is written
    has_state: bool  # the solver's images exist, so that more iterations can follow

    @classmethod
    def of(cls, directory: RunDirectory) -> Reached:
        """Return the iterations that a run directory records."""
        stored = Checkpoint(directory.state_path / ITERATE / "checkpoint").read()
        written = directory.read_output_iterations()
        # A run that only repairs its output iterates again, and is behind the iterations that it has reported
        # already.
        rows = max((stored or {}).get("rows", []), written, key=len)
        return cls(rows, last_of(written), stored is not None)

    @property
    def iterations(self) -> int:
        return last_of(self.rows)


def note_of(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> tuple[str, ...]:
    """Return notes on a run that continues the iterations of an earlier one."""
    reached = Reached.of(directory)
    end, done = end_of(reached.rows, choice, solver), counted(reached.iterations, "iteration")
    if end == reached.iterations or not reached.rows:
        return ()
    if end is not None:
        raise ResumeRefused(
            f"{directory.path} has done {done}; with solver.iterations: {choice.iterations} and solver.tol: {choice.tol:g} "
            f"it would have ended after {end}, whose image is gone. Write solver.iterations: {reached.iterations} or "
            "more with a smaller tol, or run with --fresh to start over."
        )
    if not reached.has_state:
        raise ResumeRefused(
            f"{directory.path} finished after {done}, and what its solver had between iterations was removed: "
            "it cannot go on from there. Run with --fresh to start over, with solver.keep_state: true if you may want "
            "more iterations later; or write another output.path and start: the output, to begin at its image."
        )
    at_most = counted(choice.iterations, "iteration")
    are = "is" if reached.iterations == 1 else "are"
    return (f"{done} {are} done; goes on from there to {at_most} at most, with the bits of one run",)


def is_gone(directory: RunDirectory) -> bool:
    """Return True where an image was written and the solver's images are gone: it is iterated from the start."""
    reached = Reached.of(directory)
    return reached.written > 0 and not reached.has_state


def is_behind(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> bool:
    """Return True where the output holds the image of another iteration than the requested one."""
    reached = Reached.of(directory)
    return end_of(reached.rows, choice, solver) != reached.written


def identity_of(solver: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a solver that can change an iterate: not their number, nor which are kept."""
    return {key: value for key, value in solver.items() if key not in ("iterations", "tol", "keep_state")}


def essentials(job: dict[str, Any]) -> dict[str, Any]:
    """Return a stored job without the parts that may differ between an earlier run and one that resumes it."""
    parts = dict(job)
    if "solver" in parts:
        parts["solver"] = identity_of(parts["solver"])
    return parts


def changes(job: Mapping[str, Any]) -> Any:
    """Return the part of a stored job that a resumed run stores anew: it may continue to another end."""
    return job.get("solver")
