"""Signals to a run: SIGTERM, SIGUSR1 and SIGHUP ask it to drain, twice to hurry; Ctrl-C ends it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

TWICE_SECONDS = 1.0  # a signal that comes sooner after the first is the same signal, received by two ways
_limit_seconds: ContextVar[float | None] = ContextVar("drain_seconds", default=None)


@contextmanager
def drains_within(seconds: float) -> Iterator[None]:
    """Limit the drain of runs within the context to so many seconds; blocks in flight are then left."""
    token = _limit_seconds.set(seconds)
    try:
        yield
    finally:
        _limit_seconds.reset(token)


def ignore_signals() -> None:
    """Ignore further signals: the process is about to end, and must not be interrupted while it does."""
    if threading.current_thread() is threading.main_thread():
        for number in Signals.heeded:
            signal.signal(number, signal.SIG_IGN)


class Signals:
    """Records that a signal asked the run to drain, and interrupts it once; restores the former handlers.

    Only the main thread may set handlers; in other threads a run cannot be asked to drain.
    """

    heeded = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._again = False
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.heeded:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it for SIGHUP
                    self._before[number] = signal.signal(number, self._request_drain)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request_drain(self, number: int, _: FrameType | None) -> None:
        if self.requested:  # where a drain takes too long, a batch system sends SIGTERM after its warning
            self._again |= time.monotonic() - self._since > TWICE_SECONDS
            return
        self.name = signal.Signals(number).name
        self._since = time.monotonic()
        self.requested = True

    @property
    def hurried(self) -> bool:
        """True where blocks in flight have no time left: a second signal came, or the drain took too long."""
        limit = _limit_seconds.get()
        late = self.requested and limit is not None and time.monotonic() - self._since > limit
        return self._again or late

    def _interrupt(self, number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleanup, which is waited for
        raise KeyboardInterrupt


PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a program to its end; return its exit code, or the negative number of the signal that killed it.

    The program alone reacts to signals. They are passed on to it, except Ctrl-C, which it gets from the terminal itself.

    ``command``: program with its arguments; ``environment``: environment of the program, by default that of this process.

    >>> run_child(["sh", "-c", "exit 7"])
    7
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came before there was a program to pass them on to

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            return
        if children:
            children[0].send_signal(number)
        else:
            early.append(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        children.append(subprocess.Popen(command, env=environment))
        for number in early:
            children[0].send_signal(number)
        return children[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
