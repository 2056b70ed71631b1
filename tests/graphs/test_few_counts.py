"""Scans of few counts: no note makes the object worse, and the noise is not fitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.graphs.jobs.ptychography.job import result_rows
from halotile.storage.scans.convert import write_scan
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.graphs.scans import job, words


@pytest.mark.cluster
@pytest.mark.parametrize("loss", ["amplitude_mse", "poisson_nll"])
def test_a_run_that_fits_the_noise_is_warned_of(tmp_path: Path, loss: str) -> None:
    known = SimulatedScan(raster=(3, 3), pattern=32, step=14.0, photons=1000, phase=2.0)
    write_scan(str(tmp_path / "scan.zarr"), known.scan, known)
    stages = [{"epochs": 60, "lr": 0.05}]
    path = job(tmp_path, model={"loss": loss}, held_out=0, stages=stages)
    said = words(CliRunner().invoke(app, ["run", str(path), "--workers", "1"]))
    assert "below that of photons alone: the object follows noise. Write held_out: 0.05" in said


@pytest.mark.parametrize(("kept", "advises"), [(170, True), (169, False)])
def test_more_epochs_are_advised_where_the_last_one_is_kept(kept: int, advises: bool) -> None:
    last = {"iteration": 170, "loss": 0.2, "kept": kept, "loss_of_kept": 0.2}
    words = [text for label, text in result_rows(last, Path()) if label == "note"]
    assert any("more epochs may give a better object" in text for text in words) is advises


RATES: list[tuple[float | None, str, dict[str, Any], str, bool]] = [
    (100, "amplitude_mse", {}, "0.01", True),
    (100, "poisson_nll", {}, "0.02", True),
    (100, "poisson_nll", {"held_out": 0}, "0.005", False),  # small steps where no pixel is held out
    (1e5, "amplitude_mse", {}, "0.02", False),
    (1e5, "poisson_nll", {}, "0.005", False),
    (None, "amplitude_mse", {}, "0.02", False),
]


@pytest.mark.parametrize(("photons", "loss", "parts", "rate", "holds_out"), RATES)
def test_the_rate_and_the_pixels_held_out_follow_from_loss_and_counts(
    tmp_path: Path, photons: float | None, loss: str, parts: dict[str, Any], rate: str, holds_out: bool
) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=32, step=3.0, photons=photons)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    places = {"input": {"path": str(tmp_path / "scan.zarr")}, "output": {"path": str(tmp_path / "result.cxi")}}
    whole = {"version": 1, "job": "ptychography", **places, "model": {"loss": loss}, **parts}
    (tmp_path / "job.yaml").write_text(json.dumps(whole))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml")])
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert f"150 epochs of adam, lr {rate}," in said
    assert ("5% of the pixels of each pattern are held out" in said) is holds_out
