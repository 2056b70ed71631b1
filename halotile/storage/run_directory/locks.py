"""File locks that the system releases when a process dies, and records of their holders."""

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
from halotile.storage.run_directory.validation import HOLDER, fits

_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a file system without locks, or whose server has run out of them."""


def never() -> bool:
    """Default ``cut_short`` callback, which never ends a wait early."""
    return False


def flock(fd: int, operation: int) -> None:
    """Lock an open file."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        path = "the run directory"
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
        raise OutputRefused(
            f"{path} cannot be locked ({error.strerror}), and without a lock two runs could write one "
            "output. Mount that file system with locks (Lustre: -o flock), or write an output.path on another."
        ) from error


def acquire(fd: int, timeout_seconds: float, cut_short: Callable[[], bool] = never) -> bool:
    """Poll for an exclusive lock until the timeout, or until ``cut_short`` returns True; the polling interval grows with time."""
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
    """Record this process as the holder of a lock."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def read_holder(fd: int) -> dict[str, Any]:
    """The recorded holder of a lock; empty when it has not been written yet."""
    with contextlib.suppress(ValueError, RecursionError):
        holder = json.loads(os.pread(fd, 4096, 0))
        if isinstance(holder, dict) and holder.keys() >= HOLDER.keys() and fits(holder, HOLDER):
            return holder
    return {}


def describe(holder: dict[str, Any]) -> str:
    """Describe a holder for an error message."""
    if not holder:
        return "another run"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("started", 0)))
    return f"process {holder.get('pid')} on {holder.get('host')}, started {started},"
