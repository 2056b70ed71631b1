"""A bounded stream of tasks: a million numbered blocks pass through a cluster, a few at a time.

There is never one large graph. A handful of tasks for each worker is in flight; each carries a
group of block numbers, and for each one that returns another is submitted. Futures are released at once, so
scheduler and client need no more memory than at the first block.
"""

import itertools
import queue
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future, KilledWorker

from halotile.errors import Stalled, WorkerDied
from halotile.graphs.clusters.common.answers import POLL_SECONDS, RPC_SECONDS, Unanswered, ask, fetch, present_workers

TASKS_PER_WORKER = 3  # tasks in flight for each worker: one that runs, one that waits there, one on its way
SHARES = 2  # a task takes at most one of this many equal shares of the blocks that are left for each worker
LARGEST_GROUP = 256
DISPATCH_SECONDS = 0.0016
# Cost of a task for scheduler and driver, and the added cost for each worker that the scheduler chooses among.
CHOICE_SECONDS = 0.9e-6
# Largest share of its time in which one process submits tasks; heartbeats and groups of tasks take some of the rest.
DISPATCH_SHARE = 0.625
# Factor on the target duration of a task after which its worker returns the blocks that it has not begun.
PATIENCE = 2.0
WAITING = ("waiting", "no-worker", "queued")  # states of a task that is on no worker


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one task: its block numbers, and either its result or its error."""

    numbers: tuple[int, ...]
    result: Any = None
    error: BaseException | None = None
    alone: bool = False  # true where no other task was in flight


def least_task_seconds(workers: int) -> float:
    """Return the duration of a task with which one scheduler serves so many workers: it grows with their square.

    >>> [round(least_task_seconds(workers), 1) for workers in (100, 1000, 5000, 10_000)]
    [0.3, 4.0, 48.8, 169.6]
    """
    return workers * (DISPATCH_SECONDS + CHOICE_SECONDS * workers) / DISPATCH_SHARE


def workers_of(client: Client) -> set[str]:
    """Return the addresses of the current workers; a restarted worker gets a new address."""
    return set(present_workers(client))


class Grouping:
    """Number of blocks in one task.

    A task should last about ``target_seconds``, so that Dask's overhead of 2 ms per task stays small beside
    it, and longer with many workers, so that one scheduler serves them all. Towards the end groups shrink so that all
    workers finish together.

    Parameters
    ----------
    workers : int
        Number of workers.
    target_seconds : float
        Minimum duration of a task.
    least : int
        Blocks of a task, where so many are left for each worker.
    seconds_per_block : float, optional
        Known duration of a block; measured where it is not given.
    keeps_all : bool
        A single worker takes as many blocks as a task may hold, and groups do not shrink for smaller steps.
    """

    def __init__(
        self,
        workers: int,
        target_seconds: float = 1.0,
        least: int = 1,
        seconds_per_block: float | None = None,
        *,
        keeps_all: bool = False,
    ) -> None:
        self.workers = workers
        self.keeps_all = keeps_all and workers == 1
        self.target_seconds = max(target_seconds, least_task_seconds(workers))
        self.least = least
        self.seconds_per_block = seconds_per_block

    def learn(self, blocks: int, seconds: float) -> None:
        """Record the duration of a finished task."""
        observed = seconds / max(blocks, 1)
        previous = self.seconds_per_block
        self.seconds_per_block = observed if previous is None else 0.7 * previous + 0.3 * observed

    def size(self, remaining: int) -> int:
        """Return the number of blocks of the next task when ``remaining`` are left."""
        if self.seconds_per_block is None:
            size = self.least
        else:
            size = int(min(LARGEST_GROUP, self.target_seconds / max(self.seconds_per_block, 1e-9)))
        fair = remaining if self.keeps_all else -(-remaining // (self.workers * SHARES))
        return max(1, min(max(size, self.least), fair))

    def limit_seconds(self, blocks: int) -> float | None:
        """Return the time in which a task of so many blocks may begin blocks; None while that is unknown.

        >>> Grouping(2).limit_seconds(4), Grouping(2, seconds_per_block=3.0).limit_seconds(4)
        (None, 24.0)
        """
        if self.seconds_per_block is None:
            return None
        return PATIENCE * max(self.target_seconds, blocks * self.seconds_per_block)


class Stream:
    """Sends numbered blocks through a cluster and yields the answers as they arrive.

    Parameters
    ----------
    client : distributed.Client
        Client connected to the cluster.
    function : callable
        ``function(numbers)``, run on a worker; its result is small. With ``limited``,
        ``function(numbers, limit_seconds=...)``.
    name : str
        Phase that the dashboard shows, at most 15 characters: the prefix of every key.
    iteration : int, optional
        Number of the pass among several: the tasks of each are a group of their own.
    grouping : Grouping
        Decides the size of each task.
    stall_seconds : float
        Raise :class:`Stalled` when nothing comes back for this long.
    limited : bool
        Pass the function the time after which it must not begin another block. Blocks that it leaves go to
        :meth:`hand_back`.
    between : callable
        Called about twice a second while the cluster is asked for results; an exception from it ends the wait.
    """

    def __init__(
        self,
        client: Client,
        function: Callable[..., Any],
        *,
        name: str,
        grouping: Grouping,
        iteration: int | None = None,
        stall_seconds: float = 300.0,
        limited: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.function = function
        self.group = name if iteration is None else f"{name}-it{iteration + 1:03d}"
        """Group of the tasks on Dask's dashboard; each iteration has its own."""
        self.grouping = grouping
        self.stall_seconds = stall_seconds
        self.limited = limited
        self.between = between
        self.draining = False
        self._in_flight: dict[Future, tuple[int, ...]] = {}
        self._arrived: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._serial = itertools.count()
        self._again: list[tuple[int, ...]] = []
        self._suspects: list[tuple[int, ...]] = []
        self._alone: Future | None = None
        self._places: dict[int, Collection[str]] = {}
        self._tied: dict[Future, Collection[str]] = {}
        self.fit: Collection[str] | None = None
        """Addresses of the workers that are given blocks; None for all."""
        self._remaining = 0
        self._heard = 0.0
        self.lost = 0
        """Number of tasks that were lost with their worker."""

    @property
    def silent_seconds(self) -> float:
        """Return the time since the last answer."""
        return time.monotonic() - self._heard

    def be_patient(self) -> None:
        """Restart the wait: an answer came, or there is a reason for the silence."""
        self._heard = time.monotonic()

    def drain(self) -> None:
        """Submit no more blocks; those that a worker has in hand still come back."""
        self.draining = True

    def again(self, numbers: Iterable[int], *, alone: bool = False, workers: Collection[str] | None = None) -> None:
        """Send these blocks again, each as a task of its own, to one of ``workers``.

        With ``alone``, at the end and with nothing else in flight: if a worker dies then, the block is the cause.
        """
        queue = self._suspects if alone else self._again
        for number in numbers:
            queue.append((number,))
            if workers:
                self._places[number] = workers

    def hand_back(self, numbers: Iterable[int]) -> None:
        """Send these blocks again, which a worker was too slow to begin, to the first free worker."""
        if group := tuple(numbers):
            self._again.append(group)

    def look_after_tied(self, present: set[str]) -> None:
        """Send tasks again whose workers are all gone: Dask would wait for one to come back."""
        self._tied = {future: to for future, to in self._tied.items() if future in self._in_flight}
        for future in [future for future, workers in self._tied.items() if present.isdisjoint(workers)]:
            self._again.append(self._in_flight.pop(future))
            self._alone = None if future is self._alone else self._alone
            future.release()

    def answers(self, numbers: Iterator[int], total: int, poll_seconds: float = 0.5) -> Iterator[list[Answer]]:
        """Yield the answers, in groups as they arrive; an empty list when ``poll_seconds`` pass without one."""
        self._remaining = total
        self._heard = time.monotonic()
        while True:
            self._fill(numbers)
            if not self._in_flight:
                return
            # A task that a drain released arrives too, as cancelled.
            arrived = [future for future in self._wait(poll_seconds) if future in self._in_flight]
            if arrived:
                self.be_patient()
                yield self._collect(arrived)
            elif time.monotonic() - self._heard > self.stall_seconds:
                raise Stalled(
                    f"no block came back for {self.stall_seconds:g} s; {len(self._in_flight)} tasks are in flight, "
                    f"with blocks {self._describe_in_flight()}. If single blocks take this long, raise run.stall_seconds."
                )
            else:
                if self.draining:
                    self._drop_waiting()
                yield []

    def _drop_waiting(self) -> None:
        """Release the tasks that are on no worker: with every worker lost, none of them would return."""
        pending = [future for future in self._in_flight if future.status == "pending"]
        keys = [future.key for future in pending]
        states = ask(self.client, self.client.scheduler.get_task_status, keys=keys, between=self.between)
        for future in pending:
            if states[future.key] in WAITING:
                del self._in_flight[future]
                future.release()

    def _fill(self, numbers: Iterator[int]) -> None:
        """Submit tasks until every worker has enough, or no block is left."""
        if self.client.status != "running":
            raise ConnectionError(f"the scheduler is gone (the connection is {self.client.status}).")
        slots = self.grouping.workers * TASKS_PER_WORKER
        while not self.draining and self._alone is None and len(self._in_flight) < slots:
            group = self._next_group(numbers)
            if group:
                self._submit(group)
            elif self._suspects and not self._in_flight:
                self._alone = self._submit(self._suspects.pop())
            else:
                return

    def _next_group(self, numbers: Iterator[int]) -> tuple[int, ...]:
        if self._again:
            return self._again.pop()
        group = tuple(itertools.islice(numbers, self.grouping.size(self._remaining)))
        self._remaining -= len(group)
        return group

    def _submit(self, group: tuple[int, ...]) -> Future:
        key = (self.group, next(self._serial), len(group))
        limit = {"limit_seconds": self.grouping.limit_seconds(len(group))} if self.limited else {}
        workers = self._places.pop(group[0], self.fit)
        placed = {"workers": list(workers)} if workers else {}
        future = self.client.submit(self.function, group, key=key, pure=False, **placed, **limit)
        self._in_flight[future] = group
        if workers:
            self._tied[future] = workers
        future.add_done_callback(self._arrived.put)
        return future

    def in_flight(self) -> list[int]:
        """Return the blocks that were submitted and have not returned."""
        return list(itertools.chain.from_iterable(self._in_flight.values()))

    def _describe_in_flight(self) -> str:
        numbers = sorted(self.in_flight())
        return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")

    def _wait(self, seconds: float) -> list[Future]:
        """Return all futures that have arrived, waiting for the first at most this long."""
        try:
            arrived = [self._arrived.get(timeout=seconds)]
        except queue.Empty:
            return []
        while True:
            try:
                arrived.append(self._arrived.get_nowait())
            except queue.Empty:
                return arrived

    def _collect(self, arrived: list[Future]) -> list[Answer]:
        """Fetch the results of all finished futures in one call, and release the futures.

        A result that was lost with its worker is not an error: its blocks are sent again. So are those of a
        task whose worker died, unless it was alone: a worker holds several tasks, and any of them may have
        killed it.
        """
        good = [future for future in arrived if future.status == "finished"]
        results = dict(zip([f.key for f in good], self._gather(good), strict=True))
        answers = []
        for future in arrived:
            numbers = self._in_flight.pop(future)
            was_alone, self._alone = future is self._alone, None
            if results.get(future.key) is not None:
                answers.append(Answer(numbers, results[future.key], alone=was_alone))
                self.grouping.learn(len(numbers), getattr(results[future.key], "seconds", 0.0))
            elif future.status in ("error", "cancelled"):
                error = self._error_of(future)
                self.lost += isinstance(error, KilledWorker)
                if isinstance(error, KilledWorker) and not was_alone:
                    self.again(numbers, alone=len(numbers) == 1)
                else:
                    answers.append(Answer(numbers, error=error, alone=was_alone))
            else:
                self.lost += 1
                self._again.append(numbers)
            future.release()
        return answers

    def _gather(self, futures: list[Future]) -> list[Any]:
        """Return the results of finished futures; None where a result could not be fetched."""
        if not futures:
            return []
        by_key = {future.key: future for future in futures}
        gathered: dict[str, Any] = {}
        tied = [self._tied[future] for future in futures if future in self._tied]

        def check_holders() -> None:
            self.between()
            present = workers_of(self.client)
            if any(present.isdisjoint(workers) for workers in tied):
                raise Unanswered("the workers of a result are gone, and Dask waits for them.")

        # A worker that hangs in its next block keeps its results: they are as lost, and the stream stalls unless it goes on.
        with suppress(Unanswered):
            limit = min(RPC_SECONDS, self.stall_seconds)
            gathered = fetch(self.client, by_key, errors="skip", seconds=limit, between=check_holders)
        return [gathered.get(future.key) for future in futures]

    def _error_of(self, future: Future) -> BaseException:
        if future.status == "error":
            error = ask(self.client, future.exception, between=self.between)
            if isinstance(error, BaseException):
                return error
        return ConnectionError(f"task {future.key} is {future.status}: the scheduler is gone.")

    def abandon(self) -> None:
        """Release everything in flight without waiting for it."""
        for future in list(self._in_flight):
            future.release()
        self._in_flight.clear()
        self._alone = None


