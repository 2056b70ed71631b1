"""How far earlier runs of a job took its solver, and whether what is asked for now lies on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halotile.errors import ResumeRefused
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.sections import SolverChoice
from halotile.graphs.solvers.base import CHANGE, RECOMPUTED, RESIDUAL, SPENT
from halotile.storage.run_directory.checkpoints import Checkpoint
from halotile.storage.run_directory.directory import RunDirectory

if TYPE_CHECKING:
    from halotile.graphs.jobs.reconstruct.plan_value import ReconstructionPlan

Rows = Sequence[Mapping[str, float]]
"""What each iteration came to, the first one first."""
ITERATE = "iterate"
"""The folder of the solver's state."""


def is_done(tol: float, row: Mapping[str, float]) -> bool:
    """Whether the image had come to rest by then; where a residual is told, whether that is small, computed anew, or spent.

    Examples
    --------
    >>> is_done(0.0, {"iteration": 1, "change": 0.1}), is_done(0.01, {"iteration": 2, "change": 0.001})
    (False, True)
    >>> [is_done(0.01, {"change": 0.001, "residual": 0.005, "recomputed": anew}) for anew in (0.0, 1.0)]
    [False, True]
    """
    if RESIDUAL in row:
        return bool(row[RECOMPUTED]) and (row[RESIDUAL] <= tol or bool(row.get(SPENT)))
    return row.get(CHANGE, 1.0) <= tol


def end_of(rows: Rows, solver: SolverChoice) -> int | None:
    """The iteration that a solver ends with, if these are enough to tell.

    Examples
    --------
    >>> rows = [{"iteration": n, "change": change} for n, change in enumerate((0.5, 0.1, 0.02), 1)]
    >>> [end_of(rows, SolverChoice(iterations=n, tol=tol)) for n, tol in ((3, 0.0), (2, 0.0), (9, 0.2), (9, 0.0))]
    [3, 2, 2, None]
    """
    ends = (row for row in rows if row["iteration"] == solver.iterations or is_done(solver.tol, row))
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


def note_of(directory: RunDirectory, solver: SolverChoice) -> tuple[str, ...]:
    """What is to be said of a run that goes on with the iterations of an earlier one.

    Raises
    ------
    ResumeRefused
        When the earlier run went past the end that is asked for, or left nothing to go on from.
    """
    reached = Reached.of(directory)
    end, done = end_of(reached.rows, solver), counted(reached.iterations, "iteration")
    if end == reached.iterations or not reached.rows:
        return ()
    if end is not None:
        raise ResumeRefused(
            f"{directory.path} has done {done}; with solver.iterations: {solver.iterations} and solver.tol: {solver.tol:g} "
            f"it would have ended after {end}, whose image is gone. Write solver.iterations: {reached.iterations} or "
            "more with a smaller tol, or run with --fresh to start over."
        )
    if not reached.has_state:
        raise ResumeRefused(
            f"{directory.path} finished after {done}, and what its solver had between iterations was removed: "
            "it cannot go on from there. Run with --fresh to start over, with solver.keep_state: true if you may want "
            "more iterations later; or write another output.path and start: the output, to begin at its image."
        )
    at_most = counted(solver.iterations, "iteration")
    are = "is" if reached.iterations == 1 else "are"
    return (f"{done} {are} done; goes on from there to {at_most} at most, with the bits of one run",)


def is_gone(directory: RunDirectory) -> bool:
    """Whether an image was written and the solver's own are not there any more: to write it again, all is iterated again."""
    reached = Reached.of(directory)
    return reached.written > 0 and not reached.has_state


def is_behind(directory: RunDirectory, solver: SolverChoice) -> bool:
    """Whether what the output holds is the image of another iteration than the one asked for."""
    reached = Reached.of(directory)
    return end_of(reached.rows, solver) != reached.written


def keep_job(plan: ReconstructionPlan, directory: RunDirectory) -> None:
    """Have the directory keep what is asked for now: what goes on from there goes on to the same end."""
    job = plan.job_json()
    kept = directory.read_job()
    if kept is not None and kept.get("solver") != job["solver"]:
        directory.write_job(job)
        directory.write_config(plan.resolved_json())


def identity_of(solver: Mapping[str, Any]) -> dict[str, Any]:
    """What of a solver's choice can change an iterate: how many there are, and what is kept of them, cannot."""
    return {key: value for key, value in solver.items() if key not in ("iterations", "tol", "keep_state")}
