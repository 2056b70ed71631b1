"""A check that calls on whole images fit into the memory of a worker."""

from __future__ import annotations

from collections.abc import Sequence

from distributed import Client

from halotile.errors import MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.clusters.connection.present import present_workers
from halotile.graphs.plans.resources.memory import IMPORTS_BYTES, MIB
from halotile.tasks.distributed.transport.calls import Call, working_bytes


def task_bytes(client: Client) -> int | None:
    """Return the memory of one task: the smallest limit of a worker per thread; None without limits."""
    workers = present_workers(client).values()
    shares = [w["memory_limit"] // max(1, w["nthreads"]) for w in workers if w.get("memory_limit")]
    return min(shares, default=None)


def check_memory(what: str, calls: Sequence[Call], sizes: Sequence[int], allowed: int | None) -> None:
    """Refuse calls of which one needs more memory than a task has.

    Parameters
    ----------
    what : str
        The unit that a call's number counts.
    calls : sequence of Call
        The calls.
    sizes : sequence of int
        Bytes of the arrays that calls refer to.
    allowed : int, optional
        Memory of a task, including the worker's imports.

    Raises
    ------
    MemoryRefused
        With the figures.
    """
    if allowed is None:
        return
    needs = [working_bytes(call.function, [sizes[place] for place in call.inputs]) for call in calls]
    needed = max(needs, default=0)
    total = needed + IMPORTS_BYTES
    if total <= allowed:
        return
    call = calls[needs.index(needed)]
    input_bytes = sum(sizes[place] for place in call.inputs)
    raise MemoryRefused(
        f"{what} {call.number} works on whole images: with inputs of {bytes_text(input_bytes)}, one task needs about "
        f"{bytes_text(needed)} beside {bytes_text(IMPORTS_BYTES)} of imports, and has {bytes_text(allowed)}. Write "
        f"DistributedContext(memory_per_worker='{-(-total // MIB)}MiB'), with fewer workers if need be, or smaller images."
    )
