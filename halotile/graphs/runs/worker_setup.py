"""What is put on every worker before its first block: the job, the model, the lock on the run directory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin

from halotile.graphs.runs.stream import answering
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.worker_lock import WorkerLock
from halotile.tasks.block import BlockRunner, BlockTask, Receipt
from halotile.tasks.devices.device import give_memory_back, prepare_process
from halotile.tasks.options import import_from

SETUP_SECONDS = 300.0
TEARDOWN_SECONDS = 5.0
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 0.2
"""A worker that dies before its nanny, which looks every 50 ms, has seen it start is waited for ever after."""

_runners: dict[str, BlockRunner] = {}
_failures: dict[str, BaseException] = {}
"""Why a job could not be loaded: a worker that joins late has nobody else to tell."""
_over: set[str] = set()
"""Jobs that were forgotten: a task that was let go of may begin all the same, and is not to wait for one."""
_busy: Counter[str] = Counter()
"""Tasks that run now, for each token."""
_holders: dict[str, RunDirectory] = {}
"""Whose lock this process holds, for each token."""
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
    import_folder : str, optional
        Where imports of the user's own code start from.
    """

    def __init__(
        self, token: str, task: BlockTask, run_directory: Path, import_folder: str | None = None
    ) -> None:
        self.name = f"halotile-{token}"
        self.token = token
        self.task = task
        self.import_folder = import_folder
        self.directory = RunDirectory(run_directory)
        self.driver = self.directory.driver()

    async def setup(self, worker: Any) -> None:
        """Load the model in a thread: the worker keeps answering meanwhile."""
        starting = not worker.periodic_callbacks["heartbeat"].is_running()
        try:
            runner = await asyncio.to_thread(self._load)
        except BaseException as error:
            self._publish(_failures, error)
            with _ready:
                _let_go(self.token)
            raise
        if starting:
            asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._publish, _runners, runner)
        else:
            self._publish(_runners, runner)

    def _load(self) -> BlockRunner:
        WorkerLock(self.directory).hold(self.driver)
        _holders[self.token] = self.directory
        import_from(self.import_folder)
        prepare_process(threads=1)
        IO_THREADS.resize(self.task.io_threads)
        runner = BlockRunner(self.task)
        runner.stages.check()
        return runner

    def _publish(self, where: dict[str, Any], what: Any) -> None:
        with _ready:
            where[self.token] = what
            _ready.notify_all()

    def teardown(self, worker: Any) -> None:
        """Forget the job, and let go of its run directory once no task can write there any more."""
        with _ready:
            _runners.pop(self.token, None)
            _failures.pop(self.token, None)
            _over.add(self.token)
            _ready.notify_all()
            _let_go(self.token)
        give_memory_back()


@contextmanager
def prepared(client: Client, plugin: BlockPlugin) -> Iterator[None]:
    """Every worker knows the job for the length of the context, also one that joins later.

    Raises
    ------
    HalotileError
        What went wrong where a worker could not be set up.
    """
    try:
        with answering():
            client.sync(client.register_plugin, plugin, callback_timeout=SETUP_SECONDS)
        yield
    finally:
        # A cluster that is gone has forgotten already.
        if client.status == "running":
            with suppress(Exception):
                client.sync(client.unregister_worker_plugin, plugin.name, callback_timeout=TEARDOWN_SECONDS)


def run_blocks(
    numbers: tuple[int, ...], token: str, directory: RunDirectory, limit_seconds: float | None = None
) -> Receipt:
    """The task itself: process these blocks with the runner that the plugin made.

    One block is always done. After ``limit_seconds`` no other is begun: a faster worker takes them.
    """
    with _ready:
        runner = _await_runner(token, directory)
        if runner is None:
            return Receipt()
        _busy[token] += 1
    try:
        # A run that ends early, or is torn down, ends with the block at hand.
        return runner.run(
            numbers,
            lambda: token in _runners and not directory.is_stopping(),
            limit_seconds,
        )
    finally:
        with _ready:
            _busy[token] -= 1
            _let_go(token)


def _await_runner(token: str, directory: RunDirectory) -> BlockRunner | None:
    """What the plugin made, once it has; None when the run ends early, before or meanwhile."""

    def is_settled() -> bool:
        return token in _runners or token in _failures or token in _over

    deadline = time.monotonic() + SETUP_SECONDS
    while not directory.is_stopping():
        if _ready.wait_for(is_settled, timeout=LOOK_SECONDS):
            if token in _over:
                return None
            if token in _failures:
                raise _failures[token]
            return _runners[token]
        if time.monotonic() > deadline:
            raise RuntimeError(f"the worker was not set up within {SETUP_SECONDS:.0f} s")
    return None


def _let_go(token: str) -> None:
    """Release the lock of a job that is forgotten and idle, unless another one works in the same directory."""
    if token in _runners or _busy[token]:
        return
    directory = _holders.pop(token, None)
    if directory is not None and directory not in _holders.values():
        WorkerLock(directory).release()
