"""Answers of a cluster, the arrival of its workers, and their versions: every wait has a limit and heeds signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.words import counted

if TYPE_CHECKING:
    from distributed import Client

WAIT_STEP_SECONDS = 0.2
QUIET_SECONDS = 3.0  # a shorter wait is not reported


def await_workers(
    cluster: RunningCluster,
    report: Callable[[str], None],  # takes a line for the user
    between: Callable[[], None] = lambda: None,  # called several times a second; what it raises ends the wait
    wanted: int = 1,  # number of workers to wait for
) -> None:
    """Wait until there is a worker, or so many; report whenever the reason changes for which there are fewer."""
    began, reported = time.monotonic(), None
    first = f"the first of {counted(cluster.workers, 'worker')}"
    while (missing := cluster.missing(wanted)) is not None:
        if missing != reported and time.monotonic() - began > QUIET_SECONDS:
            report(f"waiting for {first if wanted == 1 else f'{wanted} workers'}: {missing}")
            reported = missing
        cluster.check(wanted)
        between()
        time.sleep(WAIT_STEP_SECONDS)


RPC_SECONDS = 60.0  # longest wait for any single answer from a cluster
POLL_SECONDS = 0.5


class Unanswered(ConnectionError):
    """A cluster gave no answer in time."""


def ask(
    client: Client,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = RPC_SECONDS,  # longest wait
    # called about twice a second during the wait; an exception from it ends the wait
    between: Callable[[], object] = lambda: None,
    **kwargs: Any,
) -> Any:
    """Call a method of a client, or a coroutine function, in the client's event loop, and return its answer."""
    from distributed import CancelledError
    from distributed.comm import CommClosedError

    async def call() -> Any:
        answer = asyncio.ensure_future(function(*args, **kwargs))
        try:
            if not (await asyncio.wait([answer], timeout=seconds))[0]:
                raise unanswered
            return await answer
        finally:
            answer.cancel()

    if client.status != "running":
        raise ConnectionError(f"the scheduler is gone (the connection is {client.status}).")
    unanswered = Unanswered(f"the cluster does not answer within {seconds:g} s.")
    asked = asyncio.run_coroutine_threadsafe(call(), client.loop.asyncio_loop)
    end = time.monotonic() + seconds + POLL_SECONDS  # where the event loop itself is blocked
    try:
        while True:
            try:
                return asked.result(POLL_SECONDS)
            except TimeoutError:
                if asked.done() and isinstance(asked.exception(0), TimeoutError):
                    raise  # of what was asked
                if time.monotonic() > end:
                    raise unanswered from None
            except (CommClosedError, CancelledError) as error:
                raise ConnectionError(f"the cluster does not answer ({type(error).__name__}: {error}).") from error
            between()
    finally:
        asked.cancel()


def fetch(client: Client, futures: Any, *, errors: str = "raise", **limits: Any) -> Any:
    """Return the results of finished futures, in the order or under the keys given; limits as for :func:`ask`.

    A result is lost with its worker. Dask computes it again, and for ever waits to do so where the task is pinned to that worker.
    """
    return ask(client, client.gather, futures, errors=errors, asynchronous=True, **limits)


def present_workers(client: Client, **limits: Any) -> dict[str, dict[str, Any]]:
    """Description of each worker of a scheduler, by address; limits as for :func:`ask`.

    ``Client.scheduler_info`` keeps the answer where an update in the background may replace it by one without workers.
    """
    workers: dict[str, dict[str, Any]] = ask(client, client.scheduler.identity, n_workers=-1, **limits)["workers"]
    return workers


# A difference of versions may change bits, or fail far from its cause.
PACKAGES = ["halotile", "torch", "zarr", "numcodecs", "scipy"]  # packages besides those that Dask compares itself
_NEEDED = ("python", "dask", "distributed", "numpy", "cloudpickle", *PACKAGES)


def differing_versions(client: Client) -> tuple[str, ...]:
    """A line for each package that workers have in another version than this process, or not at all."""
    found = ask(client, client.get_versions, packages=PACKAGES)
    return tuple(_lines(found["client"]["packages"], found["workers"]))


def _lines(ours: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each difference.

    >>> _lines({"numpy": "2.4"}, {"a": {"packages": {"numpy": "2.4"}}, "b": {"packages": {"numpy": "2.3"}}})
    ['numpy is 2.4 here, and 2.3 on b']
    >>> _lines({"halotile": "0.1"}, {"a": {"packages": {"halotile": None}}})
    ['halotile is 0.1 here, and not there on a']
    """
    lines = []
    for package in _NEEDED:
        theirs: dict[str, list[str]] = {}
        for name, facts in workers.items():
            theirs.setdefault(str(facts["packages"].get(package) or "not there"), []).append(name)
        here = str(ours.get(package) or "not there")
        others = [f"{version} on {_listed(names)}" for version, names in theirs.items() if version != here]
        if package in ours and others:
            lines.append(f"{package} is {here} here, and {', '.join(others)}")
    return lines


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
