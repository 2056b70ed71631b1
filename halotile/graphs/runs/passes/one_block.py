"""The state that passes with a journal of a single block share."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from halotile.errors import Stopped
from halotile.graphs.kinds.base import Gather, RankProgram
from halotile.graphs.runs.context import RunContext
from halotile.storage.run_directory.checkpoints import Ledger
from halotile.storage.run_directory.journal import Journal

Wanted = TypeVar("Wanted", bound=Gather | RankProgram)


class OneBlockPass(Generic[Wanted]):
    """A pass that is done as a whole, or not at all; it may need several clusters.

    Parameters
    ----------
    wanted : Gather or RankProgram
        The work.
    journal, ledger : Journal, Ledger
        Records of the single block.
    context : RunContext
        The run.
    """

    if_stopped: ClassVar[str]
    """End of the message of a stop."""

    def __init__(self, wanted: Wanted, journal: Journal, ledger: Ledger, context: RunContext) -> None:
        self.wanted = wanted
        self.journal = journal
        self.ledger = ledger
        self.context = context
        self.status = context.status
        self.disk_error: str | None = None
        self.untidy = False

    @property
    def done(self) -> int:
        """1 once the block is done."""
        return len(self.journal.done)

    def left(self) -> int:
        """Return 1 until the block is done."""
        return 1 - len(self.journal.done)

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal came and the block is not done."""
        signals = self.context.signals
        if signals.requested and self.left():
            raise Stopped(f"stopped on {signals.name}{self.wanted.title}{self.if_stopped}", signals.name)
