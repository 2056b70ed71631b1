"""File locks that the system lets go of when a process dies, and the word about who holds one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from typing import Any

_POLL_SECONDS = 0.05


def acquire(fd: int, timeout_seconds: float) -> bool:
    """Try for an exclusive lock until the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def write_holder(fd: int) -> None:
    """Put down that this process holds a lock."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def read_holder(fd: int) -> dict[str, Any]:
    """Who holds a lock. It may not have come to write it down."""
    with contextlib.suppress(ValueError):
        holder = json.loads(os.pread(fd, 4096, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def in_words(holder: dict[str, Any]) -> str:
    """A holder for a message."""
    if not holder:
        return "another run"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("started", 0)))
    return f"process {holder.get('pid')} on {holder.get('host')}, started {started},"
