"""Sees to it that as many workers live as were asked for: lost pieces are replaced, and given up when they keep ending at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from halotile.errors import ClusterFailed
from halotile.graphs.amounts import counted, first_line
from halotile.graphs.clusters.launches.base import Look, Piece, State

LOOK_SECONDS = 2.0
SLOW_SECONDS = 10.0
CALM_SECONDS = 30.0
"""After so long without a change it is looked less often: batch systems have others to answer."""
HEALTHY_SECONDS = 60.0
"""A piece that had its worker for so long did not end for a fault of its own."""
SPARE = 2
"""Pieces that may end at once besides one for each worker, before no more are tried."""
LONGEST_PAUSE_SECONDS = 30.0
FORGIVE_SECONDS = 300.0
"""A cluster that goes on with fewer workers asks for the others again after this."""
CALL_SECONDS = 60.0


class Keeper:
    """Watches the pieces of a cluster from a thread.

    Parameters
    ----------
    cluster : distributed.SpecCluster
        Holds the pieces.
    workers : int
        How many were asked for.
    look : callable
        How pieces stand that have no worker.
    report : callable
        Takes a line for whoever watches.
    room : callable, optional
        How many pieces there is room for by now.
    """

    def __init__(
        self,
        cluster: Any,
        workers: int,
        look: Look,
        report: Callable[[str], None],
        room: Callable[[], int] | None = None,
    ) -> None:
        self.cluster = cluster
        self.workers = workers
        self.look = look
        self.report = report
        self.room = room or (lambda: workers)
        self._since: dict[Any, float] = {}
        """When each worker was seen first, of those that are there."""
        self._healthy: set[Any] = set()
        """Names of pieces whose workers were there for a while, whether they are now or not."""
        self._ended_early = 0
        self._not_before = 0.0
        self._waiting = "starting"
        self._changed = 0.0
        """When something was last other than before."""
        self._seen: Any = None
        self._failure: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="halotile-keeper", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=CALL_SECONDS)

    def missing(self) -> str | None:
        """Why no worker is there yet; None once one is."""
        return None if self._connected() else self._waiting

    def check(self) -> None:
        """Raise when no worker is there, and none will be.

        Raises
        ------
        ClusterFailed
            With the reason that was given, and the end of the log.
        """
        if self._failure is not None and not self._connected():
            raise ClusterFailed(self._failure)

    def _keep(self) -> None:
        stumbled = ""
        while not self._over.is_set():
            try:
                self._round()
            except Exception as error:  # it goes on: nobody else would replace the next worker that is lost
                words = f"{type(error).__name__}: {error}"
                if words != stumbled and self.cluster.status.name == "running":
                    self.report(f"looking after the workers failed, and is tried again: {first_line(words)}")
                stumbled = words
            self._over.wait(LOOK_SECONDS if time.monotonic() - self._changed < CALM_SECONDS else SLOW_SECONDS)

    def _round(self) -> None:
        now = time.monotonic()
        connected = self._connected()
        self._note_health(connected, now)
        absent = {name: piece for name, piece in dict(self.cluster.workers).items() if name not in connected}
        states = self._states(list(absent.values()))
        over = {name: piece for name, piece in absent.items() if piece in states and states[piece].over}
        if over:
            self._bury(over, states, now)
        now_seen = (frozenset(connected), frozenset(state.words for state in states.values()))
        if over or now_seen != self._seen:
            self._changed, self._seen = now, now_seen
        waiting = [state.words for piece, state in states.items() if not state.over]
        if waiting:
            self._waiting = _describe(waiting)
        if now >= self._not_before:
            if self._failure is not None:  # those that are left have gone on; what was wrong may be mended
                self._failure, self._ended_early = None, 0
            self.cluster.scale(min(self.workers, self.room()))

    def _connected(self) -> set[Any]:
        return {each["name"] for each in list(self.cluster.scheduler_info["workers"].values())}

    def _note_health(self, connected: set[Any], now: float) -> None:
        for name in self._since.keys() - connected:
            del self._since[name]
        for name in connected:
            since = self._since.setdefault(name, now)
            if now - since >= HEALTHY_SECONDS and name not in self._healthy:
                self._healthy.add(name)
                self._ended_early = 0

    def _states(self, absent: Sequence[Piece]) -> dict[Piece, State]:
        refused = {piece: State(True, piece.read_error) for piece in absent if piece.read_error}
        requested = [piece for piece in absent if piece not in refused and piece.title]
        return refused | (dict(self.look(requested)) if requested else {})

    def _bury(self, over: dict[Any, Piece], states: dict[Piece, State], now: float) -> None:
        """Let go of pieces that ended without a worker, so that others are asked for."""
        self.cluster.sync(self.cluster.scale_down, list(over), callback_timeout=CALL_SECONDS)
        early = over.keys() - self._healthy
        self._healthy -= over.keys()
        self._ended_early += len(early)
        self._not_before = now + min(LONGEST_PAUSE_SECONDS, 2.0 ** min(self._ended_early, 10))
        piece = next(iter(over.values()))
        words = f"{piece.title}: {states[piece].words}" if piece.title else states[piece].words
        room = self.room()
        if self._ended_early < self.workers + SPARE and room:
            again = f"asking for {'it' if len(over) == 1 else 'them'} again"
            left = f"going on with {room} of {self.workers}"
            self.report(
                f"{counted(len(over), 'worker')} lost ({words}); {left if room < self.workers else again}"
            )
            return
        said = piece.log_tail()
        log = f" The end of its log:\n{said}" if said else ""
        self._failure = f"{counted(self._ended_early, 'worker')} one after the other ended before they did anything. {words}.{log}"
        self._not_before = now + FORGIVE_SECONDS
        self.report(f"no more workers are asked for, for {FORGIVE_SECONDS / 60:.0f} minutes: {self._failure}")


def _describe(states: Sequence[str]) -> str:
    """How those stand that wait, the most frequent first.

    Examples
    --------
    >>> _in_words(["PENDING (Resources)", "PENDING (Resources)", "RUNNING"])
    '2 PENDING (Resources), 1 RUNNING'
    """
    kinds = sorted(set(states), key=states.count, reverse=True)
    return ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)
