"""A program that runs on behalf of this one: it hears the signals that come here."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a program to its end; its exit code, or less than 0 for the signal that killed it.

    Parameters
    ----------
    command : sequence of str
        The program with its arguments.
    environment : mapping, optional
        By default that of this process.

    Examples
    --------
    >>> run_child(["sh", "-c", "exit 7"])
    7
    """
    started: list[subprocess.Popen[bytes]] = []
    with _signals_for(started):
        child = subprocess.Popen(command, env=environment)
        started.append(child)
        return child.wait()


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
