"""Setup of every worker before its first block: the job, the model, the lock on the run directory."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin, get_worker
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps, loads

from halotile.errors import JobNotLoaded
from halotile.graphs.clusters.common.answers import ask
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from halotile.tasks.block import BlockRunner, BlockTask, Receipt
from halotile.tasks.devices.device import give_memory_back, prepare_process
from halotile.tasks.options import import_from

SETUP_SECONDS = 300.0
TEARDOWN_SECONDS = 5.0
LOOK_SECONDS = 1.0
# Wait for the nanny, which polls every 50 ms: if it has not seen a worker start, it waits for a dead one without end.
SETTLE_SECONDS = 0.2

_runners: dict[str, BlockRunner] = {}
# Errors of jobs that could not be loaded, by token: a worker that joins late can report to nobody else.
_failures: dict[str, JobNotLoaded] = {}
# Tokens of jobs that are over: a released task may start all the same, and must not wait for its job.
_over: set[str] = set()
_busy: Counter[str] = Counter()  # number of tasks that run now, for each token
_holders: dict[str, RunDirectory] = {}  # run directory whose lock this process holds, for each token
_ready = threading.Condition()


class BlockPlugin(WorkerPlugin):  # type: ignore[misc]
    """Loads the task of a pass once on each worker, also on one that replaces a lost worker.

    Parameters
    ----------
    token : str
        Name of the pass, by which its blocks find the task.
    task : BlockTask
        Work on a block.
    run_directory : Path
        Directory whose lock a worker holds while it lives, so that no new run writes beside it.
    import_folder : str, optional
        Folder that imports of the user's own code start from.
    """

    def __init__(self, token: str, task: BlockTask, run_directory: Path, import_folder: str | None = None) -> None:
        self.name = f"halotile-{token}"
        self.token = token
        self.task = dumps(task)  # a worker that cannot unpickle it can say so
        self.import_folder = import_folder
        self.directory = RunDirectory(run_directory)
        self.driver = self.directory.driver()

    async def setup(self, worker: Any) -> None:
        """Load the model in a thread: the worker keeps answering meanwhile."""
        starting = not worker.periodic_callbacks["heartbeat"].is_running()
        try:
            runner = await asyncio.to_thread(self._load)
        except BaseException as error:
            failure = JobNotLoaded(worker.address, socket.gethostname(), error)
            self._publish(_failures, failure)
            with _ready:
                _release_lock(self.token)
            raise failure from error
        if starting:
            asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._publish, _runners, runner)
        else:
            self._publish(_runners, runner)

    def _load(self) -> BlockRunner:
        WorkerLock(self.directory.path).hold(self.driver)
        _holders[self.token] = self.directory
        import_from(self.import_folder)
        prepare_process(threads=1)
        task: BlockTask = loads(self.task)
        IO_THREADS.resize(task.io_threads)
        runner = BlockRunner(task)
        runner.stages.check()
        return runner

    def _publish(self, where: dict[str, Any], value: Any) -> None:
        with _ready:
            where[self.token] = value
            _ready.notify_all()

    def teardown(self, worker: Any) -> None:
        """Remove the job, and release its run directory once no task can write there any more."""
        with _ready:
            _runners.pop(self.token, None)
            _failures.pop(self.token, None)
            _over.add(self.token)
            _ready.notify_all()
            _release_lock(self.token)
        give_memory_back()


@contextmanager
def prepared(
    client: Client, plugin: BlockPlugin, between: Callable[[], None] = lambda: None, *, workers: int = 1
) -> Iterator[list[BaseException]]:
    """Make the job known to every worker for the duration of the context, also to one that joins later.

    ``between`` is called while the workers load it; an exception from it ends the wait. Yields the errors of the workers that
    could not load it; raises one of them where there are as many as the ``workers`` that the cluster should have.
    """
    adds = {"op": "plugin-add", "plugin": dumps(plugin), "name": plugin.name}
    try:
        responses = _spread(client, adds, seconds=SETUP_SECONDS, between=between)
        failures = [
            clean_exception(answer["exception"], answer["traceback"])[1]
            for answer in responses.values()
            if answer["status"] == "error"
        ]
        if failures and len(failures) >= max(workers, len(responses)):
            raise failures[0].args[2] if isinstance(failures[0], JobNotLoaded) else failures[0]
        yield failures
    finally:
        # A cluster that is gone has no plugins left.
        if client.status == "running":
            with suppress(Exception):
                _spread(client, {"op": "plugin-remove", "name": plugin.name}, seconds=TEARDOWN_SECONDS)


def _spread(client: Client, message: dict[str, Any], **limits: Any) -> dict[str, Any]:
    """Add a plugin to every worker and to those that join later, or remove it; return the answers, limits as for :func:`ask`.

    Dask's own registration fails with the first worker that dies meanwhile, and logs a traceback for every other. Here those
    that are left go on.
    """

    # A local function is pickled by value: a scheduler that was joined may lack halotile.
    def note(name: str, plugin: bytes | None, dask_scheduler: Any) -> list[str]:
        dask_scheduler.worker_plugins.pop(name, None)
        if plugin is not None:
            dask_scheduler.worker_plugins[name] = plugin
        return list(dask_scheduler.workers)

    async def spread() -> dict[str, Any]:
        workers = await client.run_on_scheduler(note, message["name"], message.get("plugin"))
        answers = await client.scheduler.broadcast(msg=message, workers=workers, on_error="return_pickle")
        errors = [loads(answer) for answer in answers.values() if isinstance(answer, bytes)]
        # What is no OSError was not a death: of the code of a worker, say, that differs from that of others.
        if deadly := [error for error in errors if not isinstance(error, OSError) or len(errors) == len(answers)]:
            raise deadly[0]
        return {worker: answer for worker, answer in answers.items() if not isinstance(answer, bytes)}

    answers: dict[str, Any] = ask(client, spread, **limits)
    return answers


def run_blocks(
    numbers: tuple[int, ...], token: str, directory: RunDirectory, limit_seconds: float | None = None
) -> Receipt:
    """Process these blocks with the runner that the plugin loaded; this is the task itself.

    The first block is always done. After ``limit_seconds`` no other is begun: a faster worker takes them.
    """
    with _ready:
        runner = _await_runner(token, directory)
        if runner is None:
            return Receipt()
        _busy[token] += 1
    try:
        # A run that ends early, or is torn down, ends with the current block.
        receipt = runner.run(numbers, lambda: token in _runners and not directory.is_stopping(), limit_seconds)
        receipt.worker, receipt.host = get_worker().address, socket.gethostname()
        return receipt
    finally:
        with _ready:
            _busy[token] -= 1
            _release_lock(token)


def _await_runner(token: str, directory: RunDirectory) -> BlockRunner | None:
    """Return the runner that the plugin loads, once it is ready; None when the run ends before that."""

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
            late = TimeoutError(f"the worker was not set up within {SETUP_SECONDS:.0f} s")
            raise JobNotLoaded(get_worker().address, socket.gethostname(), late)
    return None


def _release_lock(token: str) -> None:
    """Release the lock of a job that is over and idle, unless another job works in the same directory."""
    if token in _runners or _busy[token]:
        return
    directory = _holders.pop(token, None)
    if directory is not None and directory not in _holders.values():
        WorkerLock(directory.path).release()
