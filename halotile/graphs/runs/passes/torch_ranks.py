"""Torch programs on a cluster: one rank on each of several workers, all of them or none, ended together."""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client, Future

from halotile.errors import (
    ConfigError,
    DamagedData,
    HalotileError,
    InputUnreadable,
    PeerLost,
    RankFailed,
    WorkerDied,
)
from halotile.graphs.clusters.connection.addresses import host_of
from halotile.graphs.clusters.connection.present import present_workers
from halotile.tasks.devices.memory_limits import release_memory
from halotile.tasks.groups.opening import END_SECONDS, Rendezvous, opened
from halotile.tasks.groups.script import print_place

GRACE_SECONDS = 3.0
"""Time that ranks have to end by themselves once one has failed; connections to it break at once."""
POLL_SECONDS = 0.2
QUICK_SECONDS = 5.0
"""Time in which the end of a short program is noticed at once."""
RETURN_SECONDS = 60.0
"""Time in which workers come back before another attempt."""
RESTART_SECONDS = 30.0
LOOK_SECONDS = 2.0
"""Time in which a worker tells where its rank hangs; one that was stopped does not."""


@dataclass(frozen=True)
class RankEnd:
    """End of one rank: its result, or its failure."""

    rank: int
    result: Any = None
    trace: str = ""
    """Traceback of its failure; empty where it succeeded."""
    by_others: bool = False
    """True where it failed because another rank did."""
    cause: HalotileError | None = None
    """Its failure, where halotile has words for it."""

    @classmethod
    def lost(cls, rank: int, worker: str) -> RankEnd:
        """The end of a rank whose worker is gone."""
        return cls(rank, trace=f"its worker {worker} died: it was killed, or ran out of memory.")


