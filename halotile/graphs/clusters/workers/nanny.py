"""A nanny whose workers do not run the script that started them."""

from __future__ import annotations

from typing import Any

from distributed import Nanny

from halotile.graphs.clusters.workers.fork_server import ensure_forks, script_not_imported
from halotile.graphs.clusters.workers.scratch import keep_off_path
from halotile.graphs.clusters.workers.worker import OwnWorker


class OwnNanny(Nanny):  # type: ignore[misc]
    """Starts and restarts a worker without the main module.

    A process that multiprocessing spawns imports the main module of its parent. A script without
    ``if __name__ == "__main__":`` would start workers of its own in each worker. Workers need nothing of it: functions
    of a script are pickled by value.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, worker_class=OwnWorker, **kwargs)

    async def instantiate(self) -> Any:
        """Start the process, and wait until it answers."""
        keep_off_path()  # processes that start take it over
        with script_not_imported():
            ensure_forks()
            return await super().instantiate()
