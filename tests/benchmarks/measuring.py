"""What all measured programs do alike: a folder of their own, memory watched, clusters warmed, ranks started."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Result = dict[str, Any]
CALLS, WARM = 15, 3


PROGRAM = (sys.executable, "-m", "tests.benchmarks.measuring")
"""The command of a program, without its name, folder and edge; PYTHONPATH has to have the repository."""


def main() -> None:
    """Run a program, as ``MODULE.FUNCTION FOLDER EDGE [...]`` on the command line has it, and print what it gives."""
    name, folder, edge, *more = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    folder.mkdir(parents=True, exist_ok=True)
    module, _, function = name.partition(".")
    program = getattr(importlib.import_module(f"tests.benchmarks.{module}"), function)
    print(json.dumps(program(folder, edge, *more)), flush=True)


spent: list[tuple[str, float]] = []
"""What each call that is timed was for, and its seconds, in this process."""


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, its seconds kept."""

    @wraps(call)
    def of_which_the_time_is_kept(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent.append((name, time.perf_counter() - began))

    return of_which_the_time_is_kept


def seconds_spent() -> dict[str, float]:
    """What this process has spent in timed calls, by what for."""
    names = dict(spent)
    return {name: sum(seconds for each, seconds in spent if each == name) for name in names}


def fresh(path: Path) -> Path:
    """The path, with nothing of an earlier run at it."""
    for stale in (path, path.with_name(path.name + ".run")):
        if stale.is_dir():
            shutil.rmtree(stale)
        elif stale.exists():
            stale.unlink()
    return path


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def printed(name: str, command: Sequence[str], limit_seconds: float | None = None, **options: Any) -> str:
    """The last line that a program prints; one that fails, or takes longer, ends this one."""
    try:
        options |= {"capture_output": True, "text": True, "timeout": limit_seconds}
        done: subprocess.CompletedProcess[str] = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{name} did not end within {limit_seconds} s") from None
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def job_command(path: Path, **document: Any) -> list[str]:
    """The command that runs a job, which is written to a file."""
    path.write_text(json.dumps({"version": 1, **document}))
    return [sys.executable, "-m", "halotile.cli.main", "run", str(path), "--quiet"]


def chosen(name: str, **options: Any) -> Any:
    """A denoiser as a job names it."""
    from halotile.graphs.kinds.sections import DenoiserChoice

    return DenoiserChoice(name=name, options=options)


@contextmanager
def started(workers: int, *, is_warm: bool = True) -> Iterator[Any]:
    """Workers of this machine that are up."""
    from halotile.graphs.clusters import local
    from halotile.graphs.clusters.base import Order

    with local.start(Order(workers=workers, memory_bytes=8 * 2**30)) as cluster:
        if is_warm:
            warm(cluster.client)
        yield cluster


def deepinv_denoiser(forward: Callable[[Any], Any]) -> Any:
    """A function of a batch as a denoiser of deepinv."""
    from deepinv.models import Denoiser

    class Wrapped(Denoiser):  # type: ignore[misc]
        def forward(self, x: Any, sigma: Any = None, **_: Any) -> Any:
            return forward(x)

    return Wrapped()


def warm(client: Any) -> None:
    """Import on the workers what they will need, as a cluster that has been up for a while has."""
    client.run(_import_everything)


def _import_everything() -> None:
    import dask.array
    import scipy.ndimage
    import torch
    import zarr

    import halotile.graphs.runs.passes.worker_setup

    del dask, scipy, torch, zarr, halotile


@contextmanager
def watched_memory(kind: str = "rss", *, largest: bool = False, with_this: bool = True) -> Iterator[Callable[[], int]]:
    """The highest sum of the memory of this process and all its children, or of the children alone, or that of the largest child.

    ``rss``, or ``pss``, in which what they share counts once.
    """
    import threading

    import psutil

    peak = 0
    stop = threading.Event()
    this = psutil.Process()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.05):
            found = [0]
            for process in [*([this] if with_this and not largest else []), *this.children(recursive=True)]:
                try:
                    info = process.memory_info() if kind == "rss" else process.memory_full_info()
                    found.append(getattr(info, kind))
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, max(found) if largest else sum(found))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        stop.set()
        thread.join()


def median_seconds(call: Callable[[], Any], barrier: Callable[[], Any] = lambda: None) -> float:
    """The median of several calls, which all ranks begin together."""
    seconds = []
    for number in range(WARM + CALLS):
        barrier()
        began = time.perf_counter()
        call()
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def in_two_processes(folder: Path, function: Callable[..., Result], *arguments: Any) -> Result:
    """What the first of two ranks of torch.distributed gives, each a process of one thread."""
    import torch.multiprocessing as multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = fresh(folder / "rank-0.json")
    multiprocessing.spawn(_rank, args=(port, out, function, arguments), nprocs=2)
    result: Result = json.loads(out.read_text())
    return result


def _rank(rank: int, port: int, out: Path, function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    import torch

    torch.set_num_threads(1)
    result = function(*arguments)
    if rank == 0:
        out.write_text(json.dumps(result))


Figures = dict[str, float]


def take_turns(
    names: Iterable[str], measure: Callable[[str], Figures], repeats: int, limit_seconds: float = float("inf")
) -> dict[str, list[Figures]]:
    """What each program gives, in rounds of all of them: each sees the machine as the others do.

    Parameters
    ----------
    names : iterable of str
        The programs; one that is named twice runs once in a round.
    measure : callable
        Runs one.
    repeats : int
        Rounds.
    limit_seconds : float
        No round but the first is begun that would end later, were it as long as the longest before it.
    """
    order = list(dict.fromkeys(names))
    results: dict[str, list[Figures]] = {name: [] for name in order}
    began, longest = time.monotonic(), 0.0
    for number in range(repeats):
        turned = time.monotonic()
        if number and turned - began + longest > limit_seconds:
            break
        for name in order:
            results[name].append(measure(name))
            print(f"  {name}: {results[name][-1]}", file=sys.stderr, flush=True)
        longest = max(longest, time.monotonic() - turned)
    return results


def machine() -> str:
    """Its cores, memory and system."""
    import psutil

    return f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}"


def versions(*packages: str) -> str:
    """Python's version and those of packages that are installed."""
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages if find_spec(name))]
    )


if __name__ == "__main__":
    main()
