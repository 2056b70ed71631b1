"""What is put on every worker before its first block: the job, the model, the lock on the run directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin

from halotile.storage.rundir import RunDirectory
from halotile.tasks.block import BlockRunner, BlockTask, Receipt
from halotile.tasks.device import prepare_process

SETUP_SECONDS = 300.0
TEARDOWN_SECONDS = 10.0

_runners: dict[str, BlockRunner] = {}
_ready = threading.Condition()


class BlockPlugin(WorkerPlugin):  # type: ignore[misc]
    """Loads a job once on each worker, also on one that replaces a lost worker.

    Parameters
    ----------
    token : str
        Name of the run, by which its tasks find the job.
    task : BlockTask
        What to do with a block.
    run_directory : Path
        Whose lock a worker holds while it lives, so that no new run writes beside it.
    """

    def __init__(self, token: str, task: BlockTask, run_directory: Path) -> None:
        self.name = f"halotile-{token}"
        self.token = token
        self.task = task
        self.run_directory = run_directory

    async def setup(self, worker: Any) -> None:
        """Load the model in a thread: the worker keeps answering meanwhile."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        RunDirectory(self.run_directory).hold_worker_lock()
        prepare_process(threads=1)
        runner = BlockRunner(self.task)
        with _ready:
            _runners[self.token] = runner
            _ready.notify_all()

    def teardown(self, worker: Any) -> None:
        """Forget the job and let go of its run directory."""
        _runners.pop(self.token, None)
        RunDirectory(self.run_directory).release_worker_lock()


@contextmanager
def prepared(client: Client, plugin: BlockPlugin) -> Iterator[None]:
    """Every worker knows the job for the length of the context, also one that joins later.

    Raises
    ------
    HalotileError
        What went wrong where a worker could not be set up.
    """
    client.sync(client.register_plugin, plugin, callback_timeout=SETUP_SECONDS)
    try:
        yield
    finally:
        with suppress(Exception):  # a cluster that is gone has forgotten already
            client.sync(client.unregister_worker_plugin, plugin.name, callback_timeout=TEARDOWN_SECONDS)


def run_blocks(numbers: tuple[int, ...], token: str) -> Receipt:
    """The task itself: process these blocks with the runner that the plugin made."""
    with _ready:
        if not _ready.wait_for(lambda: token in _runners, timeout=SETUP_SECONDS):
            raise RuntimeError(f"the worker was not set up within {SETUP_SECONDS:.0f} s")
        runner = _runners[token]
    return runner.run(numbers)
