"""One sum over terms: delayed tasks, added up by a tree, written once."""

from __future__ import annotations

import shutil

from dask import delayed

from halotile.errors import Stopped
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.base import Gather
from halotile.graphs.runs.context import RunContext
from halotile.graphs.runs.passes.futures import results
from halotile.graphs.tree_sum import plan_calls
from halotile.graphs.watching.progress import Progress
from halotile.storage.disk.durable import is_full
from halotile.storage.grid import Grid
from halotile.storage.run_directory.checkpoints import Ledger
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.contributions import Part
from halotile.tasks.exact_sums import add_exactly

SPLIT_EVERY = 4
"""Partial sums that one task adds up."""
ONE_BLOCK = Grid((1,), (1,), ((0, 0),))
"""A sum is stored as a whole, or not at all."""


class GatherPass:
    """The state of one sum, which may need several clusters.

    Parameters
    ----------
    wanted : Gather
        The terms, and their work.
    journal : Journal
        Journal of a single block: the sum.
    ledger : Ledger
        Storage of the sums that terms record while they are computed.
    context : RunContext
        The run.
    """

    def __init__(self, wanted: Gather, journal: Journal, ledger: Ledger, context: RunContext) -> None:
        self.wanted = wanted
        self.phase = wanted.work.phase
        self.journal = journal
        self.ledger = ledger
        self.context = context
        self.signals = context.signals
        self.status = context.status
        self.disk_error: str | None = None
        self.untidy = False

    @property
    def done(self) -> int:
        """1 once the sum is stored."""
        return len(self.journal.done)

    def left(self) -> int:
        """Return 1 until the sum is stored."""
        return 1 - len(self.journal.done)

    def progress(self, phase: str) -> Progress:
        """Return the progress of the run."""
        return self.status.progress(phase, done=0, failed=0)

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal came and the sum is not stored."""
        if self.signals.requested and self.left():
            raise Stopped(
                f"stopped on {self.signals.name}{self.wanted.title}, before all terms were added up. Run again to go on.",
                self.signals.name,
            )

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Compute the sum on a cluster.

        Raises
        ------
        TaskFailed
            When an operator fails; with its number.
        Stopped
            When a signal asked for it.
        Stalled, ConnectionError
            When the cluster no longer answers, or lost a worker.
        """
        self.context.outputs.begin(self.journal, self.wanted.title)
        shutil.rmtree(self.wanted.folder, ignore_errors=True)  # left by a run that was killed
        self.wanted.folder.mkdir(parents=True)
        self.status.work_begins()
        self.status.watch.begin(
            ONE_BLOCK, done=self.journal.done, quarantined=(), phase=self.phase, title=self.wanted.title
        )
        try:
            (part,) = self._results(cluster)
            sums = {name: [add_exactly(values.values())] for name, values in part.sums.items()}
            self.ledger.enter({0: sums})
            self.journal.mark({0: part.digest})
        except FileNotFoundError as error:
            raise ConnectionError(f"a partial sum was lost with its worker ({error}).") from error
        except OSError as error:
            if not is_full(error):
                raise
            self.disk_error = str(error)
            return
        finally:
            shutil.rmtree(self.wanted.folder, ignore_errors=True)
        self.context.outputs.check()
        self.status.count_memory(part.peak_memory_bytes)

    def _results(self, cluster: RunningCluster) -> list[Part]:
        gather = self.wanted
        (total,) = plan_calls(gather.work, gather.terms, SPLIT_EVERY, cluster.workers, gather.read_bytes)
        write = delayed(gather.work.keep)(total, dask_key_name=f"write-{total.key}")
        options = self.context.plan.run
        futures = cluster.client.compute([write], optimize_graph=False, retries=options.retries)
        return results(cluster.client, futures, options.stall_seconds, between=self._between)

    def _between(self) -> None:
        """While tasks run: react to signals, report the progress."""
        self.stop_if_asked()
        self.context.outputs.look()
        self.status.notify(self.progress(self.phase))
