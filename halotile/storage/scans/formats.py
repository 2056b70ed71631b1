"""The formats that scans come in: CXI, PtyD, and arrays that are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.storage.scans.cxi import SOURCE, holds_scan, read_cxi
from halotile.storage.scans.hdf5 import reading
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.named import container_of, read_named, small_array
from halotile.storage.scans.ptyd import center_of, is_ptyd, read_ptyd
from halotile.storage.scans.scan import Scan, is_scan

PROBES = (f"{SOURCE}/illumination", f"{SOURCE}/probe")
"""Usual names of a probe in CXI files."""
SUFFIXES = (".cxi", ".ptyd", ".h5", ".hdf5")

FARTHEST = 1.0
"""Metres between two positions of a scan."""


@dataclass(frozen=True)
class FoundScan:
    """A scan in an open file."""

    scan: Scan  # everything but the patterns
    patterns: Any  # read some at once
    center: tuple[int, int] | None = None  # pixel of the beam, where it is not the middle


@contextmanager
def opened_scan(path: str, known: KnownValues = KnownValues()) -> Iterator[FoundScan]:
    """Open the scan in a file or a Zarr."""
    if is_scan(path) and known.patterns is None:
        raise InputError(
            f"{path} is a scan of halotile already: there is nothing to convert. `recon-cli plan` and `run` take it as the input.path of a "
            f"`job: ptychography`; `recon-cli info {path}` shows a configuration. To crop or bin it, convert its original file with these options."
        )
    with container_of(path) as container:
        with reading(path):
            has_names = hasattr(container, "keys") and known.patterns is None
            is_cxi = has_names and (path.endswith(".cxi") or holds_scan(container))
            if (is_cxi or (has_names and is_ptyd(container))) and (known.positions or known.step):
                raise ConfigError(
                    f"{path} says where the beam was. Leave --positions and --step out, or name --patterns as well: then nothing else is read of it."
                )
            if known.positions_last and has_names and (is_cxi or is_ptyd(container)):
                raise ConfigError(
                    f"{path} has its positions first. Leave --positions-last out, or name --patterns as well."
                )
            if is_cxi:
                found = FoundScan(*read_cxi(container, known))
            elif has_names and is_ptyd(container):
                found = FoundScan(*read_ptyd(container, known), center_of(container))
            else:
                found = FoundScan(*read_named(container, path, known))
            if not len(found.scan.positions):
                raise InputError(
                    f"{path} has no patterns: nothing was recorded, or another dataset has them."
                )
            _check_extent(found.scan, path)
            found = replace(found, scan=_with_probe(found, container, path, known))
        yield found


def _check_extent(scan: Scan, path: str) -> None:
    """Refuse positions in another unit than was said: no stage goes as far."""
    if (extent := float(np.ptp(scan.positions, axis=0).max())) > FARTHEST:
        raise InputError(
            f"{path}: the positions are {extent:.4g} m apart at most, and those of a scan are within {FARTHEST:g} m. Write their unit, such as --position-unit um, or correct the wrong one."
        )


def _with_probe(found: FoundScan, container: Any, path: str, known: KnownValues) -> Scan:
    """The scan with the first guess of its probe that is named, or with a remark that the file has one."""
    if known.probe is None:
        there = [name for name in PROBES if hasattr(container, "keys") and name in container]
        remarks = [
            ("note", f"the file has a probe: --probe {name} lets reconstructions begin with it")
            for name in there[:1]
        ]
        return replace(found.scan, remarks=(*found.scan.remarks, *remarks))
    values = small_array(container, path, known.probe)
    modes = values[None] if values.ndim == 2 else values
    _, *pattern = found.patterns.shape
    if modes.ndim != 3 or list(modes.shape[1:]) != pattern or not np.isfinite(modes).all() or not modes.any():
        raise InputError(
            f"{path}: {known.probe} has shape {list(values.shape)}, and a probe is finite, not 0 everywhere, and has {pattern}, or (modes, rows, columns). Leave --probe out: a guess is made."
        )
    return replace(found.scan, probe=modes.astype(np.complex64))


def knows_scan(path: str) -> bool:
    """Return True for a file whose format says that it is a scan."""
    if not path.endswith(SUFFIXES) or not Path(path).is_file():
        return False
    with container_of(path) as container, reading(path):
        return holds_scan(container) or is_ptyd(container)
