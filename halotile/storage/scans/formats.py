"""The formats that scans come in: CXI, arrays that are named, and PtyD, as ptypy prepares scans.

PtyD has patterns in numbered chunks of an HDF5 file, or of several that it links: B. Enders, P. Thibault, A computational framework for
ptychographic reconstructions, Proc. R. Soc. A 472 (2016) 20160640.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.scans.cxi import SOURCE, holds_scan, read_cxi
from halotile.storage.scans.hdf5 import dataset_in, reading
from halotile.storage.scans.known import KnownValues, wavelength_of
from halotile.storage.scans.named import container_of, mask_of, read_named, small_array
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
            of_cxi = has_names and (path.endswith(".cxi") or holds_scan(container))
            of_ptyd = has_names and not of_cxi and is_ptyd(container)
            if (of_cxi or of_ptyd) and (known.positions or known.step):
                raise ConfigError(
                    f"{path} says where the beam was. Leave --positions and --step out, or name --patterns as well: then nothing else is read of it."
                )
            if known.positions_last and (of_cxi or of_ptyd):
                raise ConfigError(
                    f"{path} has its positions first. Leave --positions-last out, or name --patterns as well."
                )
            if of_cxi:
                found = FoundScan(*read_cxi(container, known))
            elif of_ptyd:
                found = FoundScan(*read_ptyd(container, known), center_of(container))
            else:
                found = FoundScan(*read_named(container, path, known))
            if not len(found.scan.positions):
                raise InputError(f"{path} has no patterns: nothing was recorded, or another dataset has them.")
            if (extent := float(np.ptp(found.scan.positions, axis=0).max())) > FARTHEST:
                raise InputError(
                    f"{path}: the positions are {extent:.4g} m apart at most, and those of a scan are within {FARTHEST:g} m. Write their unit, such as --position-unit um, or correct the wrong one."
                )
            found = replace(found, scan=_with_probe(found, container, path, known))
        yield found


def _with_probe(found: FoundScan, container: Any, path: str, known: KnownValues) -> Scan:
    """The scan with the first guess of its probe that is named, or with a remark that the file has one."""
    if known.probe is None:
        there = [name for name in PROBES if hasattr(container, "keys") and name in container]
        text = "the file has a probe: --probe {} lets reconstructions begin with it"
        remarks = [("note", text.format(name)) for name in there[:1]]
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


class JoinedPatterns:
    """The patterns of some arrays, (positions, rows, columns), one after the other."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])
        self.dtype = np.result_type(*(array.dtype for array in arrays))
        self.shape = (int(self.ends[-1]), *arrays[0].shape[1:])

    def __getitem__(self, index: tuple[Any, slice, slice]) -> NDArray[Any]:
        """Parts of some patterns of rising numbers."""
        chosen, rows, columns = index
        numbers = np.arange(self.shape[0])[chosen]
        within = np.searchsorted(self.ends, numbers, "right")
        starts = self.ends - [len(array) for array in self.arrays]
        parts = [self.arrays[n][numbers[within == n] - starts[n], rows, columns] for n in np.unique(within)]
        return np.concatenate(parts).astype(self.dtype, copy=False)


def is_ptyd(file: Any) -> bool:
    """Return True for an open HDF5 file with chunks of patterns."""
    return "meta" in file and "chunks/0/data" in file


def read_ptyd(file: Any, known: KnownValues) -> tuple[Scan, JoinedPatterns]:
    """Read a scan and find its patterns; frames without a position are refused."""
    chunks = sorted(filter(str.isdecimal, file["chunks"]), key=int)
    pattern = _of_chunk(file, chunks[0], "data", 3).shape[1:]
    patterns = JoinedPatterns([_of_chunk(file, chunk, "data", 3, pattern) for chunk in chunks])
    columns = _of_chunk(file, chunks[0], "positions", 2).shape[1:]
    places = [_of_chunk(file, chunk, "positions", 2, columns)[()] for chunk in chunks]
    positions = np.concatenate(places).astype(np.float64)
    height, width = known.pixel or _meta(file, "psize", 2)
    scan = Scan(
        known.wavelength or wavelength_of(1e3 * _meta(file, "energy")[0]),
        known.distance or _meta(file, "distance")[0],
        (float(height), float(width)),
        known.placed(positions),
        np.arange(len(positions)),
        mask=known.without_pixels(_mask(file, chunks, pattern, known), pattern),
        angles=known.angles,
    )
    scan.check(patterns.shape, file.filename)
    return scan, patterns


def center_of(file: Any) -> tuple[int, int] | None:
    """The pixel of the beam, where the file says it and it is not the middle."""
    said = dataset_in(file, "meta/center", kinds="")
    if said is None or (said.dtype.kind in "OS" and said.size == 1 and said[()] == b"fftshift"):  # the middle
        return None
    center = [round(value) for value in _meta(file, "center", 2)]
    shape = _of_chunk(file, "0", "data", 3).shape[1:]
    return None if center == [n // 2 for n in shape] else (center[0], center[1])


def _of_chunk(file: Any, chunk: str, name: str, ndim: int, tail: tuple[int, ...] = ()) -> Any:
    found = dataset_in(file, f"chunks/{chunk}/{name}", kinds="iuf", ndim=ndim, tail=tail)
    if found is None:
        raise InputError(f"{file.filename} has no chunks/{chunk}/{name}, or a file that it links is not there.")
    return found


def _meta(file: Any, name: str, count: int = 1) -> list[float]:
    """Finite numbers among the metadata; there may be one for all."""
    option = "pixel" if name == "psize" else name
    if (found := dataset_in(file, f"meta/{name}")) is None:
        raise InputError(f"{file.filename} has no meta/{name}. Write --{option}.")
    values = np.asarray(found[()], np.float64).ravel()
    is_odd = values.size not in (1, count) or not np.isfinite(values).all()
    if is_odd or (name == "energy" and not values.all()):
        raise InputError(f"{file.filename}: meta/{name} is {values.tolist()}. Write --{option}.")
    return [float(value) for value in np.broadcast_to(values, count)]


def _mask(file: Any, chunks: list[str], pattern: tuple[int, ...], known: KnownValues) -> NDArray[Any] | None:
    """True where the weight is above 0 in every pattern."""
    if known.good or known.bad_images:
        return mask_of(file, file.filename, known)
    counts = None
    for chunk in chunks:
        name = f"chunks/{chunk}/weights"
        if getattr(file.get(name), "ndim", 0) == 3:
            counts = np.ones(pattern, bool) if counts is None else counts
            for frame in dataset_in(file, name, ndim=3, tail=pattern):
                counts &= frame > 0
    if counts is not None:
        return counts
    for name in ("meta/weight2d", "info/weight2d"):
        found = dataset_in(file, name, kinds="")
        if found is not None and found.ndim == 2 and found.dtype.kind in "biuf":
            return np.asarray(found[()] > 0)
    return None
