"""Passes on a cluster: blocks in a bounded stream, sums of terms as a tree, and programs of torch ranks."""

import itertools
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from dask import delayed
from distributed import KilledWorker

from halotile import errors
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common.answers import present_workers
from halotile.graphs.clusters.common.security import host_of
from halotile.graphs.kinds.base import Gather, JobOutput, Pass, RankProgram
from halotile.graphs.runs.passes.stream import Answer, Grouping, Stream, results, workers_of
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, call_with_group, is_final
from halotile.graphs.runs.passes.worker_setup import BlockPlugin, prepared, run_blocks
from halotile.graphs.runs.session import ClusterPass
from halotile.graphs.runs.status import RunContext
from halotile.graphs.tree_sum import plan_calls
from halotile.graphs.words import counted, first_line
from halotile.storage.disk.durable import is_full, refusing_full
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.sharded.shards import DIGEST_BYTES, digest_of
from halotile.tasks.block import ONE_BLOCK, BadBlock, Receipt, peak_memory_bytes
from halotile.tasks.exact_sums import add_exactly
from halotile.tasks.terms import Part

TASK_SECONDS = 1.0  # minimum duration of a task where no time is lost between two tasks
SYNC_SECONDS = 5.0
MOST_BLAME = 3  # blocks that a worker may fail in a row while others can do them
LOOK_SECONDS = 0.5
RESTART_SECONDS = 60.0  # time in which a lost worker of this machine is back
SILENCE_SECONDS = 10.0  # time without an answer after which the pass checks that there are still workers


