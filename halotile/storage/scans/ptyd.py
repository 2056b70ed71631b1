"""Scans as ptypy prepares them (PtyD): patterns in numbered chunks of an HDF5 file, or of several that it links.

References
----------
B. Enders, P. Thibault, A computational framework for ptychographic reconstructions, Proc. R. Soc. A 472 (2016) 20160640.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.scans.hdf5 import dataset_in
from halotile.storage.scans.known import KnownValues, wavelength_of
from halotile.storage.scans.named import mask_of
from halotile.storage.scans.scan import Scan


class JoinedPatterns:
    """The patterns of some arrays, one after the other.

    Parameters
    ----------
    arrays : list of array, (positions, rows, columns)
        All with patterns of one shape.
    """

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])
        self.dtype = np.result_type(*(array.dtype for array in arrays))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all of them."""
        return (int(self.ends[-1]), *self.arrays[0].shape[1:])

    def __getitem__(self, index: tuple[Any, slice, slice]) -> NDArray[Any]:
        """Parts of some patterns of rising numbers."""
        chosen, rows, columns = index
        numbers = np.arange(self.shape[0])[chosen]
        within = np.searchsorted(self.ends, numbers, "right")
        parts = [
            self.arrays[array][
                numbers[within == array] - (self.ends[array] - len(self.arrays[array])), rows, columns
            ]
            for array in np.unique(within)
        ]
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
        raise InputError(
            f"{file.filename} has no chunks/{chunk}/{name}, or a file that it links is not there."
        )
    return found


def _meta(file: Any, name: str, count: int = 1) -> list[float]:
    """Finite numbers among the metadata, of which there may be one for all."""
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
