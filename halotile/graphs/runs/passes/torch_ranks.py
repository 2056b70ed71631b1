"""Torch programs on a cluster: one rank on each of several workers, all of them or none, ended together."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client, Future, KilledWorker

from halotile.errors import ConfigError, DamagedData, HalotileError, InputUnreadable, PeerLost, RankFailed, WorkerDied
from halotile.graphs.clusters.common.answers import RPC_SECONDS, ask, fetch, present_workers
from halotile.graphs.clusters.common.security import host_of
from halotile.tasks.devices.device import release_memory
from halotile.tasks.groups.opening import END_SECONDS, Rendezvous, opened, wait_at_end


@dataclass(frozen=True)
class RankEnd:
    """End of one rank: its result, or its failure."""

    rank: int
    result: Any = None
    trace: str = ""  # traceback of its failure; empty where it succeeded
    by_others: bool = False  # true where it failed because another rank did
    cause: HalotileError | None = None  # its failure, where halotile has words for it

    @classmethod
    def lost(cls, rank: int, worker: str) -> RankEnd:
        """The end of a rank whose worker is gone."""
        return cls(
            rank,
            trace=(
                f"its worker {worker} died: it was killed, ran out of memory, or passed a collective another dtype (as float64 where the other "
                "ranks pass float32) or another shape, which aborts a process."
            ),
        )


def call_with_group(function: Callable[..., Any], args: tuple[Any, ...], place: Rendezvous) -> Any:
    """Call a function with the group of a rank."""
    with opened(place) as group, _with_children():
        return function(group, *args)


@contextmanager
def _with_children() -> Iterator[None]:
    """Let this process start others, as loaders of data do; multiprocessing refuses that to daemons, which workers are.

    They start as those of a script do. The method of the worker itself would have to pickle the script's own classes.
    """
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    is_daemon, method = settings.pop("daemon", None), multiprocessing.get_start_method()
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        if is_daemon is not None:
            settings["daemon"] = is_daemon


class _TrialPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that leaves out the values of tensors, which torch would copy."""

    def reducer_override(self, obj: Any) -> Any:
        return (bool, ()) if type(obj).__module__ == "torch.storage" else super().reducer_override(obj)


def _check_sendable(result: Any) -> None:
    """Refuse a result that cannot be sent to the driver; Dask would print the same traceback again and again."""
    try:
        with open(os.devnull, "wb") as nowhere:
            _TrialPickler(nowhere, protocol=5, buffer_callback=lambda _: False).dump(result)
    except Exception as error:
        raise TypeError(f"the result of the rank, a {type(result).__name__}, cannot be pickled: {error}") from None


def run_rank(call: Callable[[Rendezvous], Any], place: Rendezvous) -> RankEnd:
    """Run one rank of a program on this worker; its failure is a value, so that the driver sees those of all ranks."""
    try:
        result = call(place)
        _check_sendable(result)
        return RankEnd(place.rank, result)
    except RankFailed as error:
        return RankEnd(place.rank, trace=str(error), by_others=_is_by_others(error))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the last two would end the worker
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
    from halotile.tasks.groups.group import is_lost_peer

    return error is not None and (isinstance(error, PeerLost) or is_lost_peer(error) or _is_by_others(error.__cause__))


def stack_of_rank() -> str:
    """The traceback of a rank in this process that is about to be ended; empty if there is none. A script prints it itself."""
    from halotile.tasks.groups.script import print_place  # with torch, which a driver does without

    return print_place() or place_of_rank()


def place_of_rank() -> str:
    """The traceback of the rank that is at work in this process; empty if there is none.

    Empty for a script too: it prints its place at a signal, which would end a script that is just about to end by itself.
    """
    from halotile.tasks.groups.script import runs_script  # with torch

    if runs_script():
        return ""
    for top in sys._current_frames().values():
        frames = [*traceback.walk_stack(top)]
        own = [place for place, (frame, _) in enumerate(frames) if frame.f_code is run_rank.__code__]
        if own:
            lines = traceback.StackSummary.extract(reversed(frames[: own[0]])).format()
            return "".join(["Stack (most recent call last):\n", *lines])
    return ""


def has_returned() -> bool:
    """Return True where the function of the rank in this process has returned, and the rank waits for the others to return."""
    code = wait_at_end.__code__
    return any(frame.f_code is code for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top))


