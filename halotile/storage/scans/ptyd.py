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
    """Read a scan and find its patterns; frames without a position are refused.

    Raises
    ------
    InputError
        When something is missing, or patterns differ in shape.
    """
    chunks = [file["chunks"].get(name) for name in sorted(file["chunks"], key=int)]
    if any(chunk is None for chunk in chunks):
        raise InputError(f"{file.filename}: a file that it links is not there.")
    if different := {chunk["data"].shape[1:] for chunk in chunks} - {chunks[0]["data"].shape[1:]}:
        raise InputError(
            f"{file.filename}: patterns have shapes {chunks[0]['data'].shape[1:]} and {different.pop()}."
        )
    patterns = JoinedPatterns([chunk["data"] for chunk in chunks])
    positions = np.concatenate([np.asarray(chunk["positions"][()], np.float64) for chunk in chunks])
    height, width = known.pixel or np.broadcast_to(_meta(file, "psize"), 2)
    scan = Scan(
        known.wavelength or wavelength_of(1e3 * float(_meta(file, "energy"))),
        known.distance or float(_meta(file, "distance")),
        (float(height), float(width)),
        known.placed(positions),
        np.arange(len(positions)),
        mask=known.without_pixels(_mask(file, chunks, known), patterns.shape[1:]),
        angles=known.angles,
    )
    scan.check(patterns.shape, file.filename)
    return scan, patterns


def center_of(file: Any) -> tuple[int, int] | None:
    """The pixel of the beam, where the file says it and it is not the middle."""
    if "meta/center" not in file:
        return None
    said = file["meta/center"][()]
    if isinstance(said, bytes | str):
        said = said.decode() if isinstance(said, bytes) else said
        if said == "fftshift":  # the middle, in ptypy's word
            return None
        raise InputError(
            f"{file.filename}: meta/center is {said!r}, and it is the pixel of the beam or fftshift."
        )
    center = np.rint(np.broadcast_to(np.asarray(said, np.float64), 2)).astype(int).tolist()
    shape = file["chunks/0/data"].shape[1:]
    return None if center == [n // 2 for n in shape] else (center[0], center[1])


def _meta(file: Any, name: str) -> Any:
    if f"meta/{name}" not in file:
        raise InputError(
            f"{file.filename} has no meta/{name}. Write --{'pixel' if name == 'psize' else name}."
        )
    return file[f"meta/{name}"][()]


def _mask(file: Any, chunks: list[Any], known: KnownValues) -> NDArray[np.bool_] | None:
    """True where the weight is above 0 in every pattern."""
    if known.good or known.bad_images:
        return mask_of(file, file.filename, known)
    weights = [chunk["weights"] for chunk in chunks if "weights" in chunk and chunk["weights"].ndim == 3]
    if weights:
        counts = np.ones(weights[0].shape[1:], bool)
        for weight in weights:
            for number in range(len(weight)):
                counts &= weight[number] > 0
        return counts
    for name in ("meta/weight2d", "info/weight2d"):
        if name in file and getattr(file[name], "ndim", 0) == 2:
            return np.asarray(file[name][()] > 0)
    return None
