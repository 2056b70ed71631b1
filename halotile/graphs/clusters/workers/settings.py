"""Dask's settings, in the driver and in workers on other machines alike."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.common.security import owned_folder
from halotile.graphs.clusters.workers.environment import WORKER_ENVIRONMENT
from halotile.graphs.clusters.workers.fork_server import FORK_SETTINGS

PREFIX = "halotile-scratch-"
_DASK_FOLDER = "dask-scratch-space"
"""Part of the path of each folder that Dask makes for a server."""


@contextmanager
def private_scratch() -> Iterator[str]:
    """A folder of mode 0700 in ``$TMPDIR`` for the servers that start in the context, whatever Dask's configuration says.

    Dask's own, ``$TMPDIR/dask-scratch-space``, belongs to whoever makes it first.
    """
    import dask

    with (
        owned_folder(Path(tempfile.gettempdir()), PREFIX) as folder,
        dask.config.set({"temporary-directory": str(folder)}),
    ):
        yield str(folder)


def keep_off_path() -> None:
    """Remove the folders of Dask's servers from ``sys.path``, where Dask puts them first."""
    sys.path[:] = [place for place in sys.path if _DASK_FOLDER not in str(place)]


SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-saturation": "inf",
    # Interval at which an idle worker takes tasks that wait at a slow one.
    "distributed.scheduler.work-stealing-interval": "200ms",
    "distributed.comm.timeouts.connect": "30s",
    # Other users of the machine can read the pages on loopback: no logs, and no lines of anybody's source.
    "distributed.scheduler.http.routes": [
        "distributed.http.scheduler.prometheus",
        "distributed.http.health",
        "distributed.http.statics",
    ],
    "distributed.worker.http.routes": [],
    # Dask's memory of past tasks: a million of them pass through.
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 2,
    # Blocks hold no results on workers: nothing to spill, and pausing would only stall the stream.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.98,
    "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
    # Dask samples itself 50 to 100 times a second in every process: on few cores that is taken from the computation.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "200ms",
}

LOCAL_SETTINGS = (
    SETTINGS
    | FORK_SETTINGS
    # A worker that is not back by then is given up for good, also one that died again only just now.
    | {"distributed.deploy.lost-worker-timeout": "365 days"}
)
"""Settings for workers on this machine."""

# Level of Dask's messages until its event loop has ended: its clusters set it back before their last messages are sent, which
# log tracebacks where a worker has died.
SILENT = 50