LOOK_SECONDS = 2.0  # time in which a worker answers about its rank; one that was stopped does not
LINGER_SECONDS = 60.0  # time between the first looks at ranks that may wait for others; after each report it doubles


def warn(text: str) -> None:
    """Warn the caller of :meth:`~halotile.graphs.distributed.context.DistributedContext.run_torch`."""
    warnings.warn(text, stacklevel=7)


@dataclass
class RankWatch:
    """Reports the ranks that are still at work, again and again, once others have returned."""

    client: Client  # connection to the cluster
    workers: Sequence[str]  # worker of each rank
    report: Callable[[str], None]  # called with each report
    pause: float = field(default_factory=lambda: LINGER_SECONDS)
    looked: float = field(default_factory=time.monotonic)  # time of the last look
    returned: float | None = None  # time at which some ranks were first seen to have returned

    def check(self, ended: Collection[int]) -> None:
        """Ask the ranks where it is time for it; those that have ended are known."""
        now = time.monotonic()
        if now - self.looked < self.pause:
            return
        self.looked = now
        still = [worker for rank, worker in enumerate(self.workers) if rank not in ended]
        waiting = answers(self.client, has_returned, still)
        at_work = [worker for worker in still if not waiting.get(worker)]
        if not at_work or len(at_work) == len(self.workers):
            return
        if self.returned is None:  # they may have returned just now
            self.returned = now
            return
        self.pause *= 2
        self.report(self._text(at_work, now - self.returned))

    def _text(self, at_work: Sequence[str], seconds: float) -> str:
        ranks = [str(self.workers.index(worker)) for worker in at_work]
        are = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"
        place = stacks(self.client, place_of_rank, at_work)
        here = f" The place in the code:\n{place}" if place else ""
        return (
            f"{are} still at work, and the other ranks of {len(self.workers)} returned more than {seconds:.0f} s ago."
            f"{here}"
        )


def stacks(client: Client, question: Callable[[], str], workers: Sequence[str]) -> str:
    """Tracebacks of the ranks on some workers, as far as these answer."""
    found = answers(client, question, workers)
    return "".join(found.get(worker) or "" for worker in workers)


def answers(client: Client, question: Callable[[], Any], workers: Sequence[str]) -> dict[str, Any]:
    """Answers of those workers that give one in time."""
    given: dict[str, Any] = {}

    async def ask_one(worker: str) -> None:
        with suppress(Exception):  # a worker may end just now
            given.update(await asyncio.wait_for(client.run(question, workers=[worker]), LOOK_SECONDS))

    async def ask_all() -> None:
        await asyncio.gather(*map(ask_one, workers))

    with suppress(Exception):
        ask(client, ask_all)
    return given


GRACE_SECONDS = 3.0  # time that ranks have to end by themselves once one has failed; connections to it break at once
POLL_SECONDS = 0.2
QUICK_SECONDS = 5.0  # time in which the end of a short program is noticed at once
RETURN_SECONDS = 60.0  # time in which workers come back before another attempt
RESTART_SECONDS = 30.0


