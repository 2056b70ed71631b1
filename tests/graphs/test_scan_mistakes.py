"""Scans with a position far away, and files that are taken for a scan or for an image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.formats import encode_cxi
from halotile.tasks.ptychography.opened import SimulatedScan


def planned(folder: Path, away: float) -> str:
    """The plan for a scan with a position so many sizes of a pattern away from where it belongs."""
    simulated = SimulatedScan(raster=(6, 6), pattern=32, step=3.0)
    scan = simulated.scan
    positions = scan.positions.copy()
    pixel = scan.wavelength * scan.distance / (32 * scan.pixel[0])
    positions[17, 1] += away * 32 * pixel
    write_scan(str(folder / "scan.zarr"), replace(scan, positions=positions), simulated)
    job = {"input": {"path": str(folder / "scan.zarr")}, "output": {"path": str(folder / "result.cxi")}}
    (folder / "job.yaml").write_text(json.dumps({"version": 1, "job": "ptychography", **job}))
    done = CliRunner().invoke(app, ["plan", str(folder / "job.yaml")])
    assert (done.exit_code == 0) == (away < 2)
    return " ".join(done.output.split())


@pytest.mark.parametrize("away", [5, 1e6])
def test_a_position_far_from_all_others_is_named(tmp_path: Path, away: float) -> None:
    said = planned(tmp_path, away)
    assert "pattern 17 overlaps no other" in said
    assert "Correct its position" in said


def test_a_position_that_still_overlaps_is_taken(tmp_path: Path) -> None:
    assert "36 patterns" in planned(tmp_path, 0.5)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A file with the parts by which a result is known."""
    path = tmp_path / "star.cxi"
    arrays = {"image_1/data": np.ones((9, 9), complex), "image_2/data": np.ones((1, 4, 4), complex)}
    links = {"object": "image_1/data", "probe": "image_2/data"}
    path.write_bytes(encode_cxi({**arrays, "process_1/first_pixel": np.zeros((4, 2))}, {}, links))
    return path


def test_a_result_is_no_image_and_no_scan(result: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out.cxi")
    for command in (["info", str(result)], ["preview", str(result), out], ["export", str(result), out]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "a CXI file as it is" in " ".join(done.output.split())


def test_a_scan_is_no_image(tmp_path: Path) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=16, step=3.0)
    scan = str(tmp_path / "scan.zarr")
    write_scan(scan, simulated.scan, simulated)
    for command in (["preview", scan, "out.png"], ["export", scan, str(tmp_path / "out.tif")]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert f"recon-cli export {scan} FILE" in " ".join(done.output.split())


def test_a_file_in_place_of_a_zarr_is_named_as_the_source(result: Path, tmp_path: Path) -> None:
    job = {"input": {"path": str(result)}, "output": {"path": str(tmp_path / "out.cxi")}}
    (tmp_path / "job.yaml").write_text(json.dumps({"version": 1, "job": "ptychography", **job}))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml")])
    assert done.exit_code == 4
    assert f"recon-cli convert {result} star.zarr" in " ".join(done.output.split()).replace("- ", "-")


@pytest.mark.thorough
def test_steps_that_are_too_long_end_with_words(tmp_path: Path) -> None:
    simulated = SimulatedScan(raster=(6, 6), pattern=32, step=3.0)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    for solver, rate, refined in (
        ("rpie", 30.0, ["object", "probe"]),
        ("rpie", 30.0, ["object", "probe", "positions"]),
        ("adam", 100.0, ["object", "probe"]),  # from the first step on, and no worse later
    ):
        job = {
            "input": {"path": str(tmp_path / "scan.zarr")},
            "output": {"path": str(tmp_path / f"{solver}-{len(refined)}.cxi")},
            "model": {"refine": refined},
            "stages": [{"solver": solver, "epochs": 2, "batch": 6, "lr": rate}],
            "run": {"workers": 1},
            "cluster": {"dashboard": False},
        }
        (tmp_path / "job.yaml").write_text(json.dumps({"version": 1, "job": "ptychography", **job}))
        done = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), "--quiet"])
        assert done.exit_code != 0
        said = " ".join(done.output.split())
        assert "Write a smaller lr" in said
        assert "Traceback" not in said
