"""A scan as a table."""

from __future__ import annotations

import numpy as np

from halotile.graphs.amounts import counted
from halotile.graphs.kinds.base import Row
from halotile.graphs.units import shape_text
from halotile.storage.scans.scan import open_scan


def scan_rows(path: str) -> list[Row]:
    """Return what a scan is."""
    scan, patterns = open_scan(path)
    count, *pattern = patterns.shape
    height, width = np.ptp(scan.positions, axis=0) * 1e6
    pixels = patterns.shape[1] * patterns.shape[2]
    bad = 0 if scan.mask is None else pixels - int(scan.mask.sum())
    known = [name for name in ("background", "probe", "intensities") if getattr(scan, name) is not None]
    return [
        ("patterns", f"{count:,} of {shape_text(pattern)}, {patterns.dtype}"),
        ("scanned", f"{height:.4g} × {width:.4g} µm"),
        ("wavelength", f"{scan.wavelength * 1e9:.5g} nm"),
        ("distance", f"{scan.distance:.5g} m to the detector"),
        ("pixels", f"{scan.pixel[0] * 1e6:.4g} × {scan.pixel[1] * 1e6:.4g} µm on the detector"),
        ("mask", f"{counted(bad, 'pixel')} of the detector left out"),
        *([("also", ", ".join(known))] if known else []),
    ]
