"""The process that workers are forked from, which has imported the modules that each of them needs; and calls in forked processes, with a limit on their memory."""

import glob
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from halotile.errors import ConfigError, HalotileError, OutputRefused
from halotile.graphs.clusters.common.security import owned, remove_stale
from halotile.graphs.clusters.workers.settings import METHOD, WORKER_ENVIRONMENT, own_environment
from halotile.tasks.devices.device import allow_memory, limit_memory

_WORKERS = "halotile.graphs.clusters.workers.preloaded"
PRELOADED = [
    "halotile.graphs.clusters.workers.preloaded_torch",
    "halotile.graphs.plans.trials.denoiser_trials",  # trials of networks are forked from it too
    _WORKERS,
]

NOT_IMPORTED = "__main__"  # a main module of this name is left alone by processes that multiprocessing starts

SPARED = {signal.SIGTERM, signal.SIGUSR1}  # signals that the process does not get: it ends with the one that started it

PF_EXITING = 0x4  # flag of a process in Linux (include/linux/sched.h)
DYING_SECONDS = 10.0

SEMAPHORES = Path("/dev/shm")  # where glibc keeps them

_held = ExitStack()
_lock = threading.Lock()
_specs: list[Any] = []  # the spec of the main module, once for each thread that is in script_not_imported


def ensure_forks() -> None:
    """Start the process that workers are forked from, unless it is running."""
    if METHOD != "forkserver":
        return
    multiprocessing.get_context(METHOD).set_forkserver_preload(PRELOADED)
    mark_leftovers()
    _await_dying()
    with children_spared_from_ctrl_c(), own_environment():
        # Batch systems send them to every process. Without this one no worker starts, and Dask waits for it; workers get them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)
        # It imports the same modules as this process, and nothing from the working directory.
        path = os.pathsep.join(filter(None, sys.path))
        os.environ.update(WORKER_ENVIRONMENT, PYTHONPATH=path, PYTHONSAFEPATH="1")
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "path too long" not in str(error):
                raise
            raise ConfigError(
                f"$TMPDIR is {tempfile.gettempdir()}: its name is too long for a socket in it. Set a shorter one, such as /tmp."
            ) from None


@cache
def mark_leftovers() -> None:
    """Mark the folder and the semaphores of this process, and remove those of processes that were killed with all their children."""
    folder = Path(get_temp_dir())
    mark = f"halotile-{socket.gethostname()}"
    with suppress(OSError, OutputRefused):  # without locks, they stay
        _held.enter_context(owned(folder, name=mark))
        process.current_process()._config["semprefix"] = f"/{folder.name}"  # type: ignore[attr-defined]
        for removed in remove_stale(folder.parent, "pymp-", mark):
            for semaphore in SEMAPHORES.glob(f"sem.{glob.escape(removed.name)}-*"):
                semaphore.unlink(missing_ok=True)


def _await_dying() -> None:
    """Wait while that process is being killed: to multiprocessing it runs until it has ended, and what is asked of it is lost.

    Its workers are seen to die before, and others are to take their places at once.
    """
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    end = time.monotonic() + DYING_SECONDS
    while pid is not None and _is_dying(pid) and time.monotonic() < end:
        time.sleep(0.01)


def _is_dying(pid: int) -> bool:
    """Return True for a child that is exiting, and False once it has ended."""
    try:
        status, _, _, _, _, _, flags = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2].split()[:7]
    except OSError:
        return False
    return status != "Z" and bool(int(flags) & PF_EXITING)


def hear_signals_after_fork() -> None:
    """Let processes that are forked from this one get the signals that it does not."""
    os.register_at_fork(after_in_child=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SPARED))


def expect_no_workers() -> None:
    """Expect trials alone to be forked in this process: modules that only workers need are not imported."""
    PRELOADED[:] = ["halotile.graphs.plans.trials.preloaded"]


def expect_no_torch() -> None:
    """Expect workers that filter without torch; a worker that needs it all the same imports it."""
    PRELOADED[:] = [_WORKERS]


def environment_now() -> dict[str, str]:
    """The present environment, for workers that are forked from a process that may be older than a change to it."""
    return {name: word for name, word in os.environ.items() if name not in WORKER_ENVIRONMENT}


@contextmanager
def children_spared_from_ctrl_c() -> Iterator[None]:
    """Hide SIGINT and SIGHUP from threads and processes that begin in here; this thread gets them a moment later.

    Ctrl-C and the end of a terminal send them to every process of it. The driver alone reacts to them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # Starting this one would unblock SIGINT again in the thread that starts the workers.
        _start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_resource_tracker() -> None:
    """Start the process that clears up after workers that were killed, without its warnings about them."""
    with own_environment():
        known = os.environ.get("PYTHONWARNINGS")
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, "ignore:resource_tracker")))
        resource_tracker.ensure_running()


@contextmanager
def script_not_imported() -> Iterator[None]:
    """Keep processes that are spawned in here from importing the main module; several threads may be in here at once.

    >>> with script_not_imported():
    ...     sys.modules["__main__"].__spec__.name
    '__main__'
    """
    main = sys.modules["__main__"]
    with _lock:
        _specs.append(_specs[0] if _specs else getattr(main, "__spec__", None))
        main.__spec__ = ModuleSpec(NOT_IMPORTED, None)
    try:
        yield
    finally:
        with _lock:
            spec = _specs.pop()
            if not _specs:
                main.__spec__ = spec


T = TypeVar("T")


class NoAnswer(Exception):
    """The process ended without an answer; the message is the end of a sentence that begins with the name of the call."""

    def __init__(self, code: int, seconds: float | None = None) -> None:
        super().__init__(_ending(code) if seconds is None else f"took longer than {seconds:g} s")
        self.code = code
        """Exit code; for a signal the negative number."""


def call_bounded(call: Callable[[], T], limit_bytes: int | None, seconds: float | None = None) -> T:
    """Run a call in another process, which is gone on return, and return its result.

    ``call``: pickled by value where a script defines it; ``limit_bytes``: memory that it may allocate. On Linux the kernel enforces it, and
    allocations beyond it fail; elsewhere nothing does; None: as much as there is; ``seconds``: time that it may take.
    """
    ensure_forks()
    method: Any = multiprocessing.get_context(METHOD)
    here, there = method.Pipe(duplex=False)
    requested = there, cloudpickle.dumps(call), limit_bytes, environment_now()
    with script_not_imported(), children_spared_from_ctrl_c():
        process = method.Process(target=_answer, args=requested)
        process.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise NoAnswer(0, seconds)
        is_result, value = pickle.loads(here.recv_bytes())
    except EOFError:
        process.join()
        raise NoAnswer(process.exitcode or 0) from None
    finally:
        process.kill()
        process.join()
        here.close()
    if not is_result:
        raise value
    result: T = value
    return result


def _ending(code: int) -> str:
    """The end of a process with this exit code, in words.

    >>> _ending(-11), _ending(3)
    ('was ended by SIGSEGV', 'ended its process with exit code 3')
    """
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _answer(replies: Connection, requested: bytes, limit_bytes: int | None, environment: Mapping[str, str]) -> None:
    """Run the call and send its result or error: the target of the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    if limit_bytes is None:
        allow_memory(None)
    else:
        limit_memory(limit_bytes)
    answer: tuple[bool, Any]
    try:
        answer = True, pickle.loads(requested)()
    except HalotileError as error:
        answer = False, error
    except Exception as error:
        answer = False, RuntimeError(f"{type(error).__name__}: {error}")
    replies.send_bytes(cloudpickle.dumps(answer))


def _end_with_parent() -> None:
    """End this process with its parent: nobody waits for an answer any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
