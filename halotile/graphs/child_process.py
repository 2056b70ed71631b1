"""A program that runs on behalf of this one and gets its signals."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a program to its end; return its exit code, or the negative number of the signal that killed it.

    The program alone reacts to signals. They are passed on to it, except Ctrl-C, which it gets from the terminal itself.

    ``command``: program with its arguments; ``environment``: environment of the program, by default that of this process.

    Examples
    --------
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
