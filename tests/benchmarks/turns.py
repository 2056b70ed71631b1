"""Programs that take turns, and what is said of the machine they ran on."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec

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
