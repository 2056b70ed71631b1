"""Whether calls on whole images fit into the memory of a worker."""

from __future__ import annotations

from collections.abc import Sequence

from distributed import Client

from halotile.errors import MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.plans.memory import IMPORTS_BYTES, MIB
from halotile.tasks.distributed.transport.calls import Call, held_bytes


def task_bytes(client: Client) -> int | None:
    """What a task may hold: the smallest share of a worker's memory that a thread of it has; None where none is set."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    shares = [w["memory_limit"] // max(1, w["nthreads"]) for w in workers if w.get("memory_limit")]
    return min(shares, default=None)


def check_holds(what: str, calls: Sequence[Call], sizes: Sequence[int], allowed: int | None) -> None:
    """Refuse calls of which one needs more than a task may hold.

    Parameters
    ----------
    what : str
        What a call's number counts.
    calls : sequence of Call
        What is to be evaluated.
    sizes : sequence of int
        Bytes of the arrays that calls name.
    allowed : int, optional
        What a task may hold, with all that a worker has imported.

    Raises
    ------
    MemoryRefused
        With the figures.
    """
    if allowed is None:
        return
    needs = [held_bytes(call.function, [sizes[place] for place in call.inputs]) for call in calls]
    needed = max(needs, default=0)
    if needed + IMPORTS_BYTES <= allowed:
        return
    call = calls[needs.index(needed)]
    total = needed + IMPORTS_BYTES
    given = sum(sizes[place] for place in call.inputs)
    raise MemoryRefused(
        f"{what} {call.number} works on whole images: with {bytes_text(given)} given, one task holds about "
        f"{bytes_text(needed)} beside {bytes_text(IMPORTS_BYTES)} of imports, and has {bytes_text(allowed)}. Write "
        f"DistributedContext(memory_per_worker='{-(-total // MIB)}MiB'), with fewer workers if need be, or smaller images."
    )
