"""Waits on workers, queues, pipes and processes are limited: what hangs ends in an error, not in silence."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.house.imports import ROOT, modules

WITHOUT_LIMIT = {"exception", "get", "join", "recv", "recv_bytes", "result", "wait"}
"""Methods that wait for ever where they are called without an argument."""
OF_DASK = {"as_completed", "gather", "nthreads", "run", "run_on_scheduler", "scheduler_info", "sync"}
"""Calls of Dask that wait for ever, with whatever arguments, unless `ask` calls them."""
LIMITS = {"callback_timeout", "seconds", "timeout"}
OWN_THREADS = ("halotile/storage/", "halotile/tasks/")
"""Folders without Dask, whose futures are those of threads of the same process."""
ALLOWED = {
    "halotile/graphs/runs/signals.py": "the program of `recon-cli exec` takes as long as it takes",
    "halotile/graphs/clusters/workers/fork_server.py": "poll() comes before, and kill() or the end of the pipe; a child waits for its parent",
    "halotile/graphs/jobs/ptychography/call.py": "a thread that heeds what is raised for the ranks",
    "halotile/graphs/runs/records.py": "a thread that reads a file",
    "halotile/graphs/runs/passes/worker_setup.py": "a coroutine that ask() calls",
    "halotile/graphs/runs/status.py": "a thread that ends when it is asked to",
    "halotile/tasks/devices/gpu.py": "memory that the copies of the same GPU return",
    "halotile/tasks/groups/group.py": "torch limits it by the timeout of the group",
    "halotile/tasks/groups/script.py": "the script of a rank, which the driver looks after",
}


def unlimited_waits(path: Path) -> list[str]:
    """Calls of a file that may wait for ever, as they are written."""
    place, text = path.relative_to(ROOT).as_posix(), path.read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    limited = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "asyncio.wait_for"}
    found = []
    for call in calls:
        *_, owner, name = ["", *ast.unparse(call.func).rsplit(".", 1)]
        if id(call) in limited or any(word.arg in LIMITS for word in call.keywords):
            continue
        if name == "get" and any(f"{owner}{sign} ContextVar" in text for sign in (":", " =")):
            continue
        if name in ("result", "exception") and place.startswith(OWN_THREADS):
            continue
        of_dask = name in OF_DASK and (name == "as_completed" or owner.endswith(("client", "cluster")))
        if of_dask or (name in WITHOUT_LIMIT and owner and not call.args):
            found.append(ast.unparse(call))
    return found


def test_every_wait_is_limited() -> None:
    found = defaultdict[str, list[str]](list)
    for path in modules().values():
        if waits := unlimited_waits(path):
            found[path.relative_to(ROOT).as_posix()] = waits
    assert {place: waits for place, waits in found.items() if place not in ALLOWED} == {}
    assert {*ALLOWED} == {*found}  # none is left over
