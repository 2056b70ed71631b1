"""A reconstruction of a small scan, for tests on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import open_scan
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.recipe import Optics, ScanRecipe, SolverStage


def small_recipe(folder: Path, refined: Sequence[str], *stages: SolverStage) -> ScanRecipe:
    """36 patterns of 24 pixels, far, in 3 slots; its files lie in a folder."""
    simulated = SimulatedScan(raster=(6, 6), pattern=24, step=3.0)
    write_scan(str(folder / "scan.zarr"), simulated.scan, simulated)
    scan, patterns = open_scan(str(folder / "scan.zarr"))
    optics = Optics.of(scan, (24, 24), "far", None)
    found = ScanRecipe(scan, patterns, optics, "amplitude_mse", 1, tuple(refined), stages, 3, 5, 4)
    return replace(found, checkpoint=folder / "checkpoint", curve=folder / "curve.json")
