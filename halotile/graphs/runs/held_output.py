"""A claimed output until its run is over: the directory that was claimed, whole, of an input that stayed as it was."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from halotile.errors import DamagedData, InputError, InputUnreadable, OutputRefused, Stopped
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.base import OutputArray
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.damage import damaged_blocks, output_grid
from halotile.graphs.runs.signals import Signals
from halotile.storage.disk.durable import GONE
from halotile.storage.disk.ownership import REPLACE, foreign_pixels_reason, metadata_problems
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.sharded.output import UNREADABLE
from halotile.storage.stored_array import read_error, unreadable_error

LOOK_SECONDS = 5.0
"""How often the output's directory and the input are looked at."""
LOOK_SHARE = 0.01
"""The most of a run's time that this takes."""
SILENT_SECONDS = 60.0
"""How long the system may not tell what became of them before the run ends: a network file system recovers, a ticket is renewed."""
LISTED = 300
"""The most characters of block numbers in a message."""


@dataclass(frozen=True)
class HeldOutput:
    """One output while its run holds it.

    Parameters
    ----------
    output : OutputArray
        What is written.
    journal : Journal
        What of it is done.
    directory : int
        Its directory, open: as long as it is, no other one gets its number.
    """

    output: OutputArray
    journal: Journal
    directory: int

    def check_place(self) -> None:
        """Refuse to go on where the directory that was claimed is not at its place any more.

        Raises
        ------
        OutputRefused
            When another one is, or none.
        InputUnreadable
            When the system does not answer.
        """
        path = self.output.path
        try:
            if os.path.samestat(os.stat(path), os.fstat(self.directory)):
                return
            what = "is no longer the directory that the run began to write"
        except GONE as error:
            what = f"was moved or removed ({error.strerror})"
        except OSError as error:
            raise read_error(f"{path}: it cannot be looked at", error) from error
        raise OutputRefused(
            f"{path} {what}: not all of what is done lies there. Put it back and run again to go on, or run with --fresh "
            "to start over."
        )

    def damaged(self, numbers: Iterable[int], *, thorough: bool) -> dict[int, list[str]]:
        """Return the problems of each of these blocks that the output does not hold as it was written."""
        output = self.output
        blocks = map(output_grid(output.layout, output.grid.shape, output.grid.block).block_at, numbers)
        return dict(
            damaged_blocks(output.path, output.layout, blocks, self.journal.digest, thorough=thorough)
        )