class BlockPass(ClusterPass[Pass]):
    """The state of one pass over blocks.

    Parameters
    ----------
    bad : mapping, optional
        Blocks that have been given up already.
    seconds_per_block : float, optional
        Duration of a block in an earlier pass of this phase; of this one, once it is finished.
    others : sequence of Journal, optional
        Journals of further outputs that each block is written to: a block is done where all journals have it.
    """

    def __init__(
        self,
        job_pass: Pass,
        journal: Journal,
        ledger: Ledger | None,
        context: RunContext,
        *,
        bad: Mapping[int, BadBlock] | None = None,
        seconds_per_block: float | None = None,
        others: Sequence[Journal] = (),
    ) -> None:
        super().__init__(job_pass, journal, ledger, context)
        self.others = others
        self.task = job_pass.task
        self.total = len(job_pass.grid) if job_pass.blocks is None else min(job_pass.blocks, len(job_pass.grid))
        self.options = context.plan.run
        self.directory = context.directory
        self.task_seconds = job_pass.task_seconds or TASK_SECONDS
        self.seconds_per_block = seconds_per_block or job_pass.seconds_per_block
        self.bad |= bad or {}
        self.failed_on: dict[int, list[str]] = {}
        """Workers on which a block failed."""
        self.blamed: Counter[str] = Counter()
        """Number of receipts of other workers, since a worker's last success, with blocks that failed there."""
        self.unready: dict[str, BaseException] = {}
        """Errors of the workers that cannot load the job."""
        self.faults: dict[str, tuple[str, str]] = {}
        """Host and last error of a worker on which a block failed."""
        self.synced = time.monotonic()
        self._missing: str | None = None

    @property
    def counted(self) -> int:
        return self.done * (1 + len(self.others))

    def record(self, sums: Mapping[int, Mapping[str, Any]], digests: Mapping[int, bytes]) -> None:
        """Record blocks as done, in the first journal last: it decides what is left."""
        if not self.others:
            super().record(sums, digests)
            return
        for place, journal in reversed([*enumerate((self.journal, *self.others))]):
            part = slice(place * DIGEST_BYTES, (place + 1) * DIGEST_BYTES)
            journal.mark({number: digest[part] for number, digest in digests.items()})

    @property
    def if_stopped(self) -> str:
        return f" with {self.done} of {counted(len(self.task.grid), 'block')} done. Run again to go on."

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Process the remaining blocks on a cluster."""
        self.outputs.begin(self.journal, self.job_pass.title)
        token = uuid.uuid4().hex[:12]
        plugin = BlockPlugin(token, self.task, self.directory.path, self.context.plan.job.import_folder)
        with ExitStack() as stack:
            with self.status.ticking(partial(self.progress, preparing)):
                setup = prepared(cluster.client, plugin, self.stop_if_asked, workers=cluster.workers)
                for error in stack.enter_context(setup):
                    self._exclude(error)
            self.stop_if_asked()
            watch, title = self.status.watch, self.job_pass.title
            watch.begin(self.task.grid, self.journal.done, self.bad, self.phase, title, self.job_pass.records)
            self._pass_through(cluster, token)
        self.outputs.check()
        if not self.disk_error:
            self.stop_if_asked()

    def _pass_through(self, cluster: RunningCluster, token: str) -> None:
        least = 4 if self.task.overlap else 1
        grouping = Grouping(
            cluster.workers,
            self.task_seconds,
            least=least,
            seconds_per_block=self.seconds_per_block,
            keeps_all=self.task_seconds > TASK_SECONDS,
        )
        stream = Stream(
            cluster.client,
            partial(run_blocks, token=token, directory=self.directory),
            name=self.phase,
            grouping=grouping,
            iteration=self.job_pass.iteration,
            stall_seconds=self.options.stall_seconds,
            limited=True,
            between=self._stop_if_hurried,
        )
        self.status.work_begins()
        self.status.watch.in_flight = stream.in_flight
        self._cluster = cluster
        self._find_fit(stream)
        present = workers_of(cluster.client)
        began = time.perf_counter()
        try:
            for answers in stream.answers(self._remaining(), self.left()):
                for answer in sorted(answers, key=lambda answer: answer.error is not None):
                    self._process_answer(answer, stream)
                self._watch(stream)
                if not answers and stream.silent_seconds > SILENCE_SECONDS:
                    self._check_workers(cluster, stream)
            # A scheduler that the user started may have sent a lost worker's tasks elsewhere by itself.
            self.untidy |= not present <= workers_of(cluster.client)
        finally:
            self.seconds += time.perf_counter() - began
            self.seconds_per_block = grouping.seconds_per_block
            self.untidy |= stream.lost > 0
            stream.abandon()

    def _check_workers(self, cluster: RunningCluster, stream: Stream) -> None:
        """Check for workers: where all are lost, others may be queued, and the blocks are not the cause."""
        if (missing := cluster.missing()) is not None:
            cluster.check()
            stream.be_patient()
            if missing != self._missing:
                self.status.report(f"there are no workers: {missing}")
        self._missing = missing

    def _remaining(self) -> Iterator[int]:
        todo = self.journal.done.complement(self.total)
        return itertools.filterfalse(self.bad.__contains__, iter(todo))

    def _process_answer(self, answer: Answer, stream: Stream) -> None:
        """Process an answer: good blocks go into the journal, bad ones back into the stream."""
        if answer.error is not None:
            self._handle_failed_task(answer, stream)
            return
        receipt: Receipt = answer.result
        self._mark(receipt, stream)
        self._judge(receipt, stream)
        self.status.count(receipt)
        before = self.status.batch or self.task.batch
        if 0 < receipt.batch < before:
            self.status.batch_fell(receipt.batch, before)
        self.status.note_arithmetic(receipt)
        for bad in receipt.bad:
            self.faults[receipt.worker] = receipt.host, bad.error
            self._retry(bad, stream, receipt.worker)
        begun_blocks = {*receipt.done, *(bad.number for bad in receipt.bad)}
        stream.hand_back(number for number in answer.numbers if number not in begun_blocks)

    def _judge(self, receipt: Receipt, stream: Stream) -> None:
        """Blame the workers that failed where this one succeeded; retire one that fails again and again."""
        if receipt.done:
            del self.blamed[receipt.worker]
        for worker in {worker for number in receipt.done for worker in self.failed_on.pop(number, ())}:
            self.blamed[worker] += worker in self.faults and worker != receipt.worker
            if self.blamed[worker] >= MOST_BLAME:
                host, error = self.faults[worker]
                self.status.retire(worker, host, f"blocks fail there that others can do ({error})")
                self._find_fit(stream)

    def _exclude(self, error: BaseException) -> None:
        """Exclude a worker that cannot load the job."""
        if not isinstance(error, errors.JobNotLoaded):
            raise error
        worker, host, cause = error.args
        self.unready[worker] = cause
        self.status.retire(worker, host, f"the job cannot be loaded there ({type(cause).__name__}: {cause})")

    def _find_fit(self, stream: Stream) -> set[str]:
        """Return the workers that are given blocks; without any, those that failed blocks are tried again."""
        retired = self.status.retired
        present = workers_of(stream.client)
        stream.look_after_tied(present)
        while present and present <= self.unready.keys():
            self._await_another(present, stream)
            present = workers_of(stream.client)
        if present <= retired.keys():
            for worker in present - self.unready.keys():
                del retired[worker]
        fit = present - retired.keys()
        stream.fit = fit if fit != present else None
        return fit

    def _await_another(self, present: set[str], stream: Stream) -> None:
        """Wait for a worker besides those that cannot load the job; raise the error of one of them where none will come."""
        workers = len(present) + 1
        last = time.monotonic() + RESTART_SECONDS
        with self.status.ticking(partial(self.progress, self.phase)):
            while workers_of(stream.client) == present:
                self.stop_if_asked()
                self.outputs.check_in_time()
                missing = self._cluster.missing(workers)
                if missing and missing != self._missing:
                    self.status.report(f"waiting for another worker, since no present one can load the job: {missing}")
                self._missing = missing
                with suppress(errors.ClusterFailed):
                    self._cluster.check(workers)
                    if workers <= self._cluster.workers and (missing or time.monotonic() < last):
                        time.sleep(LOOK_SECONDS)
                        continue
                raise self.unready[present.pop()]
        stream.be_patient()

    def _elsewhere(self, number: int, stream: Stream) -> set[str]:
        """Return workers for a block that failed: of other hosts if possible, else others."""
        fit, failed = self._find_fit(stream), self.failed_on[number]
        hosts = {host_of(worker) for worker in failed}
        return {worker for worker in fit if host_of(worker) not in hosts} or fit.difference(failed) or fit

    def _mark(self, receipt: Receipt, stream: Stream) -> None:
        try:
            sums = {number: receipt.sums.get(number, {}) for number in receipt.done}
            self.record(sums, {number: receipt.digests[number] for number in receipt.done})
        except OSError as error:
            if not is_full(error):
                raise
            self._stop_at_full_disk(f"{error} (the journal)", stream)

    def _stop_at_full_disk(self, error: str, stream: Stream) -> None:
        self.disk_error = error
        stream.drain()

    def _handle_failed_task(self, answer: Answer, stream: Stream) -> None:
        """Handle a task that failed as a whole. If it was a single block, that block is the cause."""
        error = answer.error
        if isinstance(error, errors.JobNotLoaded):
            self._exclude(error)
            self._find_fit(stream)
            stream.hand_back(answer.numbers)
            return
        # Failures caused by blocks come in a receipt: this worker could not be set up, and none after it will be.
        if isinstance(error, ConnectionError | errors.ConfigError | errors.WeightsError):
            raise error
        if len(answer.numbers) > 1:
            stream.again(answer.numbers)
            return
        block = self.task.grid.block_at(answer.numbers[0])
        if isinstance(error, KilledWorker):
            text = (
                "every worker that computed it died. If memory ran out, write a larger run.memory_per_worker, "
                "or smaller tiles or shards"
            )
        else:
            text = f"{type(error).__name__}: {error}"
        bad = BadBlock(block.number, block.index, block.core, text, str(error), "task")
        worker = getattr(getattr(error, "last_worker", None), "address", "")
        self._retry(bad, stream, worker, alone=answer.alone)

    def _retry(self, bad: BadBlock, stream: Stream, worker: str, *, alone: bool = False) -> None:
        with suppress(errors.InputUnreadable):
            self.outputs.check_place()  # where the output is gone, no block is the cause
        if bad.kind == "disk":
            self._stop_at_full_disk(bad.error, stream)
            return
        failed = self.failed_on.setdefault(bad.number, [])
        failed.append(worker)
        tried = sum(each not in self.status.retired for each in failed)
        # Input that was refused once is refused again.
        if bad.kind != "input" and tried <= self.options.retries:
            self.status.retry(bad)
            stream.again([bad.number], alone=alone, workers=self._elsewhere(bad.number, stream))
            return
        self.bad[bad.number] = bad
        records = self.job_pass.records
        self.status.give_up(bad, records if isinstance(records, JobOutput) else None)

    def _watch(self, stream: Stream) -> None:
        """Between answers: react to signals, sync the journal, report the progress."""
        if self.signals.requested and not stream.draining:
            stream.drain()
            self.directory.request_stop()
            self.status.report(f"{self.signals.name}: finishing the blocks in flight, starting no more")
        self._stop_if_hurried()
        if time.monotonic() - self.synced > SYNC_SECONDS:
            for journal in (*self.others, self.journal):
                journal.sync()
            if self.failed_on or self.status.retired:
                self._find_fit(stream)
            self.synced = time.monotonic()
        self.outputs.check_in_time()
        self.status.notify(self.progress("drain" if stream.draining else self.phase))

    def _stop_if_hurried(self) -> None:
        if self.signals.hurried:
            self.untidy = True
            self.status.report("no time is left for the blocks in flight: they are given up, and done again later")
            self.stop_if_asked()


SPLIT_EVERY = 4  # partial sums that one task adds up


class GatherPass(ClusterPass[Gather]):
    """The state of one sum."""

    done = 0  # progress leaves it out

    if_stopped = ", before all terms were added up. Run again to go on."

    @property
    def phase(self) -> str:
        """Prefix of the tasks."""
        return self.job_pass.work.phase

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Compute the sum on a cluster."""
        self.outputs.begin(self.journal, self.job_pass.title)
        shutil.rmtree(self.job_pass.folder, ignore_errors=True)  # left by a run that was killed
        self.job_pass.folder.mkdir(parents=True)
        self.status.work_begins()
        self.status.watch.begin(ONE_BLOCK, self.journal.done, (), self.phase, self.job_pass.title)
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
            shutil.rmtree(self.job_pass.folder, ignore_errors=True)
        self.outputs.check()
        self.status.count_memory(part.peak_memory_bytes)

    def _results(self, cluster: RunningCluster) -> list[Part]:
        gather = self.job_pass
        (total,) = plan_calls(gather.work, gather.terms, SPLIT_EVERY, cluster.workers, gather.read_bytes)
        write = delayed(gather.work.keep)(total, dask_key_name=f"write-{total.key}")
        options = self.context.plan.run
        futures = cluster.client.compute([write], optimize_graph=False, retries=options.retries)
        return results(cluster.client, futures, options.stall_seconds, between=self._between)

    def _between(self) -> None:
        """While tasks run: react to signals, report the progress."""
        self.stop_if_asked()
        self.outputs.check_in_time()
        self.status.notify(self.progress(self.phase))


