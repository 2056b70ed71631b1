"""How many cores this process may use: by its affinity, and by the limits of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def cores_here() -> int:
    """Cores that this process may keep busy, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _cores_of_groups())]))


def _cores_of_groups() -> Iterator[float]:
    """What its control groups allow, its own and those around it, of both versions."""
    folders = [GROUPS / "cpu"]
    with suppress(OSError):
        lines = OWN_GROUP.read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/")
        folders += [GROUPS / str(path).lstrip("/") for path in (Path(own), *Path(own).parents)]
    for folder in folders:
        with suppress(OSError, ValueError):  # not there, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                yield quota / period
