"""A program of ranks: one on each worker, all or none, ended together; it goes on from its checkpoint."""

from __future__ import annotations

from functools import partial

from halotile.errors import InputError, RankFailed, Stopped
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.base import RankProgram
from halotile.graphs.runs.context import RunContext
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, call_with_group
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.shards import digest_of

ENDED = digest_of([])
"""Digest of the steps: what they give is in the checkpoint, which has one of its own."""
TIMEOUT_SECONDS = 300.0
"""Longest wait of a rank for the others, which may read or validate."""


class RanksPass:
    """The state of one program, which may need several clusters.

    Parameters
    ----------
    wanted : RankProgram
        The program.
    journal : Journal
        Journal of a single block: all steps.
    context : RunContext
        The run.
    """

    def __init__(self, wanted: RankProgram, journal: Journal, context: RunContext) -> None:
        self.wanted = wanted
        self.phase = wanted.phase
        self.journal = journal
        self.context = context
        self.signals = context.signals
        self.status = context.status
        self.disk_error: str | None = None
        self.untidy = False

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return self.wanted.look()

    def left(self) -> int:
        """Return 1 until the program has ended."""
        return 1 - len(self.journal.done)

    def progress(self, phase: str) -> Progress:
        """Return the progress of the run."""
        return self.status.progress(phase, done=self.done, failed=0)

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal came and the program has not ended."""
        if self.signals.requested and self.left():
            raise Stopped(
                f"stopped on {self.signals.name}{self.wanted.title}. Run again to go on from the last checkpoint.",
                self.signals.name,
            )

    def through(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Run the program on a cluster.

        Raises
        ------
        RankFailed
            When a rank failed in every attempt.
        HalotileError
            Of a rank, where another attempt would not help.
        Stopped
            When a signal asked for it.
        ConnectionError
            When the cluster no longer answers.
        """
        outputs, run = self.context.outputs, self.context.plan.run
        outputs.begin(self.journal, self.wanted.title)
        self.status.work_begins()
        folder = self.wanted.books.folder
        folder.mkdir(parents=True, exist_ok=True)
        mode = "cpu" if self.wanted.device == "cpu" else "gpu"
        call = partial(call_with_group, self.wanted.program, ())
        program = TorchProgram(call, folder, device_mode=mode, timeout_seconds=TIMEOUT_SECONDS)
        try:
            count = min(cluster.workers, run.count)
            program.run(cluster.client, None, run.retries, count, between=self._between)
            outputs.check()
        except RankFailed as error:
            raise (error.__cause__ or error) from None  # the user's own fault needs no traceback
        except InputError:
            self.wanted.forget()
            raise
        self.journal.mark({0: ENDED})
        self.status.notify(self.progress(self.phase))

    def _between(self) -> None:
        """While the ranks work: react to signals, report the progress."""
        self.stop_if_asked()
        self.context.outputs.look()
        self.status.notify(self.progress(self.phase))
