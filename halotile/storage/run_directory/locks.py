"""Locks of a run directory, which the system releases when a process dies, and records of their holders."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import OutputInUse, OutputRefused
from halotile.storage.run_directory.json_files import FILE_MODE

LOCK = "lock"  # lock file that the driver holds while it runs
# Lock file that every worker holds while it may write: a new driver waits until all have released it.
WORKERS_LOCK = "workers.lock"
_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0
# Errors of a file system without locks, or whose server has run out of them.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


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


def acquire(fd: int, timeout_seconds: float, cut_short: Callable[[], bool] = lambda: False) -> bool:
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


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a lock file."""
    fd = os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def write_holder(fd: int) -> None:
    """Record this process as the holder of a lock."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def read_holder(fd: int) -> dict[str, Any]:
    """The recorded holder of a lock; empty when it has not been written yet."""
    with contextlib.suppress(ValueError, RecursionError):
        holder = json.loads(os.pread(fd, 4096, 0))
        if isinstance(holder, dict) and holder.keys() >= {"pid", "host", "started"}:
            return holder
    return {}


def last_holder(path: Path) -> dict[str, Any]:
    """The last holder of a lock file; empty when there was none."""
    with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDONLY) as fd:
        return read_holder(fd)
    return {}


def describe(holder: dict[str, Any]) -> str:
    """Describe a holder for an error message."""
    if not holder:
        return "another run"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("started", 0)))
    return f"process {holder.get('pid')} on {holder.get('host')}, started {started},"


_descriptors: dict[Path, int] = {}  # file descriptors of the locks that this process holds
_mutex = threading.Lock()


@dataclass(frozen=True)
class WorkerLock:
    """The workers' lock of one run."""

    run: Path  # run directory

    @property
    def path(self) -> Path:
        """Absolute path of the lock file."""
        return Path(os.path.abspath(self.run / WORKERS_LOCK))

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
                current = last_holder(self.run / LOCK)
                if driver is not None and current != driver:
                    raise OutputRefused(
                        f"{self.run}: this worker belongs to {describe(driver)}, and {describe(current)} has the run now. "
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

    def wait_for_all(self, timeout_seconds: float, cut_short: Callable[[], bool] = lambda: False) -> None:
        """Wait until no worker of an earlier driver can write any more.

        ``timeout_seconds``: maximum waiting time; ``cut_short``: callback that returns True to end the wait early.
        """
        began = time.monotonic()
        with opened(self.path, os.O_RDWR | os.O_CREAT) as fd:
            if not acquire(fd, timeout_seconds, cut_short):
                seen = ", ".join(os.pread(fd, 4096, 0).decode(errors="replace").split("\n")[:-1])
                waited = min(timeout_seconds, time.monotonic() - began)
                raise OutputInUse(
                    f"workers of an earlier run still hold {self.run} after {waited:.3g} s; "
                    f"processes seen there: {seen}. End them, then run again."
                )
            os.ftruncate(fd, 0)
