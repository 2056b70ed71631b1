"""Jobs for a scan that is known."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.storage.scans.convert import write_scan
from halotile.tasks.ptychography.opened import SimulatedScan

STAGES = [{"epochs": 8, "lr": 0.05, "batch": 6}, {"epochs": 4, "lr": 0.01, "batch": 16}]


def job(folder: Path, name: str = "result.cxi", **parts: Any) -> Path:
    """Write a job for the scan in a folder."""
    path = folder / f"{name}.yaml"
    content = {"version": 1, "job": "ptychography", "stages": STAGES, "cluster": {"dashboard": False}, **parts}
    content |= {"input": {"path": str(folder / "scan.zarr")}, "output": {"path": str(folder / name)}}
    path.write_text(json.dumps(content, indent=1))  # which is YAML as well
    return path


def run(path: Path, *options: str) -> Any:
    """Run a job in this process."""
    return CliRunner().invoke(app, ["run", str(path), "--quiet", *options])


def words(done: Any) -> str:
    """The text of a command, in one line."""
    return " ".join(done.output.split())


@cache
def small_scan() -> SimulatedScan:
    """A far field of a small raster."""
    return SimulatedScan(raster=(8, 8), pattern=32, step=3.0)


def write_small_scan(folder: Path) -> Path:
    """Write that scan as scan.zarr; return its folder."""
    simulated = small_scan()
    write_scan(str(folder / "scan.zarr"), simulated.scan, simulated)
    return folder
