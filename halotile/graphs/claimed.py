"""A claimed output until its run is over: the directory that was claimed, whole, of an input that stayed as it was."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from halotile.errors import DamagedData, InputError, OutputRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.damage import damaged_among
from halotile.graphs.plan import RunPlan
from halotile.graphs.signals import Signals
from halotile.storage.journal import Journal
from halotile.storage.output import metadata_digest
from halotile.storage.runs import Runs

LOOK_SECONDS = 5.0
"""How often the output's directory and the input are looked at."""
LOOK_SHARE = 0.01
"""The most of a run's time that this takes."""
LISTED = 300
"""The most characters of block numbers in a message."""


class Claimed:
    """The output of one run while that holds it.

    Parameters
    ----------
    plan : RunPlan
        What is written, and of what.
    journal : Journal
        What of the output is done.
    directory : int
        The output's directory, open: as long as it is, no other one gets its number.
    """

    def __init__(self, plan: RunPlan, journal: Journal, directory: int) -> None:
        self.plan = plan
        self.journal = journal
        self._directory = directory
        self._metadata = metadata_digest(plan.output, plan.layout)
        self._next = time.monotonic() + LOOK_SECONDS
        self._at_hand, self._title = journal, ""
        self._sure = journal.done.copy()
        """Blocks of the pass at hand that were done when the input was as it had been."""

    def begin(self, journal: Journal, title: str) -> None:
        """Have a pass at hand that notes in ``journal`` what is done; the ``title`` follows on what happened in it."""
        if journal is not self._at_hand:
            self._at_hand, self._sure = journal, journal.done.copy()
        self._title = title

    def look(self) -> None:
        """Check now and then: every few seconds, and less often where that takes long."""
        if time.monotonic() >= self._next:
            self.check()

    def check(self) -> None:
        """Refuse to go on where the output is not there any more, or the input has changed.

        Raises
        ------
        OutputRefused, InputError
            Saying what happened. Blocks that may be of another input are struck from the journal at hand.
        """
        began = time.monotonic()
        self.check_place()
        self._check_input()
        self._sure = self._at_hand.done.copy()
        now = time.monotonic()
        self._next = now + max(LOOK_SECONDS, (now - began) / LOOK_SHARE)

    def check_place(self) -> None:
        """Refuse to go on where the directory that was claimed is not at its place any more.

        Raises
        ------
        OutputRefused
            When another one is, or none.
        """
        output = self.plan.output
        try:
            if os.path.samestat(os.stat(output), os.fstat(self._directory)):
                return
            what = "is no longer the directory that the run began to write"
        except OSError as error:
            what = f"was moved or removed ({error.strerror})"
        raise OutputRefused(
            f"{output} {what}: not all of what is done lies there. Put it back and run again to go on, or run with --fresh "
            "to start over."
        )

    def strike_damaged(self, numbers: Iterable[int], signals: Signals, *, thorough: bool) -> int:
        """Take these blocks out of the journal where the output does not hold what was written; how many there are.

        Raises
        ------
        Stopped
            When a signal asks for it before all of them were looked at; where that is soon done, when it presses.
        """

        def until_asked() -> Iterator[int]:
            for number in numbers:
                if signals.asked if thorough else signals.hurried:
                    raise Stopped(
                        f"stopped on {signals.name} while the blocks that are done were checked. Run again to go on.",
                        signals.name,
                    )
                yield number

        plan = self.plan
        damaged = damaged_among(
            until_asked(), self.journal, plan.output, plan.layout, plan.grid, thorough=thorough
        )
        self.journal.strike(damaged)
        return len(damaged)

    def finish(self, signals: Signals) -> None:
        """Refuse to call the run finished where its output is not what it wrote. The input was checked after each pass.

        Raises
        ------
        OutputRefused
            As :meth:`check_place`, and where the metadata are not what was written.
        DamagedData
            When shards are not what was written; their blocks are struck from the journal.
        Stopped
            As :meth:`strike_damaged`.
        """
        self.check_place()
        output = self.plan.output
        if metadata_digest(output, self.plan.layout) != self._metadata:
            raise OutputRefused(
                f"the metadata of {output} were changed or removed while the run wrote it. "
                "`recon-cli verify --repair` restores them."
            )
        if damaged := self.strike_damaged(self.journal.done, signals, thorough=False):
            raise DamagedData(
                f"after the run had written {output}, shards of {counted(damaged, 'block')} were changed or removed. "
                "Leave them alone, and run again to do these blocks again."
            )

    def _check_input(self) -> None:
        changed = [f"{source.path} {what}" for source in self.plan.sources if (what := source.change())]
        if not changed:
            return
        doubtful = self._at_hand.done.copy()
        doubtful.discard(self._sure)
        self._at_hand.strike(doubtful)
        raise InputError(
            f"{' and '.join(changed)} while the run read it{self._title}. {_blocks(self._sure)} done before that; "
            f"{_blocks(doubtful)} done since it was last found as it was, may be of either, and will be done again. "
            "Put it back as it was, with its times, and run again to go on, or run with --fresh to start over."
        )


def _blocks(numbers: Runs) -> str:
    """How many these are, and which.

    Examples
    --------
    >>> _blocks(Runs([3])), _blocks(Runs([1, 2, 5])), _blocks(Runs())
    ('1 block (3) was', '3 blocks (1-2,5) were', 'no block was')
    """
    if not numbers:
        return "no block was"
    text = numbers.to_text()
    listed = text if len(text) <= LISTED else f"{text[:LISTED].rpartition(',')[0]},…"
    return f"{counted(len(numbers), 'block')} ({listed}) {'was' if len(numbers) == 1 else 'were'}"
