"""A worker that keeps to its memory, and a nanny whose workers do not run the script that started them."""

from typing import Any

from distributed import Nanny, Status, Worker
from distributed import utils as dask_utils

from halotile.graphs.clusters.common.machine import gpus_here
from halotile.graphs.clusters.workers.fork_server import ensure_forks, script_not_imported
from halotile.graphs.clusters.workers.settings import keep_off_path
from halotile.tasks.devices.device import allow_memory


class OwnWorker(Worker):  # type: ignore[misc]
    """Dask's worker, for every kind of cluster that starts its own; it imports nothing from its scratch folder.

    Its nanny looks at its memory a few times a second, and in between an input that is damaged, or made for it, could have a
    machine run out. So it may take as much again as its plan allows, on top of what it starts with, and no more. Where there
    are GPUs only its nanny limits it: the needs of their drivers are not known.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keep_off_path()
        allow_memory(None if gpus_here().names else self.memory_manager.memory_limit)


class OwnNanny(Nanny):  # type: ignore[misc]
    """Starts and restarts a worker without the main module.

    A process that multiprocessing spawns imports the main module of its parent. A script without
    ``if __name__ == "__main__":`` would start workers of its own in each worker. Workers need nothing of it: functions
    of a script are pickled by value.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, worker_class=OwnWorker, **kwargs)

    async def instantiate(self) -> Any:
        """Start the process, and wait until it answers; ConnectionError where what forks it was killed."""
        keep_off_path()  # processes that start inherit it
        with script_not_imported():
            ensure_forks()
            # Dask would import pandas here, and replace what is imported before the fork: half a second that everybody waits for.
            dask_utils._forkserver_preload_set = True
            try:
                return await super().instantiate()
            except EOFError:
                raise ConnectionError("the process that workers are forked from was killed.") from None

    async def kill(self, *args: Any, **kwargs: Any) -> None:
        """End the process. One that never began, since what forks it was killed, has nothing to end, and Dask would wait for it for ever."""
        if self.process and self.process.status == Status.starting and self.process.running.is_set():
            self.process.status = Status.stopped
        await super().kill(*args, **kwargs)
