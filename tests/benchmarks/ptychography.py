"""Ptychography against CDTools and pty-chi, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.bars import REPOSITORY
from tests.benchmarks.measuring import Result, fresh, job_command, printed, watched_memory

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
        # A rate at which no batch size diverges.
        return {"seconds": epoch_seconds(adam, FAR_EPOCHS, batch_size=int(batch), lr=1e-3)}


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


def peer(folder: Path, name: str, request: Mapping[str, Any]) -> Mapping[str, NDArray[Any]]:
    """What a program of a peer recorded."""
    result = fresh(folder / f"{name}.npz")
    command = [sys.executable, str(Path(__file__).with_name("ptychography_side.py")), name]
    printed(name, [*command, json.dumps({**request, "result": str(result)})])
    return dict(np.load(result))


def simulated(kind: str) -> Any:
    """A far field of 32 × 32 positions and 2 modes: with exact intensities, or with few photons and wrong positions."""
    from halotile.tasks.ptychography.opened import SimulatedScan

    if kind == "exact":
        return SimulatedScan(modes=2)
    # Of phases up to 1 the patterns do not tell their positions to 0.2 pixels: the Cramér-Rao bound is 0.44 at 1, 0.10 at 5.
    return SimulatedScan(modes=2, photons=1e3, position_error=2.0 / np.sqrt(2), phase=5.0)


def written(folder: Path, kind: str) -> Any:
    """The scan, as a Zarr, as a CXI file, and as arrays with the first guess of the probe."""
    import halotile
    from halotile.storage.scans.convert import write_scan
    from halotile.storage.scans.formats import encode_cxi
    from halotile.storage.scans.known import PLANCK_TIMES_LIGHT

    scan = simulated(kind)
    if not (folder / f"{kind}.npz").exists():
        folder.mkdir(parents=True, exist_ok=True)
        known = scan.scan
        patterns = scan.patterns(np.arange(scan.count))
        write_scan(str(folder / f"{kind}.zarr"), known, scan, overwrite=True)
        row, column = known.positions.T
        detector = "instrument_1/detector_1"
        content = {
            "data_1/data": patterns,
            "data_1/translation": np.stack([column, row, np.zeros(len(row))], 1),
            f"{detector}/distance": known.distance,
            f"{detector}/basis_vectors": np.array([[0.0, -known.pixel[1]], [-known.pixel[0], 0.0], [0.0, 0.0]]),
            "instrument_1/source_1/wavelength": known.wavelength,
            "instrument_1/source_1/energy": PLANCK_TIMES_LIGHT / known.wavelength,
        }
        (folder / f"{kind}.cxi").write_bytes(encode_cxi(content, {}, {}))
        probe = halotile.ptychography.open(folder / f"{kind}.zarr").probe[0]
        places = known.positions / (known.wavelength * known.distance / (scan.pattern * known.pixel[0]))
        np.savez(folder / f"{kind}.npz", patterns=patterns, places=places, probe=probe)
    return scan


def object_error(image: NDArray[Any], places: NDArray[Any], truth: Any) -> float:
    """Relative error of an object where it was scanned, but for a factor, a phase ramp and a shift of all positions, which no pattern tells."""
    from halotile.tasks.ptychography.result import aligned

    edge = truth.pattern // 2
    inside = tuple(slice(edge, n - edge) for n in truth.image.shape)
    shift = np.round(np.median(places - truth.places, axis=0)).astype(int)
    moved = tuple(slice(part.start + n, part.stop + n) for part, n in zip(inside, shift, strict=True))
    expected, found = truth.image[inside], image[moved]
    window = np.outer(*(np.hanning(n + 2)[1:-1] for n in expected.shape))
    difference = aligned(expected, found, window) - expected
    return float(np.sqrt((window * np.abs(difference) ** 2).sum() / (window * np.abs(expected) ** 2).sum()))


def position_error(places: NDArray[Any], truth: Any) -> float:
    """Root mean square of the error along an axis in pixels, but for a shift of all positions."""
    difference = places - truth.places
    return float(np.sqrt(((difference - difference.mean(0)) ** 2).mean()))


def ours_errors(
    folder: Path, kind: str, seconds: float, solver: str, loss: str = "amplitude_mse", **options: Any
) -> dict[str, list[float]]:
    """Errors of the object and of the positions by the seconds that the epochs until then took."""
    import halotile
    from halotile.storage.scans.scan import open_scan

    truth = written(folder, kind)
    refine = ("object", "probe") if kind == "exact" else ("object", "probe", "positions")
    scan = halotile.ptychography.open(folder / f"{kind}.zarr", modes=2, refine=refine, loss=loss)
    numbers = open_scan(str(folder / f"{kind}.zarr"))[0].numbers
    found: dict[str, list[float]] = {"seconds": [], "object": [], "positions": []}
    with getattr(halotile.ptychography, solver)(scan, workers=2) as working:
        list(working.optimize(1, lr=1e-9, subset=[0]))
        loop, spent = working.optimize(100_000, **options), 0.0
        while spent <= seconds:
            began = time.perf_counter()
            next(loop)
            spent += time.perf_counter() - began  # ranks stand still while an epoch is looked at
            places = np.empty_like(scan.positions)
            places[numbers] = scan.positions
            found["seconds"].append(spent)
            found["object"].append(object_error(scan.object, places, truth))
            found["positions"].append(position_error(places, truth))
        loop.close()
    return found


def peer_errors(folder: Path, kind: str, name: str, request: Mapping[str, Any]) -> dict[str, list[float]]:
    """The same of a peer."""
    truth = written(folder, kind)
    files = {"cxi": str(folder / f"{kind}.cxi"), "data": str(folder / f"{kind}.npz")}
    found = peer(folder, name, {**files, "modes": 2, "positions": kind != "exact", **request})
    rows = list(zip(found["object"], found["places"], strict=True))
    return {
        "seconds": found["seconds"].tolist(),
        "object": [object_error(image, places, truth) for image, places in rows],
        "positions": [position_error(places, truth) for _, places in rows],
    }


# --- programs -------------------------------------------------------------------------------------

WANTED = 0.05
"""Relative error of the object at which a program has reached its end."""
SECONDS: Mapping[str, float] = {"halotile": 30, "cdtools": 90, "ptychi": 150}
"""Time that each runs for: twice what it takes, or more."""
OURS: Mapping[str, Any] = {"solver": "Adam", "lr": 0.02, "batch_size": 16}
THEIRS: Mapping[str, Mapping[str, Any]] = {
    "cdtools": {"threads": 2, "stages": [{"epochs": 1000, "lr": 0.02, "batch": 32}]},
    "ptychi": {"threads": 2, "solver": "rpie", "epochs": 1000, "batch": 8},
}
"""Each with the best of the rates and batches that were tried."""


def ours_reached(folder: Path, edge: int) -> Result:
    """Seconds until the object was as near to the truth as asked for."""
    return _reached(ours_errors(folder, "exact", SECONDS["halotile"], **OURS))


def reached(folder: Path, edge: int, name: str) -> Result:
    """Those of a peer."""
    return _reached(peer_errors(folder, "exact", name, {"seconds": SECONDS[name], **THEIRS[name]}))


def _reached(found: Mapping[str, list[float]]) -> Result:
    times = zip(found["seconds"], found["object"], strict=True)
    if (first := next((seconds for seconds, error in times if error <= WANTED), None)) is None:
        spent, error = found["seconds"][-1], min(found["object"])
        raise SystemExit(f"after {spent:.0f} s the error is {error:.3f}, and {WANTED} was asked for")
    return {"seconds": first}


FEW_SECONDS = 150
OURS_FEW: Mapping[str, Any] = {
    "solver": "Adam",
    "loss": "poisson_nll",  # CDTools' loss of this name diverged at these rates
    "lr": 0.02,
    "batch_size": 32,
    "schedule": True,
}
THEIRS_FEW = {**THEIRS, "cdtools": {"threads": 2, "stages": [{**THEIRS["cdtools"]["stages"][0], "schedule": True}]}}


def ours_few(folder: Path, edge: int) -> Result:
    """Errors of the object and of the positions at the end, with few photons and wrong positions."""
    return _last(ours_errors(folder, "few", FEW_SECONDS, **OURS_FEW))


def few(folder: Path, edge: int, name: str) -> Result:
    """Those of a peer."""
    return _last(peer_errors(folder, "few", name, {"seconds": FEW_SECONDS, **THEIRS_FEW[name]}))


def _last(found: Mapping[str, list[float]]) -> Result:
    return {name: values[-1] for name, values in found.items()}


SCAN = "32 × 32 patterns of 128², 2 modes"
PEERS = {"cdtools": "CDTools", "ptychi": "pty-chi"}
TITLES = {
    "reached": f"{SCAN}, exact intensities: time to an error of the object of {WANTED}, 2 workers",
    "few": f"{SCAN}, 1e3 photons a pattern, positions wrong by 2 pixels: error of the object after {FEW_SECONDS} s, 2 workers",
}


def _rows(case: str, program: str, *more: Any) -> list[tuple[Any, ...]]:
    """A row for each peer; more: bar, repeats and figure."""
    titles = [TITLES[program], *["the same"] * len(PEERS)]
    return [
        (case, f"{title} / {shown}", f"ptychography.ours_{program}", f"ptychography.{program} {name}", 0, *more)
        for title, (name, shown) in zip(titles, PEERS.items(), strict=False)
    ]


KNOWN_ROWS = _rows("errors", "reached", 0.5)
FEW_ROWS = _rows("few", "few", 1.0, 1, "object")
