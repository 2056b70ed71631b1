"""The lock that every worker holds while it may write to an output: a new driver waits until the last has let go of it."""

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

_held: dict[Path, int] = {}
_guard = threading.Lock()


@dataclass(frozen=True)
class WorkerLock:
    """The workers' lock of one run.

    Parameters
    ----------
    run : RunDirectory
        Where it lies.
    """

    run: RunDirectory

    def hold(self, driver: dict[str, Any] | None = None) -> None:
        """Show that this process may write to the output, until it ends or lets go. May be called again.

        Parameters
        ----------
        driver : dict, optional
            The :meth:`RunDirectory.driver` that it works for.

        Raises
        ------
        OutputRefused
            When another driver has begun in the meantime: it has looked for workers already, and saw none.
        """
        path = Path(os.path.abspath(self.run.path / WORKERS_LOCK))
        with _guard:
            if path in _held:
                return
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)
            flock(fd, fcntl.LOCK_SH)
            now = self.run.driver()
            if driver is not None and now != driver:
                os.close(fd)
                raise OutputRefused(
                    f"{self.run.path}: this worker belongs to {describe(driver)}, and {describe(now)} has the run now. "
                    "Nothing is to be done; the worker ends."
                )
            os.write(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode())
            _held[path] = fd

    def release(self) -> None:
        """Let go of the lock: this process will write nothing more to the output."""
        with _guard:
            fd = _held.pop(Path(os.path.abspath(self.run.path / WORKERS_LOCK)), None)
            if fd is not None:
                os.close(fd)

    def wait_for_all(self, timeout_seconds: float, cut_short: Callable[[], bool] = never) -> None:
        """Wait until no worker of an earlier driver is left that could still write.

        Parameters
        ----------
        timeout_seconds : float
            How long they are waited for.
        cut_short : callable
            Whether they are to be waited for no longer.

        Raises
        ------
        OutputInUse
            When some still live after that.
        """
        fd = os.open(self.run.path / WORKERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        began = time.monotonic()
        try:
            if not acquire(fd, timeout_seconds, cut_short):
                seen = ", ".join(os.pread(fd, 4096, 0).decode(errors="replace").split("\n")[:-1])
                waited = min(timeout_seconds, time.monotonic() - began)
                raise OutputInUse(
                    f"workers of an earlier run still hold {self.run.path} after {waited:.3g} s; "
                    f"these have been seen there: processes {seen}. End them, then run again."
                )
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
