"""The lock that every worker holds while it may write to an output: a new driver waits until all have released it."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import OutputInUse, OutputRefused
from halotile.storage.run_directory.directory import FILE_MODE, RunDirectory
from halotile.storage.run_directory.locks import acquire, describe, flock, never
from halotile.storage.run_directory.names import WORKERS_LOCK

_descriptors: dict[Path, int] = {}
"""File descriptors of the locks that this process holds."""
_mutex = threading.Lock()


@dataclass(frozen=True)
class WorkerLock:
    """The workers' lock of one run."""

    run: RunDirectory  # directory of the lock file

    @property
    def path(self) -> Path:
        """Absolute path of the lock file."""
        return Path(os.path.abspath(self.run.path / WORKERS_LOCK))

    def hold(self, driver: dict[str, Any] | None = None) -> None:
        """Take the lock, which shows that this process may write to the output, until it ends or releases it. May be repeated.

        ``driver``: the `driver` that the process works for.
        """
        with _mutex:
            if self.path in _descriptors:
                return
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)
            try:
                flock(fd, fcntl.LOCK_SH)
                current = self.run.driver()
                if driver is not None and current != driver:
                    raise OutputRefused(
                        f"{self.run.path}: this worker belongs to {describe(driver)}, and {describe(current)} has the run now. "
                        "No action is needed; the worker ends."
                    )
                os.write(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode())
            except BaseException:
                os.close(fd)
                raise
            _descriptors[self.path] = fd

    def release(self) -> None:
        """Release the lock: this process will not write to the output any more."""
        with _mutex:
            if (fd := _descriptors.pop(self.path, None)) is not None:
                os.close(fd)

    def wait_for_all(self, timeout_seconds: float, cut_short: Callable[[], bool] = never) -> None:
        """Wait until no worker of an earlier driver can write any more.

        ``timeout_seconds``: maximum waiting time; ``cut_short``: callback that returns True to end the wait early.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        began = time.monotonic()
        try:
            if not acquire(fd, timeout_seconds, cut_short):
                seen = ", ".join(os.pread(fd, 4096, 0).decode(errors="replace").split("\n")[:-1])
                waited = min(timeout_seconds, time.monotonic() - began)
                raise OutputInUse(
                    f"workers of an earlier run still hold {self.run.path} after {waited:.3g} s; "
                    f"processes seen there: {seen}. End them, then run again."
                )
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
