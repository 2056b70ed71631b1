"""A torchrun script on a cluster: one rank on each worker, each in a process of its own."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from distributed import get_worker

from halotile.errors import RankFailed
from halotile.graphs.clusters.base import ADDRESS, Order, RunningCluster
from halotile.graphs.clusters.common.answers import await_workers
from halotile.graphs.clusters.common.cluster_kind import check_one_script, cluster_kind_of, is_other_copy
from halotile.graphs.clusters.common.security import credentials, owned_folder, private_base
from halotile.graphs.runs.passes.torch_ranks import RETURN_SECONDS, TorchProgram, is_final
from halotile.graphs.runs.signals import run_child
from halotile.graphs.words import first_line
from halotile.tasks.devices.device import allow_memory
from halotile.tasks.groups.opening import Rendezvous
from halotile.tasks.groups.script import run_script


def execute(command: Sequence[str], order: Order, *, started: Callable[[str | None], None] = lambda _: None) -> int:
    """Run a command beside a cluster that ``Client()`` and ``DistributedContext()`` in it join; return its exit code.

    ``command``: program with its arguments; ``order``: requirements for the cluster; ``started``: called with the dashboard's address once there is a
    worker.

    >>> execute(["python", "script.py"], Order(workers=2, memory_bytes=2**31))  # doctest: +SKIP
    0
    """
    if is_other_copy(order.choice):
        from halotile.graphs.clusters.ranks import serve

        serve(private_base())
        return 0
    kind = cluster_kind_of(order.choice)
    environment = dict(os.environ)
    with ExitStack() as contexts:
        if not kind.traits.joins and order.choice.tls:
            tls = contexts.enter_context(credentials(private_base()))
            environment |= tls.environment()
            # Logs go with the certificates; copies of the command find the driver in a folder that all of them know.
            folder = private_base() if kind.traits.of_copies else tls.folder
            order = dataclasses.replace(order, credentials=tls, folder=order.folder or folder)
        cluster = contexts.enter_context(kind.start(order))
        await_workers(cluster, order.report)
        started(cluster.dashboard)
        environment[ADDRESS] = str(cluster.client.scheduler.address)
        allow_memory(None)  # the script decides about its memory
        code = run_child(command, environment)
    return code if code >= 0 else 128 - code


TOPIC = "halotile-ranks"  # events of Dask with the output of the ranks
# With 0, Dask would give up the task of a rank whose worker died before the driver sees that the worker is gone.
DEATHS = 2


def execute_torch(
    script: str,  # path of a Python script that all workers see
    arguments: Sequence[str],
    order: Order,  # requirements for the cluster
    *,
    # further attempts after a rank has failed, from the beginning of the script, on the workers that are left or come
    # back
    retries: int = 0,
    # each rank sees all GPUs of its machine, as under torchrun, instead of its own alone
    all_gpus: bool = False,
    line: Callable[[str], None] = print,  # called with each line that a rank prints, after `[rank]`
) -> None:
    """Run a script as the ranks of a torch program, one on each worker of a cluster that is started for it."""
    kind = cluster_kind_of(order.choice)
    check_one_script(kind, "exec --torch starts the ranks itself", words=sys.argv[2:])
    # Workers on other machines see the home; on one machine a file system without locks is spared.
    base = Path(gettempdir()) if kind.traits.is_here else private_base()
    with (
        owned_folder(base, "halotile-ranks-") as folder,
        kind.start(dataclasses.replace(order, folder=folder, deaths=DEATHS)) as cluster,
    ):

        def show(event: tuple[float, dict[str, Any]]) -> None:
            line(f"[{event[1]['rank']}] {event[1]['line']}")

        cluster.client.subscribe_topic(TOPIC, show)

        def program_of(attempt: int) -> TorchProgram:
            call = partial(
                run_rank_of_script, script, tuple(arguments),
                attempt=attempt, retries=retries, all_gpus=all_gpus,
            )  # fmt: skip
            return TorchProgram(call, folder)

        _run(program_of, cluster, order, retries)


def _run(program_of: Callable[[int], TorchProgram], cluster: RunningCluster, order: Order, retries: int) -> None:
    """Run the program of each attempt on all workers of the order; after a failure on those that are there then."""
    ranks: int | None = order.workers
    for attempt in range(retries + 1):
        await_workers(cluster, order.report, wanted=ranks or 1)
        try:
            program_of(attempt).run(cluster.client, ranks, 0, order.workers)
            return
        except RankFailed as error:
            if attempt == retries or is_final(error):
                raise
            order.report(
                f"{first_line(str(error))}\nStarting again with the workers that are there within {RETURN_SECONDS:g} s: "
                f"attempt {attempt + 2} of {retries + 1}"
            )
            ranks = None


def run_rank_of_script(
    script: str,
    arguments: tuple[str, ...],
    place: Rendezvous,
    *,
    attempt: int = 0,
    retries: int = 0,
    all_gpus: bool = False,
) -> None:
    """Run a script as one rank on this worker; each line of its output is an event."""
    worker = get_worker()

    def send(text: str) -> None:
        worker.log_event(TOPIC, {"rank": place.rank, "line": text})

    run_script(script, arguments, place, send, attempt, retries, all_gpus=all_gpus)
