"""Bounds on what a process allocates: on Linux the kernel holds to them, elsewhere nothing does.

What counts is what may be written to, in use or not: neither files that are mapped, nor what is set aside and closed, as drivers of
GPUs do.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_guard = threading.Lock()
_within: list[tuple[int, int]] = []
"""For each thread that is within :func:`no_more_than_free`, the limit that was there before the first."""


def limit_memory(limit_bytes: int) -> None:
    """Let allocations beyond this fail from now on, for good."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if most == resource.RLIM_INFINITY else min(limit_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def allow_memory(more_bytes: int | None) -> None:
    """Let allocations fail, until more is allowed, that take more than this besides what there is; None for all that may be."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most
    if more_bytes is not None:
        try:
            held = _bytes_here(5)
        except OSError:  # no Linux
            return
        limit = held + more_bytes if most == resource.RLIM_INFINITY else min(held + more_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


@contextmanager
def size_limited(total_bytes: int | None) -> Iterator[None]:
    """Limit this process to ``total_bytes`` for the length of the context.

    Only a process that has a limit already gets one, as workers of ours have: in another one the threads beside this may do
    somebody else's work.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if total_bytes is not None and before[0] != resource.RLIM_INFINITY:
        allow_memory(max(0, total_bytes - _bytes_here(1)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def no_more_than_free() -> Iterator[None]:
    """Let allocations fail that take more than the machine has free, for the length of the context: it goes on without them.

    A limit that there is already stays as it is.
    """
    with _guard:
        if not _within:
            _within.append(resource.getrlimit(resource.RLIMIT_DATA))
            if _within[0][0] == resource.RLIM_INFINITY:
                allow_memory(psutil.virtual_memory().available)
        else:
            _within.append(_within[0])
    try:
        yield
    finally:
        with _guard:
            before = _within.pop()
            if not _within:
                resource.setrlimit(resource.RLIMIT_DATA, before)


def _bytes_here(column: int) -> int:
    """A column of what Linux counts of this process in pages: 1 is what is resident, 5 what may be written to."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
