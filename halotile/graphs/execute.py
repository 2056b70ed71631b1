"""A user's own script with a cluster up, which it joins by its environment: what a launcher is to scripts for several GPUs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from halotile.graphs.arrival import await_workers
from halotile.graphs.clusters.base import Order, Start
from halotile.graphs.credentials import credentials, private_base
from halotile.graphs.resolution import ADDRESS, is_other_copy, kind_of
from halotile.registry import find

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def execute(
    command: Sequence[str], order: Order, *, started: Callable[[str | None], None] = lambda _: None
) -> int:
    """Run a command beside a cluster that ``Client()`` and ``DistributedContext()`` in it join; its exit code.

    Parameters
    ----------
    command : sequence of str
        A program with its arguments.
    order : Order
        What the cluster is to be.
    started : callable
        Called with the dashboard's address once a worker is there.

    Raises
    ------
    ConfigError, ClusterFailed
        When there is no cluster to be had.

    Examples
    --------
    >>> execute(["python", "script.py"], Order(workers=2, memory_bytes=2**31))  # doctest: +SKIP
    0
    """
    if is_other_copy(order.choice):
        from halotile.graphs.clusters.ranks import serve

        serve(private_base())
        return 0
    kind = kind_of(order.choice)
    start: Start = find("clusters", kind.name).start
    environment = dict(os.environ)
    with ExitStack() as held:
        if kind.name != "scheduler" and order.choice.tls:
            made = held.enter_context(credentials(private_base()))
            environment |= made.environment()
            # Logs go with the certificates. Copies of the command meet where all of them look.
            folder = private_base() if kind.name == "ranks" else made.folder
            order = dataclasses.replace(order, credentials=made, folder=order.folder or folder)
        cluster = held.enter_context(start(order))
        await_workers(cluster, order.say)
        started(cluster.dashboard)
        environment[ADDRESS] = str(cluster.client.scheduler.address)
        return _run(command, environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    started: list[subprocess.Popen[bytes]] = []
    with _signals_for(started):
        child = subprocess.Popen(command, env=environment)
        started.append(child)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_for(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Signals go to the script, which decides what they mean; Ctrl-C it gets from the terminal itself."""

    def pass_on(number: int, _: FrameType | None) -> None:
        for child in children:
            if number != signal.SIGINT:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
