"""The retina in counted photons: errors with photon noise against those with one noise level, with defaults from an integer file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tests.graphs.test_photons import PHOTONS, counted, decibels, true_counts
from tests.support import job_of, run_inline, write_zarr

OPTIONS = {"tv": {"strength": 1.0, "sigma": "auto"}, "nlm": {"strength": 0.8, "sigma": "auto"}}


@cache
def _measured(name: str, peak: int) -> tuple[float, float]:
    """Change of the error in dB, and how far the mean of the result is from that of the counts, in percent."""
    truth = true_counts(peak)
    with tempfile.TemporaryDirectory() as folder:
        source = write_zarr(Path(folder) / "in.zarr", counted(truth).astype("uint16"))
        results = [
            run_inline(job_of(source, Path(folder) / "out.zarr", name, OPTIONS[name], noise=noise, shard=512))
            for noise in ({}, PHOTONS)
        ]
    plain, better = (decibels(result, truth, peak) for result in results)
    return plain - better, 100 * abs(float(results[1].mean()) / float(counted(truth).mean()) - 1)


def _part(number: int, name: str, peak: int, _: Path) -> float:
    return _measured(name, peak)[number]


PHOTON_ROWS: list[tuple[str, Callable[[Path], float], str, float]] = [
    (f"retina at a peak of {peak} photons, {name}: {what}", partial(_part, number, name, peak), unit, bar)
    for peak, most in ((5, -1.0), (20, -1.0), (100, 0.1))
    for name in OPTIONS
    for number, what, unit, bar in (
        (0, "error with photon noise against one level", "dB", most),
        (1, "mean of the result off that of the counts", "%", 0.5),
    )
]
