"""One rank of a torch program on its worker: its call, its end as a value, and the place in the code where it is."""

from __future__ import annotations

import io
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

from halotile.errors import HalotileError, PeerLost, RankFailed
from halotile.tasks.devices.memory_limits import release_memory
from halotile.tasks.groups.opening import Rendezvous, opened, wait_at_end


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
    """Let this process start others, as loaders of data do; multiprocessing refuses that to daemons, which workers are."""
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    is_daemon = settings.pop("daemon", None)
    try:
        yield
    finally:
        if is_daemon is not None:
            settings["daemon"] = is_daemon


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        """Drop the bytes."""
        return len(data)


def _check_sendable(result: Any) -> None:
    """Refuse a result that cannot be sent to the driver; Dask would print the same traceback again and again."""
    try:
        cloudpickle.Pickler(_Nowhere(), protocol=5, buffer_callback=lambda _: False).dump(result)
    except Exception as error:
        raise TypeError(
            f"the result of the rank, a {type(result).__name__}, cannot be pickled: {error}"
        ) from None


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
    from halotile.tasks.groups.gloo import is_lost_peer

    return error is not None and (
        isinstance(error, PeerLost) or is_lost_peer(error) or _is_by_others(error.__cause__)
    )


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
    return any(
        frame.f_code is code
        for top in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(top)
    )
