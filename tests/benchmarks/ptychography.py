"""Ptychography against CDTools and pty-chi, each in processes of its own: ``python ptychography.py NAME FOLDER EDGE [...]``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.commands import REPOSITORY
from tests.benchmarks.known_scans import peer, written
from tests.benchmarks.measuring import Result, fresh, job_command, main, watched_memory

PETRA = REPOSITORY / "examples" / "ptychography" / "petra.cxi"
RECIPE = [{"epochs": 100, "lr": 0.04, "batch": 10}, {"epochs": 50, "lr": 0.005, "batch": 50}]
"""The stages of CDTools' own example."""
PETRA_REQUEST = {"cxi": str(PETRA), "modes": 1, "model": {"near_field": True, "propagation_distance": 3.65e-3}}
THREADS = (1, 2)
PROBED = 6
"""Epochs by which the better number of threads is found."""
WARM = 2
STREAMED_SECONDS, STOPPED = 90, 75
"""Seconds of a job whose memory is watched, and the exit code of one that was stopped."""


# --- the real scan --------------------------------------------------------------------------------


def ours_petra(folder: Path, epochs: int, workers: str) -> Result:
    """Seconds of an epoch."""
    import halotile

    with halotile.ptychography.Adam(petra(folder), workers=int(workers)) as adam:
        return {"seconds": epoch_seconds(adam, epochs, lr=0.04, batch_size=10)}


def epoch_seconds(solver: Any, epochs: int, **options: Any) -> float:
    """Seconds of an epoch among many: what a call takes at its beginning and its end is in two calls alike."""
    list(solver.optimize(WARM, **options))  # workers are there, and have imported everything
    times = []
    for count in (WARM, WARM + epochs):
        began = time.perf_counter()
        list(solver.optimize(count, **options))
        times.append(time.perf_counter() - began)
    return (times[1] - times[0]) / epochs


def ours_petra_loss(folder: Path, edge: int) -> Result:
    """The loss at the end of the recipe."""
    import halotile

    with halotile.ptychography.Adam(petra(folder), workers=2) as adam:
        for stage in RECIPE:
            epochs, rate, batch = int(stage["epochs"]), stage["lr"], int(stage["batch"])
            for loss in adam.optimize(epochs, lr=rate, batch_size=batch, hold_positions=0):
                last = loss
    return {"loss": last}


def petra(folder: Path) -> Any:
    import halotile
    from halotile.storage.scans.convert import convert_scan

    path = folder / "petra.zarr"
    if not path.exists():
        convert_scan(str(PETRA), str(path))
    return halotile.ptychography.open(path, field="near", focus="3.65 mm")


def cdtools_petra(folder: Path, epochs: int) -> Result:
    """Seconds of an epoch, with one or two threads, whichever is faster."""
    best = min(THREADS, key=lambda threads: cdtools_seconds(folder, PETRA_REQUEST, RECIPE[0], PROBED, threads))
    return {"seconds": cdtools_seconds(folder, PETRA_REQUEST, RECIPE[0], epochs, best), "threads": best}


def cdtools_seconds(
    folder: Path, request: Mapping[str, Any], stage: Mapping[str, Any], epochs: int, threads: int
) -> float:
    """Seconds of an epoch of CDTools after the first ones."""
    stages = [{**stage, "epochs": epochs}]
    found = peer(folder, "cdtools", {**request, "only_times": True, "stages": stages, "threads": threads})
    return float(found["seconds"][-1] - found["seconds"][WARM - 1]) / (epochs - WARM)


# --- workers and memory ---------------------------------------------------------------------------


def ours_epoch(folder: Path, edge: int, workers: str, window: str = "0", batch: str = "64") -> Result:
    """Seconds of an epoch of a far field with so many patterns a step; a window is read while others are used."""
    import halotile

    written(folder, "exact")
    scan = halotile.ptychography.open(folder / "exact.zarr", modes=2, refine=("object", "probe"), window=int(window))
    with halotile.ptychography.Adam(scan, workers=int(workers)) as adam:
        return {"seconds": epoch_seconds(adam, FAR_EPOCHS, batch_size=int(batch))}


class RepeatedScan:
    """The patterns of a small scan again and again, as counts of 16 bits: every position is exposed many times.

    Parameters
    ----------
    nbytes : int
        Bytes of all patterns.
    """

    def __init__(self, nbytes: int) -> None:
        from halotile.tasks.ptychography.opened import SimulatedScan

        small = SimulatedScan(raster=(32, 32), photons=1e3)
        self.tile = small.patterns(np.arange(small.count)).astype(np.uint16)
        times = round(nbytes / self.tile.nbytes)
        self.numbers = np.tile(np.arange(small.count), times)
        positions = np.tile(small.scan.positions, (times, 1))
        self.scan = replace(small.scan, positions=positions, numbers=np.arange(len(positions)))
        self.shape = (len(positions), *self.tile.shape[1:])

    def __getitem__(self, index: tuple[Any, slice, slice]) -> NDArray[Any]:
        """Parts of some patterns."""
        chosen, rows, columns = index
        return self.tile[self.numbers[chosen], rows, columns]


def ours_streamed(folder: Path, gigabytes: int) -> Result:
    """Peak memory of a job with 1 GiB for each of two workers, in its first seconds of steps: of its largest process, and of all."""
    from halotile.storage.scans.convert import write_scan

    path = folder / f"repeated-{gigabytes}.zarr"
    if not path.exists():
        repeated = RepeatedScan(gigabytes * 10**9)
        write_scan(str(path), repeated.scan, repeated)
    places = {"input": {"path": str(path)}, "output": {"path": str(fresh(folder / "streamed.cxi"))}}
    run = {"workers": 2, "memory_per_worker": "1GiB"}
    parts = {"model": {"refine": ["object", "probe"]}, "stages": [{"epochs": 1, "batch": 64}], "run": run}
    command = job_command(folder / "streamed.yaml", job="ptychography", **places, **parts)
    with (
        watched_memory("rss", largest=True) as largest,
        watched_memory("pss", with_this=False) as total,
        subprocess.Popen(command) as running,
    ):
        try:
            code = running.wait(STREAMED_SECONDS)
        except subprocess.TimeoutExpired:
            running.terminate()
            code = running.wait()
    if code not in (0, STOPPED):
        raise SystemExit(f"the job ended with {code}")
    return {"largest_bytes": largest(), "total_bytes": total()}


# --- rows -----------------------------------------------------------------------------------------


PETRA_EPOCHS, FAR_EPOCHS = 60, 16
PTYCHOGRAPHY_ROWS = [
    ("petra", "an epoch of the scan of PETRA III, 1 worker / CDTools, its best threads", "ptychography.ours_petra 1", "ptychography.cdtools_petra", PETRA_EPOCHS, 0.5),
    ("petra", "the same, 2 workers / CDTools", "ptychography.ours_petra 2", "ptychography.cdtools_petra", PETRA_EPOCHS, 0.35),
    ("slots", "an epoch of 32 × 32 patterns of 128², 64 a step, 2 modes, 2 workers / 1", "ptychography.ours_epoch 2", "ptychography.ours_epoch 1", 0, 0.588),
    ("slots", "the same, 256 a step", "ptychography.ours_epoch 2 0 256", "ptychography.ours_epoch 1 0 256", 0, 0.588),
    ("windows", "the same, 64 a step, 2 workers, patterns read while others are used / all in memory", "ptychography.ours_epoch 2 32", "ptychography.ours_epoch 2", 0, 1.176),
]  # fmt: skip
if __name__ == "__main__":
    main(globals())
