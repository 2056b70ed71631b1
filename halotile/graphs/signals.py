"""SIGTERM, SIGUSR1 and SIGHUP ask a run to drain, Ctrl-C ends it; the handlers that were there come back afterwards."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, NoReturn


class Signals:
    """Remembers that a signal asked the run to drain, and interrupts it once.

    Only the main thread may set handlers; elsewhere the run simply is not asked.
    """

    heeded = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.heeded:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for SIGHUP
                    self._before[number] = signal.signal(number, self._ask)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        self.name = signal.Signals(number).name

    def _interrupt(self, number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one would tear what closes, and be waited for
        raise KeyboardInterrupt
