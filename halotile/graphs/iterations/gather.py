"""A sum over operators that see the whole image: delayed tasks, added up by a tree, written once."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from dask import delayed

from halotile.errors import Stopped
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.futures import results
from halotile.graphs.jobs.sections import Run
from halotile.graphs.runs.held_output import Claimed
from halotile.graphs.runs.progress import Progress
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import StatusFile
from halotile.graphs.tree_sum import plan_calls
from halotile.storage.disk.durable import is_full
from halotile.storage.run_directory.checkpoints import Ledger
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.contributions import Adding, Contributions, Part
from halotile.tasks.exact_sums import add_exactly

PHASE = "adjoint"
SPLIT_EVERY = 4
"""Partial sums that one task adds up."""


class Gathering:
    """One sum, which may take several clusters: it is there as a whole, or not at all.

    Parameters
    ----------
    wanted : Contributions
        What is added up.
    writer : ShardWriter
        Where the sum goes.
    folder : Path
        Where partial sums lie for as long as they are needed.
    options : Run
        How often a task is tried, and how long one may take.
    claimed : Claimed
        The output, which is looked after on the way.
    journal, ledger
        Of one block: the sum, with what is noted on the way to it.
    signals : Signals
        What the driver was asked.
    status : StatusFile
        Whom to tell.
    title : str
        Which of several sums it is, such as ``" in iteration 3 of 20"``.
    import_folder : str, optional
        Where imports of the user's own code start from.
    """

    phase = PHASE

    def __init__(
        self,
        wanted: Contributions,
        *,
        writer: ShardWriter,
        folder: Path,
        options: Run,
        claimed: Claimed,
        journal: Journal,
        ledger: Ledger,
        signals: Signals,
        status: StatusFile,
        title: str = "",
        import_folder: str | None = None,
    ) -> None:
        self.wanted = wanted
        self.writer = writer
        self.folder = folder
        self.options = options
        self.claimed = claimed
        self.journal = journal
        self.ledger = ledger
        self.signals = signals
        self.status = status
        self.title = title
        self.import_folder = import_folder
        self.disk_error: str | None = None
        self.untidy = False
        self.most_alive = 0
        """The largest number of partial sums that lay on the disk at once."""

    def left(self) -> int:
        """1 until the sum is there."""
        return 1 - len(self.journal.done)

    def progress(self, phase: str) -> Progress:
        """How far the run is."""
        return self.status.progress(phase, done=0, failed=0)

    def stop_if_asked(self) -> None:
        """Raise :class:`Stopped` when a signal came and the sum is not there."""
        if self.signals.requested and self.left():
            raise Stopped(
                f"stopped on {self.signals.name}{self.title}, before the operators were added up. Run again to go on.",
                self.signals.name,
            )

    def through(self, cluster: Cluster, *, preparing: str = "start") -> None:
        """Compute it on a cluster.

        Raises
        ------
        TaskFailed
            When an operator fails; with its number.
        Stopped
            When a signal asked for it.
        Stalled, ConnectionError
            When the cluster no longer answers, or lost a worker.
        """
        self.claimed.begin(self.journal, self.title)
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
        self.folder.mkdir(parents=True)
        self.status.work_begins()
        self.status.watch.begin((1,), done=self.journal.done, quarantined=(), phase=PHASE, title=self.title)
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
            shutil.rmtree(self.folder, ignore_errors=True)
        self.claimed.check()
        self.most_alive = part.alive
        self.status.peak_memory_bytes = max(self.status.peak_memory_bytes, part.peak_memory_bytes)

    def _results(self, cluster: Cluster) -> list[Part]:
        adding = Adding(
            PHASE, str(self.folder), self.wanted.image, self.wanted.wants, self.writer, self.import_folder
        )
        image_bytes = math.prod(self.wanted.shape) * self.wanted.image.dtype.itemsize
        (total,) = plan_calls(adding, self.wanted.numbered(), SPLIT_EVERY, cluster.workers, image_bytes)
        kept = delayed(adding.keep)(total, dask_key_name=f"write-{total.key}")
        futures = cluster.client.compute([kept], optimize_graph=False, retries=self.options.retries)
        return results(cluster.client, futures, self.options.stall_seconds, between=self._between)

    def _between(self) -> None:
        """While tasks run: heed signals, tell how far it is."""
        self.stop_if_asked()
        self.claimed.look()
        self.status.tell(self.progress(self.phase))
