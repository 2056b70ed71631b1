"""Jobs for a scan that is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import h5py
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.runs import driver
from halotile.storage.scans.convert import write_scan
from halotile.tasks.ptychography.opened import SimulatedScan

STAGES = [{"epochs": 8, "lr": 0.05, "batch": 6}, {"epochs": 4, "lr": 0.01, "batch": 16}]


def job(folder: Path, name: str = "result.cxi", start: Path | None = None, **parts: Any) -> Path:
    """Write a job for the scan in a folder."""
    path = folder / f"{name}.yaml"
    content = {"version": 1, "job": "ptychography", "stages": STAGES, "cluster": {"dashboard": False}, **parts}
    content["input"] = {"path": str(folder / "scan.zarr")} | ({"start": str(start)} if start else {})
    content["output"] = {"path": str(folder / name)} | content.get("output", {})
    path.write_text(json.dumps(content, indent=1))  # which is YAML as well
    return path


def run(path: Path, *options: str) -> Any:
    """Run a job by the command, in this process."""
    return CliRunner().invoke(app, ["run", str(path), "--quiet", *options])


def plan(path: Path, *options: str) -> Any:
    """Plan a job by the command."""
    return CliRunner().invoke(app, ["plan", str(path), *options])


def compute(path: Path, cluster: RunningCluster, workers: int = 1) -> bytes:
    """Run a job on a cluster that is there; return its result."""
    planned = halotile.plan(path, [f"run.workers={workers}"], allow_import=True)
    driver.run(planned, cluster=cluster)
    return path.with_suffix("").read_bytes()


def opened(folder: Path, start: Mapping[str, Any] | Path | None = None, **options: Any) -> Any:
    """The scan in a folder, begun with some arrays or with a file."""
    if start is not None:
        options["start"] = start if isinstance(start, Path) else begin_with(folder, start)
    return halotile.ptychography.open(folder / "scan.zarr", **options)


def begin_with(folder: Path, start: Mapping[str, Any]) -> Path:
    """Write a file to begin with."""
    with h5py.File(folder / "start.h5", "w") as file:
        for name, values in start.items():
            file[name] = values
    return folder / "start.h5"


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
