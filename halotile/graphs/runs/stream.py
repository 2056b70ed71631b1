"""A bounded stream of tasks: a million numbered blocks pass through a cluster, a few at a time.

There is never one large graph. A handful of tasks for each worker is in flight; each carries a
group of block numbers, and as many are submitted as came back. Futures are let go at once, so the
scheduler, the client and their memory stay as they were at the first block.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distributed import CancelledError, Client, Future, KilledWorker
from distributed.comm import CommClosedError

from halotile.errors import Stalled
from halotile.graphs.watching.bars import group_of, task_key

RPC_SECONDS = 60.0
"""Longest wait for any single answer from the scheduler."""
TASKS_PER_WORKER = 3
"""Tasks in flight for each worker: one that runs, one that waits there, one on its way."""
SHARES = 2
"""A task takes at most one of so many equal shares that each worker could have of what is left."""
LARGEST_GROUP = 256
DISPATCH_SECONDS = 0.0016
CHOICE_SECONDS = 0.9e-6
"""What a task costs scheduler and driver, and what it costs more for each worker that the scheduler chooses among."""
DISPATCH_SHARE = 0.625
"""Share of the time that one process hands out tasks, at most: heartbeats and bunches of tasks take some of the rest."""
PATIENCE = 2.0
"""Times what a task should last after which its worker hands back what it has not begun."""
WAITING = ("waiting", "no-worker", "queued")
"""States of a task that no worker has."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one task: its block numbers, and either its result or its error."""

    numbers: tuple[int, ...]
    result: Any = None
    error: BaseException | None = None
    alone: bool = False
    """Whether nothing else was in flight beside it."""


def least_task_seconds(workers: int) -> float:
    """How long a task lasts, so that one scheduler serves so many workers: this grows with their square.

    Examples
    --------
    >>> [round(least_task_seconds(workers), 1) for workers in (100, 1000, 5000, 10_000)]
    [0.3, 4.0, 48.8, 169.6]
    """
    return workers * (DISPATCH_SECONDS + CHOICE_SECONDS * workers) / DISPATCH_SHARE


@contextmanager
def answering() -> Iterator[None]:
    """Whatever says that the cluster no longer answers comes out as a ConnectionError."""
    try:
        yield
    except (TimeoutError, CommClosedError, CancelledError) as error:
        raise ConnectionError(f"the cluster does not answer ({type(error).__name__}: {error}).") from error


def workers_of(client: Client) -> set[str]:
    """Addresses of the workers that are there now; one that is started anew gets another."""
    with answering():
        return set(client.sync(client.scheduler.ncores, callback_timeout=RPC_SECONDS))


