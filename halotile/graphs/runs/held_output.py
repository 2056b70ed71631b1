"""Claimed outputs during their run: checks that directories stay in place, and that the input is unchanged."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halotile.errors import DamagedData, InputError, InputUnreadable, OutputRefused, Stopped
from halotile.graphs.kinds.base import JobOutput
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs.records import RecordedImage
from halotile.graphs.runs.signals import Signals
from halotile.graphs.words import counted
from halotile.storage.disk.durable import GONE
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.run_directory.object_claim import ObjectClaim
from halotile.storage.sharded.output import UNREADABLE, FileLayout
from halotile.storage.sharded.ownership import REPLACE, foreign_pixels_reason, mark_complete, remove_added_levels
from halotile.storage.stored_array import read_error, unreadable_error

LOOK_SECONDS = 5.0  # interval of the checks of the output's directory and the input
LOOK_SHARE = 0.01  # largest share of a run's time for these checks
# Time without an answer from the file system before the run ends: network file systems recover, tickets are renewed.
SILENT_SECONDS = 60.0
LISTED = 300  # most characters of block numbers in a message


@dataclass(frozen=True)
class HeldFolder:
    """A folder that is open: as long as it is open, no other folder gets its number."""

    path: Path  # folder
    descriptor: int  # its file descriptor

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[HeldFolder]:
        """Hold a folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def change(self) -> str:
        """Describe another folder in its place; empty where it is there. Raises OSError where none is."""
        same = os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        return "" if same else "is no longer the directory that the run began to write"


@dataclass(frozen=True)
class HeldOutput(RecordedImage):
    """One output while its run holds it."""

    hold: HeldFolder | ObjectClaim  # its folder, or its claim in a store

    def check_place(self) -> None:
        """Raise where the directory that was claimed is no longer in its place."""
        try:
            change = self.hold.change()
            if not change:
                return
        except GONE as error:
            change = f"was moved or removed ({error.strerror})"
        except OSError as error:
            raise read_error(f"{self.path}: it cannot be looked at", error) from error
        raise OutputRefused(
            f"{self.path} {change}: some finished blocks are missing there. Put it back and run again to go on, or run with --fresh "
            "to start over."
        )


