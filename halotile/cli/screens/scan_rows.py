"""A ptychographic scan as a table."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from halotile.graphs.amounts import counted, shape_text
from halotile.graphs.kinds.base import Row
from halotile.storage.disk.place import outside_zarr
from halotile.storage.scans.formats import knows_scan, opened_scan
from halotile.storage.scans.hdf5 import reading
from halotile.storage.scans.lengths import shown_length
from halotile.storage.scans.scan import OPTIONAL, Scan, is_scan, open_scan

JOB = """version: 1
job: ptychography
input: {{path: {path}}}
output: {{path: {result}}}
model: {{field: far}} # or {{field: near, focus: 3.65 mm}}: the distance from the focus of the beam to the sample"""


@dataclass(frozen=True)
class ScanFacts:
    """Facts about a scan in a file or in a Zarr."""

    path: str
    scan: Scan
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, path: str) -> ScanFacts | None:
        """The facts of a scan; None where there is none."""
        if is_scan(path):
            scan, patterns = open_scan(path)
            return cls(path, scan, patterns.shape, patterns.dtype.name)
        if not knows_scan(path):
            return None
        with opened_scan(path) as found, reading(path):
            first = found.patterns[:1, :, :]
            return cls(path, found.scan, found.patterns.shape, first.dtype.name)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; lengths are in metres."""
        scan = self.scan
        return {
            "path": self.path,
            "patterns": self.shape[0],
            "pattern": list(self.shape[1:]),
            "dtype": self.dtype,
            "bytes": math.prod(self.shape) * np.dtype(self.dtype).itemsize,
            "scanned": np.ptp(scan.positions, axis=0).tolist(),
            "wavelength": scan.wavelength,
            "distance": scan.distance,
            "pixel": list(scan.pixel),
            "full": scan.full,
            "left_out": 0 if scan.mask is None else int((~scan.mask).sum()),
            "remarks": [f"{label}: {text}" for label, text in scan.remarks],
            "has": [name for name in OPTIONAL if getattr(scan, name) is not None],
        }

    def rows(self) -> list[Row]:
        """The facts as a table."""
        facts = self.to_json()
        (height, width), pixel = facts["scanned"], [value * 1e6 for value in facts["pixel"]]
        has = [name for name in facts["has"] if name != "mask"]
        full = (
            f", {facts['full']:,} since they reach the largest number of their type" if facts["full"] else ""
        )
        return [
            ("patterns", f"{facts['patterns']:,} of {shape_text(facts['pattern'])}, {self.dtype}"),
            ("scanned", f"{shown_length(height)} × {shown_length(width)}"),
            ("wavelength", f"{facts['wavelength'] * 1e9:.5g} nm"),
            *(
                [("pixels", f"{pixel[0] / 1e3:.4g} × {pixel[1] / 1e3:.4g} mrad")]
                if self.scan.angles
                else [
                    ("distance", f"{facts['distance']:.5g} m to the detector"),
                    ("pixels", f"{pixel[0]:.4g} × {pixel[1]:.4g} µm on the detector"),
                ]
            ),
            *(
                [("mask", f"{counted(facts['left_out'], 'pixel')} of the detector left out{full}")]
                if "mask" in facts["has"] or full
                else []
            ),
            *([("also", ", ".join(has))] if has else []),
            *self.scan.remarks,
        ]

    def next_step(self) -> str:
        """Say what to do with it."""
        stem = outside_zarr(os.path.splitext(self.path.rstrip("/"))[0])
        if not is_scan(self.path):
            return f"To reconstruct it, store it as a Zarr: recon-cli convert {self.path} {stem}.zarr"
        job = JOB.format(path=self.path, result=f"{stem}.result.cxi")
        return f"To reconstruct it, write this to config.yaml and type `recon-cli run config.yaml`:\n\n{job}"
