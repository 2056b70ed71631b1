"""What a run's own checks cost, of the time that it takes: digests of all shards, looks at input and output, the last check.

``python safeguards.py share FOLDER EDGE``: a copy as a job, in which the functions that do this are timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from numpy.typing import NDArray

from tests.benchmarks.data import image
from tests.benchmarks.denoising import run_job
from tests.benchmarks.measuring import Result, fresh, main

spent: list[float] = []
"""Seconds of each call in this process."""


def share(folder: Path, edge: int) -> Result:
    """Per cent of the job's time: the driver's seconds, and those of the workers side by side."""
    from halotile.graphs.runs.outputs.held_output import HeldOutputs
    from halotile.tasks.denoisers.function import GivenFunction

    HeldOutputs._is_checked = timed(HeldOutputs._is_checked)  # type: ignore[method-assign]
    in_workers: list[float] = []
    job = run_job(
        image(folder, edge),
        fresh(folder / "safe-copy.zarr"),
        GivenFunction(call=same, depth=0),
        before=lambda client: client.run(time_digests),
        after=lambda client: in_workers.extend(client.run(seconds_spent).values()),
    )
    driver = seconds_spent()
    assert driver
    assert all(in_workers)
    return {"percent": 100 * (driver + sum(in_workers) / len(in_workers)) / job["seconds"]}


def same(window: NDArray[Any]) -> NDArray[Any]:
    """The same pixels."""
    return window


def time_digests() -> None:
    """Time what a worker does for digests from now on."""
    from halotile.storage.sharded import output

    for name in ("encoded_digest", "digest_of"):
        setattr(output, name, timed(getattr(output, name)))


def seconds_spent() -> float:
    """What this process has spent in timed functions."""
    return sum(_spent_here())


def _spent_here() -> list[float]:
    from tests.benchmarks import safeguards  # not __main__, which workers have another of

    return safeguards.spent


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, its seconds kept."""

    @wraps(call)
    def of_which_the_time_is_kept(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - began
            _spent_here().append(seconds)

    return of_which_the_time_is_kept


if __name__ == "__main__":
    main(globals())
