"""Limits on the memory that a process allocates, enforced by the Linux kernel; without effect elsewhere.

All writable memory counts, in use or not; mapped files do not count, nor inaccessible reservations such as those of GPU drivers.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def limit_memory(limit_bytes: int) -> None:
    """Make allocations beyond this fail from now on, for good."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if most == resource.RLIM_INFINITY else min(limit_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def allow_memory(more_bytes: int | None) -> None:
    """Make allocations of more than this in addition to the present ones fail, until a later call; None: as much as is permitted."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most
    if more_bytes is not None:
        try:
            limit = _memory_bytes(5) + more_bytes
        except OSError:  # no Linux
            return
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


@contextmanager
def size_limited(total_bytes: int | None) -> Iterator[None]:
    """Limit this process to ``total_bytes`` for the length of the context.

    Only a process that already has a limit is limited, as halotile's workers are: in another process other threads may do
    unrelated work.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if total_bytes is not None and before[0] != resource.RLIM_INFINITY:
        allow_memory(max(0, total_bytes - _memory_bytes(1)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def release_memory() -> None:
    """Return memory that is not in use to the system; workers keep it otherwise, for their next blocks."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _memory_bytes(column: int) -> int:
    """A column of /proc/self/statm, which counts in pages: 1 is resident memory, 5 is writable memory."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[column]) * resource.getpagesize()
