"""The scaling of a job: trials with several numbers of workers, compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class TimedRun:
    """Figures of one trial.

    Parameters
    ----------
    workers : int
        Number of workers.
    start_seconds : float
        Time until the first step, or a block for each worker, was done: processes, imports, model, and what comes before the steps.
    seconds : tuple of float
        Seconds for a unit, block or step, after that.
    losses : tuple of (int, float)
        Number and loss of each step, the first one included.
    read_bytes, written_bytes : int, optional
        Bytes that blocks read and wrote, in the whole trial; None where there are no blocks, and nothing is counted.
    exchanged_bytes : int, optional
        Bytes that workers received from one another: of results, and in the steps of trainings and ptychography; None where they are not counted.
    peak_memory_bytes, device_peak_bytes : int
        Peak of one worker, in its memory and on its GPU.
    """

    workers: int
    start_seconds: float
    seconds: tuple[float, ...]
    losses: tuple[tuple[int, float], ...]
    read_bytes: int | None
    written_bytes: int | None
    exchanged_bytes: int | None
    peak_memory_bytes: int
    device_peak_bytes: int


@dataclass(frozen=True)
class ScalingRow:
    """All trials with one number of workers.

    Parameters
    ----------
    run : TimedRun
        The trials as one: the median start, all seconds, the losses of the first, and otherwise the largest figures.
    speed_up : float
        Ratio of the median seconds with the fewest workers to those with these.
    efficiency : float
        Speed-up in relation to the number of workers.
    """

    run: TimedRun
    speed_up: float
    efficiency: float

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Median, minimum and maximum of the seconds for a unit."""
        return median(self.run.seconds), min(self.run.seconds), max(self.run.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the row for programs."""
        names = ("seconds", "least_seconds", "most_seconds")
        compared = {"all_seconds": self.run.seconds, "speed_up": self.speed_up, "efficiency": self.efficiency}
        return asdict(self.run) | dict(zip(names, self.seconds, strict=True)) | compared


@dataclass(frozen=True)
class Scaling:
    """The trials of a job.

    Parameters
    ----------
    job : str
        Kind of the job.
    unit : str
        Word for what is timed: block, iteration.
    blocks, of_blocks : int, optional
        Number of blocks that were measured, and of all blocks of a pass, in a job without steps.
    trials : int
        Trials with each number of workers.
    runs : sequence of TimedRun
        The trials, in the order of their numbers of workers.
    notes : sequence of str
        Sentences about the numbers of workers.
    """

    job: str
    unit: str
    blocks: int | None
    of_blocks: int | None
    trials: int
    runs: Sequence[TimedRun]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[ScalingRow]:
        """The trials with each number of workers together, the fewest first."""
        groups = itertools.groupby(self.runs, lambda run: run.workers)
        joined = [_joined(list(group)) for _, group in groups]
        fewest = joined[0]
        ratios = (median(fewest.seconds) / median(run.seconds) for run in joined)
        return [
            ScalingRow(run, ratio, ratio * fewest.workers / run.workers)
            for run, ratio in zip(joined, ratios, strict=True)
        ]

    @property
    def largest_difference(self) -> float | None:
        """Largest relative difference of a loss between two trials; None where there are no losses.

        Examples
        --------
        >>> runs = [TimedRun(n, 1.0, (1.0,), ((1, 4.0), (2, 2.0 + n)), 0, 0, 0, 0, 0) for n in (0, 1)]
        >>> round(Scaling("reconstruct", "iteration", None, None, 1, runs).largest_difference, 3)
        0.333
        """
        steps = zip(*([loss for _, loss in run.losses] for run in self.runs), strict=False)
        spans = ((max(step) - min(step), max(map(abs, step))) for step in steps)
        return max((span / (size or 1.0) for span, size in spans), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return asdict(self) | {
            "largest_loss_difference": self.largest_difference,
            "workers": [row.to_json() for row in self.rows],
        }


def _joined(runs: Sequence[TimedRun]) -> TimedRun:
    names = [name for name in TimedRun.__dataclass_fields__ if name.endswith("_bytes")]
    figures: dict[str, Any] = {name: _largest([getattr(run, name) for run in runs]) for name in names}
    return replace(
        runs[0],
        start_seconds=median(run.start_seconds for run in runs),
        seconds=tuple(seconds for run in runs for seconds in run.seconds),
        **figures,
    )


def _largest(counts: Sequence[int | None]) -> int | None:
    """The largest of those that are counted."""
    return max((count for count in counts if count is not None), default=None)
