"""A torchrun script as one rank: ``python -m halotile.tasks.groups.script SCRIPT ...`` with its place in the environment.

The script stays as it is. Where it writes ``init_process_group()``, its ranks meet through a file that only their user may read, not
through the open port of torch's own store; and it ends with the process that started it.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from halotile.errors import RankFailed
from halotile.tasks.groups.opening import Rendezvous, interface_of
from halotile.tasks.groups.torch_group import HOST, MEETING

WAIT = timedelta(minutes=5)
# Longest wait for the end of its output after its own end: processes that it leaves behind may hold it open.
DRAIN_SECONDS = 1.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED = signal.SIGUSR2  # signal at which a script prints where it is, unless it has another use for it


def run_script(
    script: str,  # path of a Python script
    arguments: Sequence[str],
    place: Rendezvous,  # rank
    line: Callable[[str], None] = print,  # called with every line of its output
    attempt: int = 0,  # attempt, retries: number of this attempt, from 0, and of those after the first
    retries: int = 0,
    *,
    # script sees all GPUs of its worker, in their order, and `LOCAL_RANK` is its number among the ranks of its
    # machine
    all_gpus: bool = False,
) -> None:
    """Run a script as one rank, in a process of its own."""
    command = [sys.executable, "-u", "-m", "halotile.tasks.groups.script", script, *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, **rank_variables(place, attempt, retries, all_gpus=all_gpus)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdin is not None
    _running.append(process)
    last: deque[str] = deque([""], maxlen=1)
    reader = threading.Thread(target=_pass_on, args=(process.stdout, line, last), daemon=True)
    reader.start()
    try:
        with process.stdin:  # which ends with this process, whatever ends this one
            process.wait()
    finally:
        _running.remove(process)
    reader.join(DRAIN_SECONDS)
    if process.returncode:
        raise RankFailed(
            f"{script} {_end_text(process.returncode)}.{f' Its last line: {last[0]}' if last[0] else ''}", place.rank
        )


_running: list[subprocess.Popen[str]] = []


def print_place() -> str:
    """Let the script of this process print the lines of code where it is; return where to look for them, nothing if there is none."""
    for process in _running:
        process.send_signal(ASKED)
    return "see the lines that it printed last\n" if _running else ""


def runs_script() -> bool:
    """Return True while this process runs a script."""
    return bool(_running)


def _end_text(code: int) -> str:
    """Return how a process ended that has this exit code.

    >>> _end_text(3), _end_text(-9)
    ('ended with exit code 3', 'was ended by SIGKILL, as where memory ran out')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    cause = ", as where memory ran out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{cause}"


def _pass_on(output: TextIO, line: Callable[[str], None], last: deque[str]) -> None:
    """Pass on the lines of a script, and of processes that it leaves behind."""
    with output:
        for text in output:
            last.append(text.rstrip("\n"))
            line(last[0])


def rank_variables(
    place: Rendezvous, attempt: int = 0, retries: int = 0, *, all_gpus: bool = False
) -> Mapping[str, str]:
    """The environment variables of torchrun for a rank, and those of its rendezvous.

    >>> variables = rank_variables(Rendezvous(rank=1, world_size=2))
    >>> variables["RANK"], variables["WORLD_SIZE"], variables["GLOO_SOCKET_IFNAME"]
    ('1', '2', 'lo')
    """
    number = place.local_rank
    variables = {
        **{"RANK": place.rank, "WORLD_SIZE": place.world_size},
        **{"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": place.local_size, "GROUP_RANK": place.machine},
        **{"ROLE_NAME": "default", "ROLE_RANK": place.rank, "ROLE_WORLD_SIZE": place.world_size},
        **{"TORCHELASTIC_RUN_ID": Path(place.meeting).parent.name or "none"},
        **{"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_MAX_RESTARTS": retries},
        **{"HALOTILE_RANK": place.rank, "HALOTILE_SIZE": place.world_size},
        **{"HALOTILE_LOCAL_RANK": number, "HALOTILE_LOCAL_SIZE": place.local_size},
        **{"MASTER_ADDR": place.host, "MASTER_PORT": 0, MEETING: place.meeting, HOST: place.host},
    }
    visible = os.environ.get(VISIBLE)
    if (
        visible and "," in visible and all_gpus
    ):  # a worker sees its own GPU first: in one order they have one number for all ranks
        by_number = sorted(visible.split(","), key=lambda name: (len(name), name))
        variables |= {VISIBLE: ",".join(by_number)}
    elif visible:
        # A worker sees its own GPU first: whether a script takes "cuda" or the GPU of its LOCAL_RANK, it gets that one.
        own = visible if place.local_size == 1 else visible.partition(",")[0]
        variables |= {VISIBLE: own, "LOCAL_RANK": 0}
    interface = interface_of(place.host)
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {name: str(value) for name, value in variables.items()} | names


def _meet(url: str, *_: Any, timeout: timedelta = WAIT, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """The rendezvous of ``env://`` through a file."""
    from torch.distributed import FileStore

    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = FileStore(os.environ[MEETING], size)
    store.set_timeout(timeout)
    yield store, rank, size


def _shorten_waits() -> None:
    """Let ranks wait for one another for minutes, unless the script says how long: torch's default is up to half an hour."""
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(groups, name, WAIT)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _code_of(end: SystemExit) -> int:
    """Return the exit code of a script that ends itself, and print its last words."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """End with the words of a script that failed: the threads of its process group can abort a process that ends as usual, and hide them."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _let_go(module: ModuleType) -> None:
    """Free what a script has left: files are written, and threads of process groups end that could abort a Python that is ending."""
    threading.excepthook = lambda _: None  # threads of the script that go on miss what is freed
    vars(module).clear()
    gc.collect()


def _run_as_main(script: str) -> int:
    """Run a script as the main module and return its exit code, with the traceback of its error printed."""
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module  # runpy's is forgotten before its files are written
    atexit.register(_let_go, module)  # the first in is the last that is called
    try:
        # It has the future imports that it writes itself, not those of this file.
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        return _code_of(end)
    except BaseException as failure:
        frames = failure.__traceback__
        traceback.print_exception(failure.with_traceback(frames.tb_next if frames else None))  # without this one
        return 1
    return 0


def main(script: str, *arguments: str) -> None:
    """Run a script as the rank that the environment describes."""
    faulthandler.register(ASKED)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rendezvous._rendezvous_handlers["env"] = _meet
    _shorten_waits()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    if code := _run_as_main(script):
        _leave(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