@dataclass(frozen=True)
class TorchProgram:
    """A program that runs as several ranks.

    Parameters
    ----------
    call : callable
        Called on each worker with the :class:`~halotile.tasks.groups.opening.Rendezvous` of its rank.
    folder : Path
        A private folder that all workers see, in which the ranks meet.
    backend, device_mode, timeout_seconds, end_seconds
        As for :class:`~halotile.tasks.groups.opening.Rendezvous`.
    """

    call: Callable[[Rendezvous], Any]
    folder: Path
    backend: str = "auto"
    device_mode: str | None = None
    timeout_seconds: float = 60.0
    end_seconds: float = END_SECONDS

    def run(
        self,
        client: Client,
        ranks: int | None,
        retries: int,
        usual: int = 1,
        between: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Run the ranks to their end; return their results in order.

        Parameters
        ----------
        client : Client
            Connection to the cluster.
        ranks : int, optional
            Number of ranks, each on a worker of its own; None: one on every worker that is there.
        retries : int
            Further attempts, from the beginning of the function, after a rank has failed.
        usual : int
            Number of workers of the cluster, some of which may just be coming back; no more take part.
        between : callable
            Called again and again while the ranks work; its errors end them.

        Raises
        ------
        ConfigError
            When there are fewer workers than ranks.
        WorkerDied
            When no worker is there.
        RankFailed
            When a rank failed in every attempt.
            Its cause is the error of halotile in that rank, if it was one.
        """
        workers = _returned(client, ranks, min(ranks or usual, usual), between)[: ranks or usual]
        for attempt in range(retries + 1):
            try:
                return self._attempt(client, workers, between)
            except RankFailed as error:
                if attempt == retries or is_final(error):
                    raise
                warnings.warn(
                    f"{error} Starting again: attempt {attempt + 2} of {retries + 1}.", stacklevel=3
                )
                try:
                    workers = _returned(client, ranks, len(workers), between)[: len(workers)]
                except ConfigError:  # fewer than were asked for came back
                    raise error from None
        raise AssertionError

    def _attempt(self, client: Client, workers: Sequence[str], between: Callable[[], None]) -> list[Any]:
        """Run the ranks once, each on one of the workers."""
        token = secrets.token_hex(8)
        meeting = str(self.folder / f"ranks-{token}")
        hosts = [host_of(worker) for worker in workers]
        machines = [*dict.fromkeys(hosts)]
        places = [
            Rendezvous(
                rank, len(workers), hosts[:rank].count(host), meeting, host, self.backend, self.device_mode, self.timeout_seconds,
                local_size=hosts.count(host), end_seconds=self.end_seconds, machine=machines.index(host),
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        futures = [
            client.submit(
                run_rank, self.call, place,
                key=f"rank-{place.rank}-{token}", workers=[worker], allow_other_workers=False, pure=False, priority=10, retries=0,
            )
            for place, worker in zip(places, workers, strict=True)
        ]  # fmt: skip
        ends: dict[int, RankEnd] = {}
        hanging = ""
        try:
            self._await(client, futures, workers, ends, between)
            hanging = _where(client, [worker for rank, worker in enumerate(workers) if rank not in ends])
        finally:
            hung = [worker for rank, worker in enumerate(workers) if rank not in ends]
            client.cancel(futures, force=True)
            is_restarted = _restart(client, hung)
            Path(meeting).unlink(missing_ok=True)
        failed = [end for end in ends.values() if end.trace]
        if failed or hung:
            causes = (end.cause for end in failed if end.cause)
            left = [rank for rank in range(len(workers)) if rank not in ends]
            raise _failure(failed, left, len(workers), is_restarted, hanging) from next(causes, None)
        return [ends[rank].result for rank in range(len(workers))]

    def _await(
        self,
        client: Client,
        futures: Sequence[Future],
        workers: Sequence[str],
        ends: dict[int, RankEnd],
        between: Callable[[], None],
    ) -> None:
        """Wait until all ranks have ended, or some seconds after the first failure."""
        began, failed_at = time.monotonic(), None
        while len(ends) < len(futures) and (
            failed_at is None or time.monotonic() < failed_at + GRACE_SECONDS
        ):
            is_young = not ends and time.monotonic() < began + QUICK_SECONDS
            time.sleep(POLL_SECONDS / 10 if is_young else POLL_SECONDS)
            between()
            if client.status != "running":
                raise ConnectionError(f"the scheduler is gone (the connection is {client.status}).")
            present = present_workers(client)
            for rank, (future, worker) in enumerate(zip(futures, workers, strict=True)):
                if rank in ends:
                    continue
                if future.done():
                    ends[rank] = _end_of(future, rank)
                elif worker not in present:
                    ends[rank] = RankEnd.lost(rank, worker)
            if failed_at is None and any(end.trace for end in ends.values()):
                failed_at = time.monotonic()


def is_final(error: RankFailed) -> bool:
    """Return True where another attempt would not help: a fault of the input or the settings. What cannot be read may be readable later."""
    return isinstance(error.__cause__, HalotileError) and not isinstance(
        error.__cause__, DamagedData | InputUnreadable
    )


def call_with_group(function: Callable[..., Any], args: tuple[Any, ...], place: Rendezvous) -> Any:
    """Call a function with the group of a rank."""
    with opened(place) as group:
        return function(group, *args)


def run_rank(call: Callable[[Rendezvous], Any], place: Rendezvous) -> RankEnd:
    """Run one rank of a program on this worker; its failure is a value, so that the driver sees those of all ranks."""
    try:
        return RankEnd(place.rank, call(place))
    except RankFailed as error:
        return RankEnd(place.rank, trace=str(error), by_others=_is_by_others(error))
    except (Exception, SystemExit) as error:  # the latter would end the worker
        own = error.__traceback__ and error.__traceback__.tb_next  # without this function
        trace = "".join(traceback.format_exception(error.with_traceback(own)))
        by_others = _is_by_others(error)
        cause = error.with_traceback(None) if isinstance(error, HalotileError) and not by_others else None
        del own  # with the rank's tensors
        return RankEnd(place.rank, trace=trace, by_others=by_others, cause=cause)
    finally:
        release_memory()


def _is_by_others(error: BaseException | None) -> bool:
    """Return True where an error, or one of its causes, is the end of another rank."""
    from halotile.tasks.groups.gloo import is_lost_peer

    return error is not None and (
        isinstance(error, PeerLost) or is_lost_peer(error) or _is_by_others(error.__cause__)
    )


def _end_of(future: Future, rank: int) -> RankEnd:
    try:
        end: RankEnd = future.result()
    except Exception as error:
        return RankEnd(rank, trace="".join(traceback.format_exception_only(error)))
    return end


def _where(client: Client, workers: Sequence[str]) -> str:
    """Tracebacks of the ranks that hang on some workers; empty if one of these does not answer."""
    stacks: dict[str, str] = {}

    def ask() -> None:
        with suppress(Exception):  # a worker may end just now
            stacks.update(client.run(_stack_of_rank, workers=list(workers)))

    if workers:
        thread = threading.Thread(target=ask, daemon=True)  # one that does not answer is not waited for
        thread.start()
        thread.join(LOOK_SECONDS)
    return "".join(stacks.get(worker) or "" for worker in workers)


def _stack_of_rank() -> str:
    """The traceback of the rank that is at work in this process; empty if there is none. A script prints it itself."""
    if said := print_place():
        return said
    for top in sys._current_frames().values():
        frames = [*traceback.walk_stack(top)]
        own = [place for place, (frame, _) in enumerate(frames) if frame.f_code is run_rank.__code__]
        if own:
            lines = traceback.StackSummary.extract(reversed(frames[: own[0]])).format()
            return "".join(["Stack (most recent call last):\n", *lines])
    return ""


def _failure(
    failed: Sequence[RankEnd], hung: Sequence[int], count: int, is_restarted: bool, hanging: str = ""
) -> RankFailed:
    """The error of a program: first that of the rank that failed by itself, or waited in vain, then the others in a line."""
    causes = sorted(
        failed, key=lambda end: (end.by_others, end.by_others and "imed out" not in end.trace, end.rank)
    )
    first = causes[0]
    if first.by_others and hung:
        listed = ", ".join(map(str, hung))
        where = f" It was here:\n{hanging.rstrip()}\n" if hanging else ""
        then = "was started anew" if is_restarted else "could not be started anew: it may still be at work"
        return RankFailed(
            f"rank {listed} of {count} did not answer the others in time, and its worker {then}.{where} The first that waited for it:\n"
            f"{first.trace}",
            hung[0],
        )
    way = "ended by force" if is_restarted else "may still be at work"
    others = [f"rank {end.rank}" for end in causes[1:]] + [f"rank {rank} ({way})" for rank in hung]
    then = f"\nThen ended: {', '.join(others)}." if others else ""
    return RankFailed(f"rank {first.rank} of {count} failed: {first.trace.rstrip()}{then}", first.rank)


def _workers_for(client: Client, ranks: int | None) -> list[str]:
    """Addresses of the workers of the ranks, in a fixed order.

    Raises
    ------
    WorkerDied
        When there is none.
    ConfigError
        When there are too few.
    """
    present = present_workers(client)
    if not present:
        raise WorkerDied(f"no worker came back within {RETURN_SECONDS:g} s.")
    workers = sorted(present, key=lambda address: (str(present[address]["name"]).rjust(12), address))
    if len(workers) < (ranks or 0):
        raise ConfigError(
            f"ranks is {ranks}, and the cluster has {len(workers)} workers: each rank takes one. "
            f"Write ranks={len(workers)}, or start more workers."
        )
    return workers[:ranks]


def _returned(client: Client, ranks: int | None, count: int, between: Callable[[], None]) -> list[str]:
    """Wait for so many workers, for a while; where the number of ranks is open, go on with those that are left."""
    end = time.monotonic() + RETURN_SECONDS
    while len(present_workers(client)) < count and time.monotonic() < end:
        between()
        time.sleep(POLL_SECONDS)
    return _workers_for(client, ranks)


def _restart(client: Client, workers: Sequence[str]) -> bool:
    """Start workers anew whose rank does not end, and return True if all are; where one has no nanny, they stay as they are."""
    if workers and client.status == "running":
        with suppress(Exception):
            states = client.restart_workers(list(workers), timeout=RESTART_SECONDS, raise_for_error=False)
            return set(states.values()) == {"OK"}
    return False
