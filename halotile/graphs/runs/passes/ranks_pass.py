"""A program of ranks: one on each worker, all or none, ended together; it goes on from its checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from dask import delayed

from halotile.errors import InputError, InputUnreadable, RankFailed, Stalled
from halotile.graphs.amounts import first_line
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common.answers import present_workers
from halotile.graphs.kinds.base import Gather, RankProgram
from halotile.graphs.runs.passes.stream import results
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, call_with_group, is_final
from halotile.graphs.runs.session import ClusterPass
from halotile.graphs.tree_sum import plan_calls
from halotile.storage.disk.durable import is_full, refusing_full
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.sharded.shards import digest_of
from halotile.tasks.block import ONE_BLOCK, peak_memory_bytes
from halotile.tasks.exact_sums import add_exactly
from halotile.tasks.terms import Part

SPLIT_EVERY = 4
"""Partial sums that one task adds up."""


class GatherPass(ClusterPass[Gather]):
    """The state of one sum."""

    done = 0  # progress leaves it out

    if_stopped = ", before all terms were added up. Run again to go on."

    @property
    def phase(self) -> str:
        """Prefix of the tasks."""
        return self.wanted.work.phase

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Compute the sum on a cluster."""
        self.outputs.begin(self.journal, self.wanted.title)
        shutil.rmtree(self.wanted.folder, ignore_errors=True)  # left by a run that was killed
        self.wanted.folder.mkdir(parents=True)
        self.status.work_begins()
        self.status.watch.begin(ONE_BLOCK, self.journal.done, (), self.phase, self.wanted.title)
        try:
            (part,) = self._results(cluster)
            sums = {name: [add_exactly(values.values())] for name, values in part.sums.items()}
            self.record({0: sums}, {0: part.digest})
        except FileNotFoundError as error:
            raise ConnectionError(f"a partial sum was lost with its worker ({error}).") from error
        except OSError as error:
            if not is_full(error):
                raise
            self.disk_error = str(error)
            return
        finally:
            shutil.rmtree(self.wanted.folder, ignore_errors=True)
        self.outputs.check()
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
        self.outputs.look()
        self.status.notify(self.progress(self.phase))


ENDED = digest_of([])
"""Digest of the steps: what they give is in the checkpoint, which has one of its own."""
PATIENCE = 0.5
"""Longest wait of a rank for the others, which may read or validate, as a share of ``run.stall_seconds``: a rank that hangs is named by those
that wait for it before the driver, which misses a step alone, gives up the cluster."""
ADVICE = "Where a rank works that long without the others, raise run.stall_seconds: they wait for half of it."


class RanksPass(ClusterPass[RankProgram]):
    """The state of one program. Its disk is never full here: a rank raises that."""

    if_stopped = ". Run again to go on from the last checkpoint."
    moved: tuple[int, float]
    """Number of steps when it was last seen to change, and the time."""

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return self.wanted.look()

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Run the program on a cluster, again from its checkpoint where a rank failed."""
        self.outputs.begin(self.journal, self.wanted.title)
        self.status.work_begins()
        self.wanted.records.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._attempts(cluster)
            self.outputs.check()
        except BaseException:
            self._take_back_doubtful()
            raise
        self.record({0: {}}, {0: ENDED})
        self.status.notify(self.progress(self.phase))

    def _attempts(self, cluster: RunningCluster) -> None:
        failures = 0
        while True:
            before = self.done
            self.moved = before, time.monotonic()
            try:
                return self._attempt(cluster)
            except RankFailed as error:
                self.context.directory.path.stat()  # where it is gone, no rank is the cause: the lock has words for that
                failures = 1 if self.done > before else failures + 1
                if is_final(error) or failures > self.context.plan.run.retries:
                    raise (error.__cause__ or error) from None  # an error with words needs no traceback
                said = first_line(str(error)).rstrip(".")
                self.status.report(f"{said}. Going on from the last checkpoint.\n{error}")

    def _attempt(self, cluster: RunningCluster) -> None:
        directory, run = self.context.directory, self.context.plan.run
        mode = "cpu" if self.wanted.device == "cpu" else "gpu"
        given = self.wanted.program, directory, directory.driver()
        call = partial(call_with_group, _peak_of, given)
        program = TorchProgram(
            call,
            self.wanted.records.folder,
            device_mode=mode,
            timeout_seconds=PATIENCE * run.stall_seconds,
            advice=ADVICE,
            report=self.status.report,
        )
        count = min(cluster.workers, run.count)
        if (present := len(present_workers(cluster.client))) < count:
            self.status.report(
                f"{present} of {count} workers are connected: the program starts within a minute, with those connected by then"
            )
        peaks = program.run(cluster.client, None, 0, count, between=self._between)
        for peak in peaks:
            self.status.count_memory(peak)

    def _between(self) -> None:
        """While the ranks work: react to signals, check the input, report the progress."""
        self.stop_if_asked()
        if self.outputs.look():
            self.wanted.keep()
        self.status.notify(self.progress(self.phase))
        steps, since = self.moved
        if (done := self.done) != steps:
            self.moved = done, time.monotonic()
        elif time.monotonic() - since > self.context.plan.run.stall_seconds:
            raise Stalled(f"no step ended for {time.monotonic() - since:.0f} s{self.wanted.title}.")

    def _take_back_doubtful(self) -> None:
        """Take back the steps since the input was last known to be as it was, unless it still is."""
        try:
            is_changed = any(source.change() for source in self.context.plan.sources)
        except InputUnreadable:
            is_changed = False  # nobody read anything else meanwhile
        except InputError:
            is_changed = True
        if is_changed:
            with suppress(OSError):
                self.wanted.revert()


@refusing_full("a rank cannot keep what it has computed")
def _peak_of(group: Any, program: Callable[[Any], None], directory: RunDirectory, driver: Mapping[str, Any]) -> int:
    """Run the program as a rank of a group; return the peak memory of this worker."""
    lock = WorkerLock(directory.path)
    lock.hold(dict(driver))
    try:
        program(group)
    finally:
        lock.release()
    return peak_memory_bytes()
