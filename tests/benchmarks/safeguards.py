"""What a run's own checks cost, of the time that it takes: digests of all shards, looks at input and output, the last check.

``python safeguards.py share FOLDER EDGE``: a copy as a job, in which the functions that do this are timed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from numpy.typing import NDArray

from tests.benchmarks.data import image
from tests.benchmarks.denoising import run_job
from tests.benchmarks.measuring import Result, main, seconds_spent, timed


def share(folder: Path, edge: int) -> Result:
    """Per cent of the job's time: the driver's seconds, and those of the workers side by side."""
    from halotile.graphs.runs.held_output import HeldOutputs
    from halotile.tasks.denoisers.function import GivenFunction

    HeldOutputs._is_checked = timed("checks", HeldOutputs._is_checked)  # type: ignore[method-assign]
    in_workers: list[float] = []
    job = run_job(
        image(folder, edge),
        folder / "safe-copy.zarr",
        GivenFunction(call=same, depth=0),
        before=lambda client: client.run(time_digests),
        after=lambda client: in_workers.extend(sum(each.values()) for each in client.run(seconds_spent).values()),
    )
    driver = sum(seconds_spent().values())
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
        setattr(output, name, timed(name, getattr(output, name)))


if __name__ == "__main__":
    main(globals())
