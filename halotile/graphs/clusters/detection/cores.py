"""Number of cores that this process may use: by its affinity, the limits of its control groups, and its batch job."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from halotile.graphs.clusters.detection.batch_cores import slots_here
from halotile.graphs.clusters.detection.cgroups import cgroups_of


def cores_here(environment: Mapping[str, str] = os.environ) -> int:
    """Number of cores that this process may keep busy, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    job = [slots.cores] if (slots := slots_here(environment)) else []
    return max(1, min([cores, *job, *map(math.ceil, _cores_of_groups())]))


def _cores_of_groups() -> Iterator[float]:
    for folder in cgroups_of("cpu"):
        with suppress(OSError, ValueError):  # not there, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text("utf-8").split())
            yield quota / period
        with suppress(OSError, ValueError):
            quota, period = (
                int((folder / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period")
            )
            if quota > 0:
                yield quota / period
