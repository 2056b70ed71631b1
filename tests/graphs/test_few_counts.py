"""Patterns in which most pixels counted nothing: the plan advises the likelihood of counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.storage.scans.convert import write_scan
from halotile.tasks.ptychography.simulated import SimulatedScan

ADVICE = "model.loss: poisson_nll"


def planned(folder: Path, photons: float | None, **parts: Any) -> str:
    """The plan for a scan of so many photons a pattern."""
    simulated = SimulatedScan(raster=(4, 4), pattern=32, step=3.0, photons=photons)
    write_scan(str(folder / "scan.zarr"), simulated.scan, simulated)
    places = {"input": {"path": str(folder / "scan.zarr")}, "output": {"path": str(folder / "result.cxi")}}
    (folder / "job.yaml").write_text(json.dumps({"version": 1, "job": "ptychography", **places, **parts}))
    done = CliRunner().invoke(app, ["plan", str(folder / "job.yaml")])
    assert done.exit_code == 0
    return " ".join(done.output.split())


def test_few_counts_are_noted(tmp_path: Path) -> None:
    assert f"a pixel of a pattern has 0.096 counts on average: {ADVICE}" in planned(tmp_path, 100)


@pytest.mark.parametrize(
    ("photons", "parts"),
    [
        (1e5, {}),
        (100, {"model": {"loss": "poisson_nll"}}),
        (100, {"stages": [{"solver": "rpie", "epochs": 1}]}),
    ],
)
def test_others_are_not(tmp_path: Path, photons: float, parts: dict[str, Any]) -> None:
    assert ADVICE not in planned(tmp_path, photons, **parts)
