"""A torchrun script on a cluster: one rank on each worker, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from distributed import get_worker

from halotile.graphs.clusters.base import Order
from halotile.graphs.distributed.context import DistributedContext
from halotile.graphs.runs.passes.torch_ranks import TorchProgram
from halotile.tasks.groups.opening import Rendezvous
from halotile.tasks.groups.script import run_script

TOPIC = "halotile-ranks"
"""Events of Dask with the output of the ranks."""


def execute_torch(
    script: str, arguments: Sequence[str], order: Order, *, line: Callable[[str], None] = print
) -> None:
    """Run a script as the ranks of a torch program, one on each worker of a cluster that is started for it.

    Parameters
    ----------
    script : str
        Path of a Python script that all workers see.
    arguments : sequence of str
        Its arguments.
    order : Order
        Requirements for the cluster.
    line : callable
        Called with each line that a rank prints, after ``[rank]``.

    Raises
    ------
    RankFailed
        When a rank ends with another exit code than 0; the others are ended.
    ConfigError, ClusterFailed
        When no cluster can be started.
    """
    with DistributedContext(
        workers=order.workers, cluster=order.choice, memory_per_worker=order.memory_bytes
    ) as ctx:

        def show(event: tuple[float, dict[str, Any]]) -> None:
            line(f"[{event[1]['rank']}] {event[1]['line']}")

        ctx.client.subscribe_topic(TOPIC, show)
        program = TorchProgram(partial(run_rank_of_script, script, tuple(arguments)), ctx.folder)
        program.run(ctx.client, order.workers, retries=0, usual=order.workers)


def run_rank_of_script(script: str, arguments: tuple[str, ...], place: Rendezvous) -> None:
    """Run a script as one rank on this worker; each line of its output is an event."""
    worker = get_worker()

    def send(text: str) -> None:
        worker.log_event(TOPIC, {"rank": place.rank, "line": text})

    run_script(script, arguments, place, send)