ENDED = digest_of([])  # digest of the steps: what they give is in the checkpoint, which has one of its own
# Longest wait of a rank for the others, which may read or validate, as a share of `run.stall_seconds`: a rank that
# hangs is named by those that wait for it before the driver, which misses a step alone, gives up the cluster.
PATIENCE = 0.5
ADVICE = "Where a rank works that long without the others, raise run.stall_seconds: they wait for half of it."


class RanksPass(ClusterPass[RankProgram]):
    """The state of one program. Its disk is never full here: a rank raises that."""

    if_stopped = ". Run again to go on from the last checkpoint."
    moved: tuple[int, float]  # number of steps when it was last seen to change, and the time

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return self.job_pass.steps_done()

    def run_on(self, cluster: RunningCluster, *, preparing: str = "start") -> None:
        """Run the program on a cluster, again from its checkpoint where a rank failed."""
        self.outputs.begin(self.journal, self.job_pass.title)
        self.status.work_begins()
        self.job_pass.records.folder.mkdir(parents=True, exist_ok=True)
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
            except errors.RankFailed as error:
                self.context.directory.path.stat()  # where it is gone, no rank is the cause: the lock has words for that
                failures = 1 if self.done > before else failures + 1
                if is_final(error) or failures > self.context.plan.run.retries:
                    raise (error.__cause__ or error) from None  # an error with words needs no traceback
                said = first_line(str(error)).rstrip(".")
                self.status.report(f"{said}. Going on from the last checkpoint.\n{error}")

    def _attempt(self, cluster: RunningCluster) -> None:
        directory, run = self.context.directory, self.context.plan.run
        mode = "cpu" if self.job_pass.device == "cpu" else "gpu"
        given = self.job_pass.program, directory, directory.driver()
        call = partial(call_with_group, _peak_of, given)
        program = TorchProgram(
            call,
            self.job_pass.records.folder,
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
        if self.outputs.check_in_time():
            self.job_pass.keep_checkpoint()
        self.status.notify(self.progress(self.phase))
        steps, since = self.moved
        if (done := self.done) != steps:
            self.moved = done, time.monotonic()
        elif time.monotonic() - since > self.context.plan.run.stall_seconds:
            raise errors.Stalled(f"no step ended for {time.monotonic() - since:.0f} s{self.job_pass.title}.")

    def _take_back_doubtful(self) -> None:
        """Take back the steps since the input was last known to be as it was, unless it still is."""
        try:
            is_changed = any(source.change() for source in self.context.plan.sources)
        except errors.InputUnreadable:
            is_changed = False  # nobody read anything else meanwhile
        except errors.InputError:
            is_changed = True
        if is_changed:
            with suppress(OSError):
                self.job_pass.restore_checkpoint()


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
