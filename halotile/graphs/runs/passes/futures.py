"""Waiting for a few futures, until the first error or the loss of the cluster."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future, KilledWorker

from halotile.errors import Stalled, WorkerDied
from halotile.graphs.clusters.common.answers import POLL_SECONDS, ask, fetch


def results(
    client: Client,
    futures: Sequence[Future],
    stall_seconds: float,
    between: Callable[[], None] = lambda: None,
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


def _await_all(
    client: Client, futures: Sequence[Future], stall_seconds: float, between: Callable[[], None]
) -> None:
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
