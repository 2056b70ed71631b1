"""A call in a process of its own, forked as workers are, with a limit on its memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import cloudpickle

from halotile.errors import HalotileError
from halotile.graphs.clusters.workers.fork_server import (
    children_spared_from_ctrl_c,
    ensure_forks,
    environment_now,
    script_not_imported,
)
from halotile.graphs.clusters.workers.settings import METHOD
from halotile.tasks.devices.device import allow_memory, limit_memory

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
