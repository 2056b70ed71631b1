"""How far earlier runs of a job took its solver, and whether what is asked for now lies on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halotile.errors import ResumeRefused
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.reconstruct.job import SolverChoice
from halotile.storage.run_directory.checkpoints import Checkpoint
from halotile.storage.run_directory.directory import RunDirectory

if TYPE_CHECKING:
    from halotile.graphs.solvers.base import Solver

Rows = Sequence[Mapping[str, float]]
"""What each iteration came to, the first one first."""
ITERATE = "iterate"
"""The folder of the solver's state."""


def end_of(rows: Rows, choice: SolverChoice, solver: Solver) -> int | None:
    """The iteration that a solver ends with, if these are enough to tell.

    Examples
    --------
    >>> from halotile.graphs.solvers.base import SolverBase
    >>> rows = [{"iteration": n, "change": change} for n, change in enumerate((0.5, 0.1, 0.02), 1)]
    >>> [end_of(rows, SolverChoice(iterations=n, tol=tol), SolverBase()) for n, tol in ((3, 0.0), (2, 0.0), (9, 0.2), (9, 0.0))]
    [3, 2, 2, None]
    """
    ends = (row for row in rows if row["iteration"] == choice.iterations or solver.is_done(choice.tol, row))
    return next((int(row["iteration"]) for row in ends), None)


def last_of(rows: Rows) -> int:
    """The iteration that they end with; 0 where there are none.

    Examples
    --------
    >>> last_of([{"iteration": 2}, {"iteration": 4}]), last_of([])
    (4, 0)
    """
    return int(rows[-1]["iteration"]) if rows else 0


@dataclass(frozen=True)
class Reached:
    """Where earlier runs came to.

    Parameters
    ----------
    rows : sequence of mapping
        What each iteration came to.
    written : int
        The iteration whose image the output holds, or is about to; 0 before the first is written.
    has_state : bool
        Whether the solver's images are there to go on from.
    """

    rows: Rows
    written: int
    has_state: bool

    @classmethod
    def of(cls, directory: RunDirectory) -> Reached:
        """What a run directory tells."""
        kept = Checkpoint(directory.state_path / ITERATE / "checkpoint").read()
        written = directory.read_output_iterations()
        # A run that only mends its output iterates anew, and is behind what it has told already.
        rows = max((kept or {}).get("rows", []), written, key=len)
        return cls(rows, last_of(written), kept is not None)

    @property
    def iterations(self) -> int:
        """How many there were."""
        return last_of(self.rows)


def note_of(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> tuple[str, ...]:
    """What is to be said of a run that goes on with the iterations of an earlier one.

    Raises
    ------
    ResumeRefused
        When the earlier run went past the end that is asked for, or left nothing to go on from.
    """
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
    """Whether an image was written and the solver's own are not there any more: to write it again, all is iterated again."""
    reached = Reached.of(directory)
    return reached.written > 0 and not reached.has_state


def is_behind(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> bool:
    """Whether what the output holds is the image of another iteration than the one asked for."""
    reached = Reached.of(directory)
    return end_of(reached.rows, choice, solver) != reached.written


def identity_of(solver: Mapping[str, Any]) -> dict[str, Any]:
    """What of a solver's choice can change an iterate: how many there are, and what is kept of them, cannot."""
    return {key: value for key, value in solver.items() if key not in ("iterations", "tol", "keep_state")}


def essentials(job: dict[str, Any]) -> dict[str, Any]:
    """Return a stored job without what may differ between an earlier run and one that goes on with it."""
    parts = dict(job)
    if "solver" in parts:
        parts["solver"] = identity_of(parts["solver"])
    prior = parts.get("prior") or {}
    if (
        prior.get("name") != "tv"
    ):  # others have no iterations, and the default was another in earlier versions
        parts["prior"] = {key: value for key, value in prior.items() if key != "iterations"}
    return parts


def changes(job: Mapping[str, Any]) -> Any:
    """Return the part of a stored job that a run which goes on keeps anew: it may go on to another end."""
    return job.get("solver")
