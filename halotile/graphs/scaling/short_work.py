"""The first blocks and steps of a job in place of all of them, timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace

from halotile.graphs.kinds.base import (
    AnyPass,
    IterationRows,
    JobOutput,
    Pass,
    PassCount,
    RunView,
    Sums,
    Work,
)
from halotile.graphs.kinds.steps import Steps
from halotile.graphs.runs.driver import next_of

SECONDS = 10.0
"""Time that the fewest workers are measured for in a trial of a job without steps, about."""
LEAST = 4
"""Blocks for each worker at least: with fewer, the last ones leave too many of them idle."""


class Enough(Exception):
    """The blocks or steps to measure are done."""


@dataclass
class Portion:
    """The blocks that are computed in each pass of a job without steps, the same in all trials.

    Parameters
    ----------
    most_workers : int
        The largest number of workers.
    blocks : int, optional
        Number of blocks to measure; where it is not given, the pace of the first ones in the first trial decides.
    """

    most_workers: int
    blocks: int | None = None

    def choose(self, seconds: float) -> None:
        """Choose the number of blocks, unless it is known: as many as take :data:`SECONDS`, of so many seconds each."""
        self.blocks = self.blocks or max(LEAST * self.most_workers, int(SECONDS / max(seconds, 1e-6)))

    def first_of(self, total: int) -> int:
        """Return the number of blocks that are done first and not measured: with them, workers load what they need."""
        return min(self.most_workers, total // 2)

    def measured_of(self, total: int) -> int:
        """Return the number of blocks that are measured."""
        return min(self.blocks or total, total - self.first_of(total))


@dataclass
class ShortWork(Work):
    """A work that ends early. What it measures is in its fields once it has raised :class:`Enough`.

    Passes of a job without steps are done in two parts: first a block for each worker, then those that are measured.
    Of a job with steps, which has been shortened, everything is done but the writing of its outputs: a step needs all of the
    one before.

    Parameters
    ----------
    work : Work
        The whole work.
    steps : Steps, optional
        Steps of the job.
    portion : Portion
        The blocks to do.
    """

    work: Work
    steps: Steps | None
    portion: Portion
    began: float = field(default_factory=time.perf_counter)
    start_seconds: float = 0.0
    """Time until the first step, or the first blocks, were done."""
    rows: IterationRows = ()
    """Figures of the steps."""
    measured: list[tuple[int, float]] = field(default_factory=list)
    """Number of all blocks, and seconds for each one that was measured, of every pass of a job without steps."""

    @property
    def outputs(self) -> tuple[JobOutput, ...]:
        """Those of the whole work."""
        return self.work.outputs

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """Those of the whole work."""
        return self.work.passes

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds for a block, weighted by the blocks of each pass; or for a step, in each row after the first."""
        if self.steps is None:
            total = sum(blocks for blocks, _ in self.measured)
            return (sum(blocks * each for blocks, each in self.measured) / total,) if total else ()
        unit = self.steps.unit
        return tuple(
            row["seconds"] / (row[unit] - before[unit]) for before, row in itertools.pairwise(self.rows)
        )

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """Number and loss of the steps that rows end with."""
        if self.steps is None or not self.rows:
            return ()
        named = (key for key in self.steps.losses if key in self.rows[0])
        return tuple(
            (int(row[self.steps.unit]), row[key]) for key in itertools.islice(named, 1) for row in self.rows
        )

    def run(self, at: RunView) -> Generator[AnyPass, Sums, None]:
        """Yield passes until enough is done.

        Raises
        ------
        Enough
            At the end.
        """
        with closing(self.work.run(_ListeningView(at, self._take))) as passes:
            sums = None
            while (wanted := next_of(passes, sums)) is not None:
                if self.steps is None and isinstance(wanted, Pass) and len(wanted.grid) > 1:
                    sums = yield from self._part_of(wanted)
                elif self.steps is not None and isinstance(wanted.records, JobOutput):
                    break
                else:
                    sums = yield wanted
        raise Enough

    def _part_of(self, wanted: Pass) -> Generator[AnyPass, Sums, Sums]:
        """Yield the two parts of a pass."""
        total = len(wanted.grid)
        first = self.portion.first_of(total)
        sums = yield replace(wanted, blocks=first)
        self.start_seconds = self.start_seconds or time.perf_counter() - self.began
        self.portion.choose(sums.seconds / first)
        blocks = self.portion.measured_of(total)
        sums = yield replace(wanted, blocks=first + blocks)
        self.measured.append((total, sums.seconds / blocks))
        return sums

    def _take(self, rows: IterationRows) -> None:
        if rows and not self.rows:  # several may come at once
            later = sum(row["seconds"] for row in rows[1:])
            self.start_seconds = time.perf_counter() - self.began - later
        self.rows = list(rows)


class _ListeningView:
    """A run as its generator of passes sees it, with somebody who listens to the figures of steps."""

    def __init__(self, view: RunView, listen: Callable[[IterationRows], None]) -> None:
        self.directory, self.fingerprint, self.report = view.directory, view.fingerprint, view.report
        self._view, self._listen = view, listen

    def report_row(self, rows: IterationRows, total: int) -> None:
        """Report the figures of all steps so far."""
        self._view.report_row(rows, total)
        self._listen(rows)
