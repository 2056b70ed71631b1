"""A model of one scheduler and one driver with many workers: how many blocks pass, and how large they must be to keep all busy.

A task of ``g`` blocks costs the scheduler ``a + b g`` seconds of one core, and the driver likewise. In one process they
do one thing at a time between them, else each. A worker computes one task at a time, and has others in hand meanwhile. Messages take a fixed time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Seconds of one core for a task and for each block of it."""

    task: float
    block: float

    def of(self, blocks: int) -> float:
        """Seconds for a task of so many blocks."""
        return self.task + self.block * blocks


@dataclass(frozen=True)
class Machine:
    """What hands the work out.

    Parameters
    ----------
    scheduler, driver : Cost
        What a task costs each of them.
    heartbeat : float
        Share of its core that the scheduler spends on workers that do nothing.
    latency : float
        Seconds that a message takes.
    in_flight : int
        Tasks that each worker has at hand.
    together : bool
        Whether scheduler and driver are one process, as with every kind of cluster but ``scheduler``.
    """

    scheduler: Cost
    driver: Cost
    heartbeat: float = 0.0
    latency: float = 0.001
    in_flight: int = 3
    together: bool = True

    def tasks_per_second(self, blocks: int) -> float:
        """The most tasks of so many blocks that pass: the one process, or the busier of the two, has no time left.

        Examples
        --------
        >>> from dataclasses import replace
        >>> one = Machine(Cost(0.0005, 0), Cost(0.0003, 0))
        >>> round(one.tasks_per_second(1)), round(replace(one, together=False).tasks_per_second(1))
        (1250, 2000)
        """
        scheduler, driver = self.scheduler.of(blocks), self.driver.of(blocks)
        if self.together:
            return (1 - self.heartbeat) / (scheduler + driver)
        return min((1 - self.heartbeat) / scheduler, 1 / driver)

    def least_task_seconds(self, workers: int, blocks: int, busy: float = 0.95) -> float:
        """How long a task of so many blocks must last for the workers to compute this share of the time.

        Examples
        --------
        >>> round(Machine(Cost(0.0005, 0), Cost(0.0005, 0)).least_task_seconds(1000, 1), 3)
        0.95
        """
        return busy * workers / self.tasks_per_second(blocks)

    def least_pixels(self, workers: int, blocks: int, pixels_per_second: float, busy: float = 0.95) -> float:
        """Pixels of one block at which the workers are busy, where each computes so many in a second."""
        return self.least_task_seconds(workers, blocks, busy) * pixels_per_second / blocks


class Server:
    """One core that serves what comes in the order in which it comes."""

    def __init__(self) -> None:
        self.free = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When it is through with what comes now."""
        self.free = max(self.free, now) + seconds
        return self.free


class Simulation:
    """Single tasks on their way: driver, scheduler, worker, scheduler, driver, which then sends the next.

    Parameters
    ----------
    machine : Machine
        What hands the tasks out.
    workers, blocks : int
        How many workers, and blocks in a task.
    task_seconds : float
        What a task takes on average.
    spread : float
        Standard deviation of a task's time, as a part of it.
    """

    def __init__(
        self, machine: Machine, workers: int, blocks: int, task_seconds: float, *, spread: float = 0.2
    ) -> None:
        self.machine = machine
        self.workers = workers
        self.task_seconds = task_seconds
        self.spread = spread
        self.scheduling = machine.scheduler.of(blocks) / 2 / (1 - machine.heartbeat)
        self.driving = machine.driver.of(blocks) / (1 - machine.heartbeat if machine.together else 1)
        self.scheduler = Server()
        self.driver = self.scheduler if machine.together else Server()
        self.draws = random.Random(0)
        self.waiting = Counter[int]()
        self.idle = set(range(workers))
        self.events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self.serial = itertools.count()
        self.left = 0
        self.computed = 0.0

    def busy(self, tasks: int) -> float:
        """Share of the time that workers compute while so many tasks pass."""
        self.left = tasks
        for _ in range(self.machine.in_flight):
            for worker in range(self.workers):
                self._at(0.0, self._hand_out, worker)
        now = 0.0
        while self.events:
            now, _, act, worker = heapq.heappop(self.events)
            act(now, worker)
        return self.computed / (now * self.workers)

    def _at(self, when: float, act: Callable[[float, int], None], worker: int) -> None:
        heapq.heappush(self.events, (when, next(self.serial), act, worker))

    def _hand_out(self, now: float, worker: int) -> None:
        """The driver takes a task back, if there was one, and sends the next."""
        if self.left:
            self.left -= 1
            self._at(self.driver.serve(now, self.driving) + self.machine.latency, self._schedule, worker)

    def _schedule(self, now: float, worker: int) -> None:
        self._at(self.scheduler.serve(now, self.scheduling) + self.machine.latency, self._take, worker)

    def _take(self, now: float, worker: int) -> None:
        self.waiting[worker] += 1
        if worker in self.idle:
            self._begin(now, worker)

    def _begin(self, now: float, worker: int) -> None:
        """The worker goes on with what it has in hand."""
        if not self.waiting[worker]:
            self.idle.add(worker)
            return
        self.idle.discard(worker)
        self.waiting[worker] -= 1
        seconds = max(0.0, self.draws.gauss(self.task_seconds, self.spread * self.task_seconds))
        self.computed += seconds
        self._at(now + seconds, self._end, worker)

    def _end(self, now: float, worker: int) -> None:
        self._at(now + self.machine.latency, self._report, worker)
        self._begin(now, worker)

    def _report(self, now: float, worker: int) -> None:
        self._at(self.scheduler.serve(now, self.scheduling) + self.machine.latency, self._hand_out, worker)