@dataclass(frozen=True)
class TorchProgram:
    """A program that runs as several ranks."""

    call: Callable[[Rendezvous], Any]  # called on each worker with the `Rendezvous` of its rank
    folder: Path  # private folder that all workers see, in which the ranks meet
    backend: str = "auto"  # backend, device_mode, timeout_seconds, end_seconds: as for `Rendezvous`
    device_mode: str | None = None
    timeout_seconds: float = 60.0
    end_seconds: float = END_SECONDS
    advice: str = ""  # last words of the error where a rank does not answer
    # called with words about ranks that are still at work long after others have returned
    report: Callable[[str], None] = warn

    def run(
        self,
        client: Client,  # connection to the cluster
        # number of ranks, each on a worker of its own; None: one on every worker that is there
        ranks: int | None,
        retries: int,  # further attempts, from the beginning of the function, after a rank has failed
        # number of workers of the cluster, and some may just be coming back; no more take part
        usual: int = 1,
        # called again and again while the ranks work; its errors end them
        between: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Run the ranks to their end; return their results in order."""
        workers = _returned(client, ranks, min(ranks or usual, usual), between)[: ranks or usual]
        for attempt in range(retries + 1):
            try:
                return self._attempt(client, workers, between)
            except RankFailed as error:
                if attempt == retries or is_final(error):
                    raise
                warnings.warn(f"{error} Starting again: attempt {attempt + 2} of {retries + 1}.", stacklevel=3)
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

        def left() -> list[int]:
            return [rank for rank in range(len(workers)) if rank not in ends]

        try:
            self._await(client, futures, workers, ends, between)
            hanging = stacks(client, stack_of_rank, [workers[rank] for rank in left()])
        finally:
            hung = [workers[rank] for rank in left()]
            with suppress(ConnectionError):
                ask(client, client.cancel, futures, force=True)
            is_restarted = _restart(client, hung)
            Path(meeting).unlink(missing_ok=True)
        failed = [end for end in ends.values() if end.trace]
        if failed or hung:
            causes = (end.cause for end in failed if end.cause)
            raise _failure(failed, left(), len(workers), is_restarted, hanging, self.advice) from next(causes, None)
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
        watch = RankWatch(client, workers, self.report)
        while len(ends) < len(futures) and (failed_at is None or time.monotonic() < failed_at + GRACE_SECONDS):
            is_young = not ends and time.monotonic() < began + QUICK_SECONDS
            time.sleep(POLL_SECONDS / 10 if is_young else POLL_SECONDS)
            between()
            present = present_workers(client, between=between)
            for rank, (future, worker) in enumerate(zip(futures, workers, strict=True)):
                if rank in ends:
                    continue
                if future.done():
                    ends[rank] = self._end_of(client, future, rank, worker, between)
                elif worker not in present:
                    ends[rank] = RankEnd.lost(rank, worker)
            if failed_at is None and any(end.trace for end in ends.values()):
                failed_at = time.monotonic()
            if failed_at is None:
                watch.check(ends)

    def _end_of(self, client: Client, future: Future, rank: int, worker: str, between: Callable[[], None]) -> RankEnd:
        """Fetch the end of a rank from its worker, which may die meanwhile: no other worker would compute it again."""

        def check_worker() -> None:
            between()
            if worker not in present_workers(client, between=between):
                raise WorkerDied(f"{worker} is gone.")

        seconds = max(RPC_SECONDS, self.timeout_seconds)
        end: RankEnd
        try:
            (end,) = fetch(client, [future], seconds=seconds, between=check_worker)
        except (KilledWorker, WorkerDied):  # the scheduler may say so before the worker is missed
            return RankEnd.lost(rank, worker)
        except HalotileError:
            raise
        except Exception as error:
            return RankEnd(rank, trace="".join(traceback.format_exception_only(error)))
        return end


def is_final(error: RankFailed) -> bool:
    """Return True where another attempt would not help: a fault of the input or the settings. What cannot be read may be readable later."""
    return isinstance(error.__cause__, HalotileError) and not isinstance(error.__cause__, DamagedData | InputUnreadable)


def _failure(
    failed: Sequence[RankEnd], hung: Sequence[int], count: int, is_restarted: bool, hanging: str = "", advice: str = ""
) -> RankFailed:
    """The error of a program: first that of the rank that failed by itself, or waited in vain, then the others in a line."""
    causes = sorted(failed, key=lambda end: (end.by_others, end.by_others and "imed out" not in end.trace, end.rank))
    first = causes[0]
    if first.by_others and hung:
        listed = ", ".join(map(str, hung))
        place = f" It was here:\n{hanging.rstrip()}\n" if hanging else ""
        then = "was started anew" if is_restarted else "could not be started anew: it may still be at work"
        return RankFailed(
            f"rank {listed} of {count} did not answer the others in time, and its worker {then}.{place} The first that waited for it:\n"
            f"{first.trace.rstrip()}\n{advice}",
            hung[0],
        )
    way = "ended by force" if is_restarted else "may still be at work"
    others = [f"rank {end.rank}" for end in causes[1:]] + [f"rank {rank} ({way})" for rank in hung]
    then = f"\nThen ended: {', '.join(others)}." if others else ""
    return RankFailed(f"rank {first.rank} of {count} failed: {first.trace.rstrip()}{then}", first.rank)


def _workers_for(client: Client, ranks: int | None) -> list[str]:
    """Addresses of the workers of the ranks, in a fixed order."""
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
            states = ask(client, client.restart_workers, list(workers), timeout=RESTART_SECONDS, raise_for_error=False)
            return set(states.values()) == {"OK"}
    return False
