"""A worker that keeps to its memory, and imports nothing from its scratch folder."""

from __future__ import annotations

from typing import Any

from distributed import Worker

from halotile.graphs.clusters.detection.gpus import gpus_here
from halotile.graphs.clusters.workers.scratch import keep_off_path
from halotile.tasks.devices.memory_limits import allow_memory


class OwnWorker(Worker):  # type: ignore[misc]
    """Dask's worker, for every kind of cluster that starts its own.

    Its nanny looks at its memory a few times a second, and in between an input that is damaged, or made for it, could have a
    machine run out. So it may take as much again as its plan allows, on top of what it starts with, and no more. Where there
    are GPUs it has its nanny alone: what their drivers need is not known.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keep_off_path()
        allow_memory(None if gpus_here().names else self.memory_manager.memory_limit)