class Grouping:
    """How many blocks go into one task.

    A task should last about ``target_seconds``, so that Dask's 2 ms for each task stay small beside
    it, and longer with many workers, so that one scheduler serves them all. Towards the end groups shrink so that all
    workers finish together.

    Parameters
    ----------
    workers : int
        How many take them.
    target_seconds : float
        How long a task should last at least.
    least : int
        Blocks of a task, where so many are left for each worker.
    seconds_per_block : float, optional
        What a block is known to take; found out where it is not.
    keeps_all : bool
        Whether a worker that is alone takes as much as a task may hold, and leaves nothing for the sake of smaller steps.
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
        """Take the time of a finished task into account."""
        observed = seconds / max(blocks, 1)
        known = self.seconds_per_block
        self.seconds_per_block = observed if known is None else 0.7 * known + 0.3 * observed

    def size(self, remaining: int) -> int:
        """Blocks for the next task when ``remaining`` are left to hand out."""
        if self.seconds_per_block is None:
            wanted = self.least
        else:
            wanted = int(min(LARGEST_GROUP, self.target_seconds / max(self.seconds_per_block, 1e-9)))
        fair = remaining if self.keeps_all else -(-remaining // (self.workers * SHARES))
        return max(1, min(max(wanted, self.least), fair))

    def limit_seconds(self, blocks: int) -> float | None:
        """How long a task of so many blocks may go on beginning blocks; None while that is not known.

        Examples
        --------
        >>> Grouping(2).limit_seconds(4), Grouping(2, seconds_per_block=3.0).limit_seconds(4)
        (None, 24.0)
        """
        if self.seconds_per_block is None:
            return None
        return PATIENCE * max(self.target_seconds, blocks * self.seconds_per_block)


class Stream:
    """Sends numbered blocks through a cluster and yields the answers as they come.

    Parameters
    ----------
    client : distributed.Client
        Connected to the cluster.
    function : callable
        ``function(numbers)``, run on a worker; its result is small. With ``limited``, ``function(numbers, limit_seconds=...)``.
    name : str
        Phase that the dashboard shows, at most 15 characters: the prefix of every key.
    iteration : int, optional
        Which of several sweeps it is: the tasks of each are a group of their own.
    grouping : Grouping
        Decides the size of each task.
    stall_seconds : float
        Raise :class:`Stalled` when nothing comes back for this long.
    limited : bool
        Whether the function is told after how many seconds it is to begin no more blocks. What it leaves goes to
        :meth:`hand_back`.
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
    ) -> None:
        self.client = client
        self.function = function
        self.group = group_of(name, iteration)
        self.grouping = grouping
        self.stall_seconds = stall_seconds
        self.limited = limited
        self.draining = False
        self._in_flight: dict[Future, tuple[int, ...]] = {}
        self._arrived: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._serial = itertools.count()
        self._again: list[tuple[int, ...]] = []
        self._suspects: list[tuple[int, ...]] = []
        self._alone: Future | None = None
        self._remaining = 0
        self._heard = 0.0
        self.lost = 0
        """Tasks that were lost with their worker."""

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come back."""
        return time.monotonic() - self._heard

    def be_patient(self) -> None:
        """Begin to wait anew: something came back, or there is a reason why nothing does."""
        self._heard = time.monotonic()

    def drain(self) -> None:
        """Hand out no more blocks; those that a worker has in hand still come back."""
        self.draining = True

    def again(self, numbers: Iterable[int], *, alone: bool = False) -> None:
        """Send these blocks once more, each as a task of its own.

        With ``alone``, at the end and with nothing else in flight: if a worker dies then, the block is to blame.
        """
        queue = self._suspects if alone else self._again
        queue.extend((number,) for number in numbers)

    def hand_back(self, numbers: Iterable[int]) -> None:
        """Send these blocks once more, which a worker was too slow to begin: to whoever is free first."""
        if left := tuple(numbers):
            self._again.append(left)

    def answers(
        self, numbers: Iterator[int], total: int, poll_seconds: float = 0.5
    ) -> Iterator[list[Answer]]:
        """The answers, in groups as they arrive; an empty list when ``poll_seconds`` pass without one.

        Raises
        ------
        Stalled
            When tasks are in flight and nothing came back for ``stall_seconds``.
        ConnectionError
            When the scheduler is gone.
        """
        self._remaining = total
        self._heard = time.monotonic()
        while True:
            self._fill(numbers)
            if not self._in_flight:
                return
            arrived = self._wait(poll_seconds)
            if arrived:
                self.be_patient()
                yield self._collect(arrived)
            elif time.monotonic() - self._heard > self.stall_seconds:
                raise Stalled(
                    f"no block came back for {self.stall_seconds:g} s; {len(self._in_flight)} tasks are in flight, "
                    f"with blocks {self._words_in_flight()}. If single blocks take this long, raise run.stall_seconds."
                )
            else:
                if self.draining:
                    self._drop_waiting()
                yield []

    def _drop_waiting(self) -> None:
        """Let go of the tasks that no worker has: with every worker lost, nothing would come back of them."""
        pending = [future for future in self._in_flight if future.status == "pending"]
        with answering():
            states = self.client.sync(
                self.client.scheduler.get_task_status,
                keys=[future.key for future in pending],
                callback_timeout=RPC_SECONDS,
            )
        for future in pending:
            if states[future.key] in WAITING:
                del self._in_flight[future]
                future.release()

    def _fill(self, numbers: Iterator[int]) -> None:
        """Submit until every worker has enough, or nothing is left to hand out."""
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
        key = task_key(self.group, next(self._serial), len(group))
        limit = {"limit_seconds": self.grouping.limit_seconds(len(group))} if self.limited else {}
        future = self.client.submit(self.function, group, key=key, pure=False, **limit)
        self._in_flight[future] = group
        future.add_done_callback(self._arrived.put)
        return future

    def in_flight(self) -> list[int]:
        """The blocks that were handed out and are not back."""
        return list(itertools.chain.from_iterable(self._in_flight.values()))

    def _words_in_flight(self) -> str:
        numbers = sorted(self.in_flight())
        return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")

    def _wait(self, seconds: float) -> list[Future]:
        """Everything that has arrived, waiting for the first at most this long."""
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
        """Fetch the results of all finished futures in one call, and let go of the futures.

        A result that was lost with its worker is no error: its blocks are sent again. So are those of a task whose
        worker died, unless it was alone: a worker holds several, and any of them may have killed it.
        """
        good = [future for future in arrived if future.status == "finished"]
        results = dict(zip([f.key for f in good], self._gather(good), strict=True))
        answers = []
        for future in arrived:
            numbers = self._in_flight.pop(future)
            alone, self._alone = future is self._alone, None
            if results.get(future.key) is not None:
                answers.append(Answer(numbers, results[future.key], alone=alone))
                self.grouping.learn(len(numbers), getattr(results[future.key], "seconds", 0.0))
            elif future.status in ("error", "cancelled"):
                error = self._error_of(future)
                self.lost += isinstance(error, KilledWorker)
                if isinstance(error, KilledWorker) and not alone:
                    self.again(numbers, alone=len(numbers) == 1)
                else:
                    answers.append(Answer(numbers, error=error, alone=alone))
            else:
                self.lost += 1
                self._again.append(numbers)
            future.release()
        return answers

    def _gather(self, futures: list[Future]) -> list[Any]:
        """Results of finished futures; None where one could not be had."""
        if not futures:
            return []
        wanted = {future.key: future for future in futures}

        async def fetch() -> Any:
            return await self.client.gather(wanted, errors="skip", asynchronous=True)

        with answering():
            kept: dict[str, Any] = self.client.sync(fetch, callback_timeout=RPC_SECONDS)
        return [kept.get(future.key) for future in futures]

    @staticmethod
    def _error_of(future: Future) -> BaseException:
        if future.status == "error":
            with answering():
                error = future.exception(timeout=RPC_SECONDS)
            if isinstance(error, BaseException):
                return error
        return ConnectionError(f"task {future.key} is {future.status}: the scheduler is gone.")

    def abandon(self) -> None:
        """Let go of everything in flight without waiting for it."""
        for future in list(self._in_flight):
            future.release()
        self._in_flight.clear()
        self._alone = None