def results(
    client: Client, futures: Sequence[Future], stall_seconds: float, between: Callable[[], None] = lambda: None
) -> list[Any]:
    """Return the results of the futures, in their order, and release them.

    ``between`` is called about twice a second during the wait; an exception from it ends the wait.
    """
    try:
        _await_all(client, futures, stall_seconds, between)
        fetched: list[Any] = fetch(client, list(futures), between=between)
        return fetched
    finally:
        for future in futures:
            future.release()


def await_all(client: Client, futures: Sequence[Future], stall_seconds: float) -> None:
    """Wait for the futures without their results, and release them; errors as for :func:`results`."""
    try:
        _await_all(client, futures, stall_seconds, lambda: None)
    finally:
        for future in futures:
            future.release()


def _await_all(client: Client, futures: Sequence[Future], stall_seconds: float, between: Callable[[], None]) -> None:
    done: queue.SimpleQueue[Future] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left, last_end = len(futures), time.monotonic()
    while left:
        try:
            future = done.get(timeout=POLL_SECONDS)
        except queue.Empty:
            between()
            _check_progress(client, time.monotonic() - last_end, stall_seconds)
            continue
        left, last_end = left - 1, time.monotonic()
        _raise_error(client, future, between)


def _check_progress(client: Client, silent_seconds: float, stall_seconds: float) -> None:
    if client.status != "running":
        raise ConnectionError(f"the scheduler is gone (the connection is {client.status}).")
    if silent_seconds > stall_seconds:
        raise Stalled(
            f"no task ended for {stall_seconds:g} s. If single operators or tiles take this long, raise "
            "DistributedContext(stall_seconds=...)."
        )


def _raise_error(client: Client, future: Future, between: Callable[[], None]) -> None:
    if future.status == "finished":
        return
    if future.status != "error":
        raise ConnectionError(f"task {future.key} is {future.status}: the scheduler is gone.")
    error = ask(client, future.exception, between=between)
    if isinstance(error, KilledWorker):
        raise WorkerDied(
            f"the worker that had task {error.args[0]} died. If it ran out of memory, write fewer workers with more "
            "memory_per_worker each, or for a denoiser a smaller patch_size."
        ) from error
    raise error
