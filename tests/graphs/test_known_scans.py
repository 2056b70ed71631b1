"""Scans whose truth is known, from Python, and positions in another unit than metres."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halotile
from halotile.errors import ConfigError, OutputRefused
from halotile.storage.scans import convert
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import open_scan
from halotile.tasks.ptychography.opened import SimulatedScan

pytestmark = [pytest.mark.cluster]


@pytest.mark.parametrize("field", ["far", "near"])
def test_a_simulated_scan_is_that_of_its_truth(tmp_path: Path, field: Any) -> None:
    truth = halotile.ptychography.simulate(
        tmp_path / "known.zarr", field=field, raster=(5, 4), pattern=24, step=3.0, position_error=0.5
    )
    scan, patterns = open_scan(str(tmp_path / "known.zarr"))
    assert patterns.shape == (20, 24, 24)
    written = np.empty_like(truth.patterns(np.arange(20)))
    written[scan.numbers] = patterns[:]
    assert np.array_equal(written, truth.patterns(np.arange(20)))
    opened = halotile.ptychography.open(tmp_path / "known.zarr", field=field, margin=2)
    difference = opened.positions - truth.places
    assert 0.2 < np.std(difference - difference.mean(0)) < 1.0
    with pytest.raises(OutputRefused):
        halotile.ptychography.simulate(tmp_path / "known.zarr", raster=(5, 4), pattern=24)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"field": "middle"}, "far or near"),
        ({"raster": (0, 4)}, "such as"),
        ({"pattern": 4}, "8 or more"),
        ({"step": 0.0}, "above 0"),
        ({"modes": 5}, "1 to 4"),
        ({"photons": 0}, "or None"),
        ({"position_error": -1.0}, "at least 0"),
        ({"phase": -1.0}, "in radians"),
        ({"fotons": 3}, "did you mean photons"),
        ({"quality": 3}, "write one of field, raster"),
        ({"photons": "many"}, 'photons: "many" is not a number'),
    ],
)
def test_a_scan_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        halotile.ptychography.simulate(tmp_path / "known.zarr", **options)
    assert not (tmp_path / "known.zarr").exists()


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1e-6, "all positions are within"), (1e3, "they do not overlap")],
    ids=["too small", "too large"],
)
def test_positions_in_another_unit_are_refused(tmp_path: Path, factor: float, said: str) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=24, step=3.0)
    scan = replace(simulated.scan, positions=factor * simulated.scan.positions)
    write_scan(str(tmp_path / "scan.zarr"), scan, simulated)
    with pytest.raises(ConfigError, match=rf"{said}.*--position-unit"):
        halotile.ptychography.open(tmp_path / "scan.zarr")


def test_what_a_scan_cannot_do_is_refused_in_a_loop_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4 * 24 * 24 * 4)  # of four patterns
    halotile.ptychography.simulate(tmp_path / "scan.zarr", raster=(5, 5), pattern=24, step=5.0)
    scan = halotile.ptychography.open(
        tmp_path / "scan.zarr", loss="poisson_nll", window=4, resolution=True, refine=("object", "probe")
    )
    for solver, options, said in (
        (halotile.ptychography.RPIE, {}, "for loss: amplitude_mse"),
        (halotile.ptychography.Adam, {"batch_size": 2}, "Write a batch of 4 or more"),
        (halotile.ptychography.Adam, {"lr_factors": {"positions": 0.5}}, "which is not refined"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(solver(scan).optimize(1, **options))
    with pytest.raises(ConfigError, match="its halves would begin with the same"):
        scan.object = scan.object
