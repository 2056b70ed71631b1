"""A solver's iterations whose passes are done in this process, or as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from halotile.graphs.iterations.iterate import FigureRow, PassWords
from halotile.graphs.jobs.reconstruct.inversion import JudgedIterations
from halotile.graphs.kinds.base import Gather, Pass, Records, Sums
from halotile.graphs.runs.records import open_records
from halotile.graphs.solvers.base import State
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.tasks.block import ONE_BLOCK, BlockRunner
from halotile.tasks.image_task import ImageTask

Result = TypeVar("Result")

WORDS = PassWords("iterate")
"""Names of passes that nobody reads."""


def inline(task: ImageTask, iteration: int, journal: Journal, ledger: Ledger) -> None:
    """Do what is left of a pass, in this process."""
    receipt = BlockRunner(task).run(journal.done.complement(len(task.grid)))
    assert not receipt.bad, receipt.bad[0].traceback
    ledger.enter(receipt.sums)
    journal.mark(receipt.digests)


@dataclass
class InlineIterations(JudgedIterations):
    """Iterations that do their own passes."""

    run_pass: Callable[..., None] = inline
    """``run_pass(task, iteration, journal, ledger)`` does what is left of a pass."""
    gather: Callable[..., None] | None = None
    """``gather(wanted, iteration, journal, ledger)`` adds terms up."""

    def run(self, iterations: int, is_done: Callable[[State, FigureRow], bool]) -> Iterator[FigureRow]:
        """Iterate until ``is_done``, at most so many times; yield the figures of each iteration."""
        while self.done < iterations and not (self.rows and is_done(self.state, self.rows[-1])):
            yield self._driven(self.iterate())

    def judged(self) -> bool:
        """Judge the image; return False where the last step was taken back."""
        return self._driven(self.judge())

    def _driven(self, passes: Generator[Pass | Gather, Sums, Result]) -> Result:
        sums: Any = None
        try:
            while True:
                sums = self._do(passes.send(sums))
        except StopIteration as end:
            result: Result = end.value
            return result

    def _do(self, wanted: Pass | Gather) -> Sums:
        assert isinstance(wanted.records, Records)
        grid = wanted.grid if isinstance(wanted, Pass) else ONE_BLOCK
        with open_records(wanted.records, grid, self.fingerprint) as opened:
            if isinstance(wanted, Pass):
                self.run_pass(wanted.task, self.state.passes, opened.journal, opened.ledger)
            elif not opened.journal.done:
                assert self.gather is not None
                self.gather(wanted, self.state.passes, opened.journal, opened.ledger)
            return opened.sums()
