"""Measures what a task costs scheduler and driver with many workers: ``python tests/benchmarks/thousand_workers.py [WORKERS ...]``.

A real scheduler in a process of its own, real workers without nannies, many in each of a few processes, all traffic encrypted,
and blocks that do nothing, through the stream and the journal of a job. What counts is processor time, not wall time: the
workers share the cores. Several minutes; a worker takes about 2 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import dask
import psutil
from distributed import Client, Future, Scheduler, Worker
from distributed.security import Security

from halotile.graphs.clusters.workers.settings import SETTINGS
from halotile.graphs.runs.passes.stream import Answer, Grouping, Stream
from halotile.storage.run_directory.journal import Journal
from tests.benchmarks.denoising import do_nothing

WORKERS = (10, 100, 500, 1000)
GROUPS = (1, 64, 256)
PER_PROCESS = 125
"""Workers of one process."""
IDLE_SECONDS = 8.0


@dataclass(frozen=True)
class Measured:
    """Seconds of CPU time for each task of so many blocks."""

    workers: int
    blocks: int
    scheduler: float
    driver: float
    fill: float
    """Of the driver's: to hand the task to the client."""
    collect: float
    """Of the driver's: to fetch what it gave, and let go of it."""
    first_fill: float
    """Seconds to hand out the first tasks, three for each worker."""
    tasks_per_second: float
    """As many as passed here, workers and all on the same cores."""


class Fixed(Grouping):
    """Groups of one size."""

    def __init__(self, workers: int, blocks: int) -> None:
        super().__init__(workers)
        self.blocks = blocks

    def size(self, remaining: int) -> int:
        """As many as are asked for, while there are so many."""
        return min(self.blocks, remaining)


class Timed(Stream):
    """A stream that knows the CPU time of its thread in each of its two halves."""

    filling = 0.0
    collecting = 0.0
    first_fill = 0.0

    def _fill(self, numbers: Iterator[int]) -> None:
        began = time.thread_time()
        super()._fill(numbers)
        self.filling += time.thread_time() - began
        self.first_fill = self.first_fill or self.filling

    def _collect(self, arrived: list[Future]) -> list[Answer]:
        began = time.thread_time()
        answers = super()._collect(arrived)
        self.collecting += time.thread_time() - began
        return answers


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """Dask set as a run sets it, and silent."""
    logging.getLogger("distributed").setLevel("ERROR")
    with dask.config.set(SETTINGS):
        yield


def schedule(security: Security, tell: Connection) -> None:
    """Be the scheduler."""

    async def run() -> None:
        options = {"host": "127.0.0.1", "port": 0, "protocol": "tls://", "dashboard": False}
        async with Scheduler(security=security, **options) as scheduler:
            tell.send(scheduler.address)
            await scheduler.finished()

    with as_in_a_run():
        asyncio.run(run())


def work(address: str, security: Security, count: int) -> None:
    """Be many workers."""

    async def run() -> None:
        options = {"nthreads": 1, "memory_limit": 0, "dashboard": False, "security": security}
        workers = [Worker(address, **options) for _ in range(count)]
        await asyncio.gather(*workers)
        await asyncio.gather(*(worker.finished() for worker in workers))

    with as_in_a_run(), tempfile.TemporaryDirectory() as folder, dask.config.set({"temporary-directory": folder}):
        asyncio.run(run())


@contextmanager
def running(workers: int) -> Iterator[tuple[Client, psutil.Process]]:
    """A client of a scheduler with so many workers, and the scheduler's process."""
    context = multiprocessing.get_context("spawn")
    security = Security.temporary()
    hear, tell = context.Pipe()
    started: list[Any] = [context.Process(target=schedule, args=(security, tell), daemon=True)]
    started[0].start()
    address = hear.recv()
    for first in range(0, workers, PER_PROCESS):
        count = min(PER_PROCESS, workers - first)
        started.append(context.Process(target=work, args=(address, security, count), daemon=True))
        started[-1].start()
    try:
        with Client(address, security=security, set_as_default=False, timeout=120) as client:
            client.wait_for_workers(workers, timeout=300)
            yield client, psutil.Process(started[0].pid)
    finally:
        for process in started:
            process.kill()
            process.join()


def spent(process: psutil.Process) -> float:
    """Processor time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def idle_share(scheduler: psutil.Process) -> float:
    """Share of a core that the scheduler spends on workers that do nothing."""
    before = spent(scheduler)
    time.sleep(IDLE_SECONDS)
    return (spent(scheduler) - before) / IDLE_SECONDS


def measure(
    client: Client, scheduler: psutil.Process, workers: int, blocks: int, tasks: int, heartbeat: float = 0.0
) -> Measured:
    """Let so many tasks pass; what the scheduler spends on idle workers is not counted."""
    total = tasks * blocks
    stream = Timed(client, do_nothing, name="noop", grouping=Fixed(workers, blocks))
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.create(Path(folder, "journal"), "noop", total)
        began, driver, before = time.perf_counter(), time.process_time(), spent(scheduler)
        for answers in stream.answers(iter(range(total)), total):
            for answer in answers:
                journal.mark(dict.fromkeys(answer.result.done, b"none"))
        seconds = time.perf_counter() - began
        driver, after = time.process_time() - driver, spent(scheduler)
    assert len(journal.done) == total
    scheduling = after - before - heartbeat * seconds
    fill, collect, first = stream.filling / tasks, stream.collecting / tasks, stream.first_fill
    return Measured(workers, blocks, scheduling / tasks, driver / tasks, fill, collect, first, tasks / seconds)


def main() -> None:
    """Measure with so many workers each; docs/design/011 has what follows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", nargs="*", type=int, default=WORKERS)
    for workers in parser.parse_args().workers:
        with as_in_a_run(), running(workers) as (client, scheduler):
            measure(client, scheduler, workers, 1, 4 * workers)  # everything is imported, every connection made
            heartbeat = idle_share(scheduler)
            print(f"{workers} workers; the idle scheduler takes {heartbeat:.3f} of a core", flush=True)
            for blocks in GROUPS:
                row = measure(client, scheduler, workers, blocks, max(2000, 4 * workers), heartbeat)
                print(f"  {row}", flush=True)


if __name__ == "__main__":
    main()
