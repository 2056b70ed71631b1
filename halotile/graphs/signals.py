"""SIGTERM and SIGUSR1 ask a run to drain; the handlers that were there come back afterwards."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Signals:
    """Remembers that a signal asked the run to drain.

    Only the main thread may set handlers; elsewhere the run simply is not asked.
    """

    heeded = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.heeded:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        self.name = signal.Signals(number).name
