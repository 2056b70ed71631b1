"""File locks that the system lets go of when a process dies, and the word about who holds one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from halotile.errors import OutputRefused
from halotile.storage.run_directory.plausible import HOLDER, fits

_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0
_WITHOUT = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system answers that has no locks, or whose server has none left."""


def never() -> bool:
    """Whether a wait is cut short that nothing cuts short."""
    return False


def flock(fd: int, operation: int) -> None:
    """Lock an open file.

    Raises
    ------
    BlockingIOError
        When it is held by somebody else.
    OutputRefused
        On a file system without locks.
    """
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
        where = "the run directory"
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{fd}")
        raise OutputRefused(
            f"{where} cannot be locked ({error.strerror}), and without a lock two runs could write one "
            "output. Mount that file system with locks (Lustre: -o flock), or write an output.path on another."
        ) from error


def acquire(fd: int, timeout_seconds: float, cut_short: Callable[[], bool] = never) -> bool:
    """Try for an exclusive lock until the time is over, or until the wait is ``cut_short``; the longer it takes, the less often."""
    began = time.monotonic()
    while True:
        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= timeout_seconds or cut_short():
                return False
            time.sleep(min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, waited / 10)))
        else:
            return True


def write_holder(fd: int) -> None:
    """Put down that this process holds a lock."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def read_holder(fd: int) -> dict[str, Any]:
    """Who holds a lock. It may not have come to write it down."""
    with contextlib.suppress(ValueError, RecursionError):
        holder = json.loads(os.pread(fd, 4096, 0))
        if isinstance(holder, dict) and holder.keys() >= HOLDER.keys() and fits(holder, HOLDER):
            return holder
    return {}


def describe(holder: dict[str, Any]) -> str:
    """A holder for a message."""
    if not holder:
        return "another run"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("started", 0)))
    return f"process {holder.get('pid')} on {holder.get('host')}, started {started},"
