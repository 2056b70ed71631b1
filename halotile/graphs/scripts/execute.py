"""A user's own script beside a running cluster, which it joins by its environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from halotile.graphs.child_process import run_child
from halotile.graphs.clusters.base import ADDRESS, Order, Start
from halotile.graphs.clusters.connection.arrival import await_workers
from halotile.graphs.clusters.connection.credentials import credentials, private_base
from halotile.graphs.clusters.detection.cluster_kind import cluster_kind_of, is_other_copy
from halotile.registry import find
from halotile.tasks.devices.memory_limits import allow_memory


def execute(
    command: Sequence[str], order: Order, *, started: Callable[[str | None], None] = lambda _: None
) -> int:
    """Run a command beside a cluster that ``Client()`` and ``DistributedContext()`` in it join; return its exit code.

    Parameters
    ----------
    command : sequence of str
        A program with its arguments.
    order : Order
        Requirements for the cluster.
    started : callable
        Called with the dashboard's address once there is a worker.

    Raises
    ------
    ConfigError, ClusterFailed
        When no cluster can be started.

    Examples
    --------
    >>> execute(["python", "script.py"], Order(workers=2, memory_bytes=2**31))  # doctest: +SKIP
    0
    """
    if is_other_copy(order.choice):
        from halotile.graphs.clusters.ranks import serve

        serve(private_base())
        return 0
    kind = cluster_kind_of(order.choice)
    start: Start = find("clusters", kind.name).start
    environment = dict(os.environ)
    with ExitStack() as contexts:
        if not kind.traits.joins and order.choice.tls:
            tls = contexts.enter_context(credentials(private_base()))
            environment |= tls.environment()
            # Logs go with the certificates; copies of the command find the driver in a folder that all of them know.
            folder = private_base() if kind.traits.of_copies else tls.folder
            order = dataclasses.replace(order, credentials=tls, folder=order.folder or folder)
        cluster = contexts.enter_context(start(order))
        await_workers(cluster, order.report)
        started(cluster.dashboard)
        environment[ADDRESS] = str(cluster.client.scheduler.address)
        allow_memory(None)  # the script decides about its memory
        code = run_child(command, environment)
    return code if code >= 0 else 128 - code