class HeldOutputs:
    """The outputs of one run while it holds them.

    Parameters
    ----------
    plan : Plan
        What is written, and of what.
    held : tuple of HeldOutput
        Each output.
    """

    def __init__(self, plan: Plan, held: tuple[HeldOutput, ...]) -> None:
        self.plan = plan
        self.held = held
        self._next = time.monotonic() + LOOK_SECONDS
        self._silent_since: float | None = None
        self._at_hand, self._title = held[0].journal, ""
        self._sure = self._at_hand.done.copy()
        """Blocks of the pass at hand that were done when the input was as it had been."""

    def journal_of(self, output: OutputArray) -> Journal:
        """Return the journal of an output."""
        return next(each.journal for each in self.held if each.output.path == output.path)

    @property
    def done(self) -> int:
        """Blocks of all outputs that are done."""
        return sum(len(each.journal.done) for each in self.held)

    def sync(self) -> None:
        """Make every journal durable."""
        for each in self.held:
            each.journal.sync()

    def begin(self, journal: Journal, title: str) -> None:
        """Have a pass at hand that notes in ``journal`` what is done; the ``title`` follows on what happened in it."""
        if journal is not self._at_hand:
            self._at_hand, self._sure = journal, journal.done.copy()
        self._title = title

    def look(self) -> None:
        """Check now and then: every few seconds, and less often where that takes long."""
        if time.monotonic() >= self._next:
            self._told(self._check)

    def check(self) -> None:
        """Refuse to go on where the output is not there any more, or the input has changed.

        Raises
        ------
        OutputRefused, InputError
            Saying what happened. Blocks that may be of another input are struck from the journal at hand.
        InputUnreadable
            When the system did not tell for :data:`SILENT_SECONDS`.
        """
        self._wait_until_told(self._check)

    def _wait_until_told(self, look: Callable[[], None]) -> None:
        while not self._told(look):
            time.sleep(LOOK_SECONDS)

    def _told(self, look: Callable[[], None]) -> bool:
        """Whether the system told what a look asks; until it does, blocks stay doubtful."""
        began = time.monotonic()
        try:
            look()
        except InputUnreadable:
            if self._silent_since is None:
                self._silent_since = began
            if began - self._silent_since >= SILENT_SECONDS:
                raise
            self._next = time.monotonic() + LOOK_SECONDS
            return False
        self._silent_since = None
        return True

    def _check(self) -> None:
        began = time.monotonic()
        self.check_place()
        self._check_input()
        self._sure = self._at_hand.done.copy()
        now = time.monotonic()
        self._next = now + max(LOOK_SECONDS, (now - began) / LOOK_SHARE)

    def check_place(self) -> None:
        """Refuse to go on where an output is not at its place any more; as :meth:`HeldOutput.check_place`."""
        for each in self.held:
            each.check_place()

    def strike_all(self) -> None:
        """Take every block out of the journals."""
        for each in self.held:
            each.journal.unmark(list(each.journal.done))
            each.journal.sync()

    def strike_damaged(
        self, signals: Signals, *, thorough: bool, only: Sequence[RangeSet] | None = None
    ) -> int:
        """Strike done blocks from the journals where outputs do not hold what was written; return how many there are.

        Parameters
        ----------
        signals : Signals
            What may ask to stop meanwhile.
        thorough : bool
            Read every byte, not only the checksums in each file.
        only : sequence of RangeSet, optional
            Blocks of each output to look at; by default all that are done.

        Raises
        ------
        OutputRefused
            When more than half of them are whole and others: nothing is struck.
        Stopped
            When a signal asks for it before all of them were looked at; where that is soon done, when it presses.
        """
        looked_at = [each.journal.done for each in self.held] if only is None else only
        found = [
            self._damaged(each, numbers, signals, thorough=thorough)
            for each, numbers in zip(self.held, looked_at, strict=True)
        ]
        for each, damaged in zip(self.held, found, strict=True):
            each.journal.unmark(damaged)
        return sum(map(len, found))

    def _damaged(
        self, each: HeldOutput, numbers: Iterable[int], signals: Signals, *, thorough: bool
    ) -> dict[int, list[str]]:
        """Return the problems of damaged blocks; refuse an output that is another result."""
        looked_at = 0

        def until_asked() -> Iterator[int]:
            nonlocal looked_at
            for number in numbers:
                if signals.requested if thorough else signals.hurried:
                    raise Stopped(
                        f"stopped on {signals.name} while the blocks that are done were checked. Run again to go on.",
                        signals.name,
                    )
                looked_at += 1
                yield number

        found = each.damaged(until_asked(), thorough=thorough)
        if others := foreign_pixels_reason(found, looked_at):
            raise OutputRefused(
                f"{each.output.path} is not what this run wrote there: {others}. {REPLACE} "
                f"{repair_command(self.plan)} does these blocks again in its place."
            )
        return found

    def finish(self, signals: Signals) -> None:
        """Refuse to call the run finished where its outputs are not what it wrote. The input was checked after each pass.

        Raises
        ------
        OutputRefused
            As :meth:`check_place` and :meth:`strike_damaged`, and where the metadata are not what was written.
        DamagedData
            When shards are not what was written; their blocks are struck from the journal.
        Stopped
            As :meth:`strike_damaged`.
        InputUnreadable
            When the system did not give them for :data:`SILENT_SECONDS`.
        """
        for each in self.held:
            self._wait_until_told(partial(self._check_output, each, signals))
            each.journal.ensure_durable()

    def _check_output(self, each: HeldOutput, signals: Signals) -> None:
        each.check_place()
        output = each.output.path
        if metadata_problems(output, each.output.layout):
            raise OutputRefused(
                f"the metadata of {output} were changed or removed while the run wrote it. "
                f"{repair_command(self.plan)} restores them."
            )
        found = self._damaged(each, each.journal.done, signals, thorough=False)
        if damaged := [number for number, lines in found.items() if UNREADABLE not in "".join(lines)]:
            each.journal.unmark(damaged)
            raise DamagedData(
                f"after the run had written {output}, shards of {counted(len(damaged), 'block')} were changed or removed. "
                "Leave them alone, and run again to do these blocks again."
            )
        for line, *_ in found.values():
            raise unreadable_error(line)

    def _check_input(self) -> None:
        changed = [f"{source.path} {what}" for source in self.plan.sources if (what := source.change())]
        if not changed:
            return
        doubtful = self._at_hand.done.copy()
        doubtful.discard(self._sure)
        self._at_hand.unmark(doubtful)
        again = (
            f"; {_blocks(doubtful)} done since it was last found as it was, may be of either, and will be done again"
            if doubtful
            else ""
        )
        raise InputError(
            f"{' and '.join(changed)} while the run read it{self._title}. {_blocks(self._sure)} done before that{again}. "
            "Put it back as it was, with its times, and run again to go on, or run with --fresh to start over."
        )


def repair_command(plan: Plan) -> str:
    """What repairs the output of a plan."""
    imports = " --allow-import" if plan.documents.asked.get("allow_import") else ""
    return f"`recon-cli verify {shlex.quote(str(plan.output))} --repair{imports}`"


def _blocks(numbers: RangeSet) -> str:
    """How many these are, and which.

    Examples
    --------
    >>> _blocks(RangeSet([3])), _blocks(RangeSet([1, 2, 5])), _blocks(RangeSet())
    ('1 block (3) was', '3 blocks (1-2,5) were', 'no block was')
    """
    if not numbers:
        return "no block was"
    text = numbers.to_text()
    listed = text if len(text) <= LISTED else f"{text[:LISTED].rpartition(',')[0]},…"
    return f"{counted(len(numbers), 'block')} ({listed}) {'was' if len(numbers) == 1 else 'were'}"