class HeldOutputs:
    """The outputs of one run while it holds them.

    Parameters
    ----------
    plan : Plan
        The plan of the run.
    held : tuple of HeldOutput
        Each output.
    """

    def __init__(self, plan: Plan, held: tuple[HeldOutput, ...]) -> None:
        self.plan = plan
        self.held = held
        self._next = time.monotonic() + LOOK_SECONDS
        self._silent_since: float | None = None
        self._at_hand, self._title = held[0].journal, ""
        self._certain = self._at_hand.done.copy()
        """Blocks of the current pass that were done when the input was last seen unchanged."""

    def journal_of(self, output: JobOutput) -> Journal:
        return next(held.journal for held in self.held if held.path == output.path)

    @property
    def done(self) -> int:
        """Number of blocks of all outputs that are done."""
        return sum(len(held.journal.done) for held in self.held)

    def sync(self) -> None:
        """Make every journal durable."""
        for held in self.held:
            held.journal.sync()

    def begin(self, journal: Journal, title: str) -> None:
        """Begin a pass that records its blocks in ``journal``; ``title`` follows a message about the pass."""
        if journal is not self._at_hand:
            self._at_hand, self._certain = journal, journal.done.copy()
        self._title = title

    def check_in_time(self) -> bool:
        """Check from time to time: every few seconds, and less often where a check takes long; return True where all is as it was."""
        return time.monotonic() >= self._next and self._is_checked(self._check)

    def check(self) -> None:
        """Raise where the output is no longer there, or the input has changed."""
        self._wait_until_checked(self._check)

    def _wait_until_checked(self, check: Callable[[], None]) -> None:
        while not self._is_checked(check):
            time.sleep(LOOK_SECONDS)

    def _is_checked(self, check: Callable[[], None]) -> bool:
        """Return True where the file system answered a check; until it does, blocks are not certain."""
        began = time.monotonic()
        try:
            check()
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
        self._certain = self._at_hand.done.copy()
        now = time.monotonic()
        self._next = now + max(LOOK_SECONDS, (now - began) / LOOK_SHARE)

    def check_place(self) -> None:
        """Raise where an output is no longer in its place; as :meth:`HeldOutput.check_place`."""
        for held in self.held:
            held.check_place()

    def unmark_all(self) -> int:
        """Remove every block from the journals, and the levels that were added to them; return the number of these."""
        removed = 0
        for held in self.held:
            removed += remove_added_levels(held.path, held.layout)
            self._unmark(held, list(held.journal.done))
        return removed

    def unmark_damaged(self, signals: Signals, *, thorough: bool, only: Sequence[RangeSet] | None = None) -> int:
        """Remove done blocks from the journals where outputs differ from what was written; return their number.

        ``signals``: signals that may ask to stop meanwhile; ``thorough``: read every byte, not only the checksums in each file; ``only``: blocks of
        each output to check; by default all that are done.
        """
        looked_at = [held.journal.done for held in self.held] if only is None else only
        damaged_of_outputs = [
            self._damaged(held, numbers, signals, thorough=thorough)
            for held, numbers in zip(self.held, looked_at, strict=True)
        ]
        for held, damaged in zip(self.held, damaged_of_outputs, strict=True):
            self._unmark(held, damaged)
        return sum(map(len, damaged_of_outputs))

    def _unmark(self, held: HeldOutput, numbers: Iterable[int]) -> None:
        """Remove blocks from a journal: until they are done again, no input is known to be theirs."""
        if isinstance(held.hold, ObjectClaim):
            held.hold.mark(is_finished=False)
        held.journal.unmark(numbers)
        if held.journal is self._at_hand:
            self._certain.discard(numbers)

    def _damaged(
        self, held: HeldOutput, numbers: RangeSet, signals: Signals, *, thorough: bool
    ) -> dict[int, list[str]]:
        """Return the problems of damaged blocks; refuse an output that holds another result."""

        def until_asked() -> Iterator[int]:
            for number in numbers:
                if signals.requested if thorough else signals.hurried:
                    raise Stopped(
                        f"stopped on {signals.name} while the blocks that are done were checked. Run again to go on.",
                        signals.name,
                    )
                yield number

        problems = held.damaged(until_asked(), thorough=thorough)
        if difference := foreign_pixels_reason(problems, len(numbers)):
            raise OutputRefused(
                f"{held.path} is not what this run wrote there: {difference}. {REPLACE} "
                f"{repair_command(self.plan)} does these blocks again in its place."
            )
        return problems

    def finish(self, signals: Signals) -> None:
        """Refuse to finish where outputs differ from what was written. The input was checked after each pass."""
        for held in self.held:
            self._wait_until_checked(partial(self._check_output, held, signals))
            held.journal.ensure_durable()
            if len(held.journal.done) == held.journal.total:
                with suppress(OSError):  # a full disk costs the mark, and nothing else
                    mark_complete(held.path, held.layout)
                if isinstance(held.hold, ObjectClaim):
                    held.hold.mark(is_finished=True)

    def _check_output(self, held: HeldOutput, signals: Signals) -> None:
        held.check_place()
        output = held.path
        if held.metadata_problems():
            raise OutputRefused(
                f"the metadata of {output} were changed or removed while the run wrote it. "
                f"{repair_command(self.plan)} restores them."
            )
        problems = self._damaged(held, held.journal.done, signals, thorough=False)
        if damaged := [number for number, lines in problems.items() if UNREADABLE not in "".join(lines)]:
            held.journal.unmark(damaged)
            if isinstance(held.layout, FileLayout):
                raise DamagedData(
                    f"after the run had written {output}, it was emptied or removed. {repair_command(self.plan)} writes it again."
                )
            raise DamagedData(
                f"after the run had written {output}, shards of {counted(len(damaged), 'block')} were changed or removed. "
                "Leave them alone, and run again to do these blocks again."
            )
        for line, *_ in problems.values():
            raise unreadable_error(line)

    def _check_input(self) -> None:
        changed = [f"{source.path} {change}" for source in self.plan.sources if (change := source.change())]
        if not changed:
            return
        doubtful = self._at_hand.done.copy()
        doubtful.discard(self._certain)
        self._at_hand.unmark(doubtful)
        advice = (
            f"; {_blocks(doubtful)} done since it was last found unchanged, may come from either version, and will be recomputed"
            if doubtful
            else ""
        )
        raise InputError(
            f"{' and '.join(changed)} while the run read it{self._title}. {_blocks(self._certain)} done before that{advice}. "
            "Restore the file with its modification time and run again to continue, or run with --fresh to start over."
        )


def repair_command(plan: Plan) -> str:
    """Return the command that repairs the output of a plan."""
    imports = " --allow-import" if plan.documents.asked.get("allow_import") else ""
    return f"`recon-cli verify {shlex.quote(str(plan.output))} --repair{imports}`"


def _blocks(numbers: RangeSet) -> str:
    """Return the count of blocks and their numbers as text.

    >>> _blocks(RangeSet([3])), _blocks(RangeSet([1, 2, 5])), _blocks(RangeSet())
    ('1 block (3) was', '3 blocks (1-2,5) were', 'No block was')
    """
    if not numbers:
        return "No block was"
    text = numbers.to_text()
    listed = text if len(text) <= LISTED else f"{text[:LISTED].rpartition(',')[0]},…"
    return f"{counted(len(numbers), 'block')} ({listed}) {'was' if len(numbers) == 1 else 'were'}"
