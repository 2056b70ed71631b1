"""A ptychographic scan in a Zarr group: patterns, positions and geometry."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.scans.hdf5 import dataset_in, reading
from halotile.storage.sharded.ownership import stored_digest

MARK = "halotile_scan"
"""Attribute of the group, with the version of this layout."""
VERSION = 1
PATTERNS = "patterns"
MEAN, MAXIMUM = "mean", "maximum"
"""Arrays for inspection: over all patterns."""
LENGTHS = {"wavelength": "energy", "distance": "distance", "pixel": "pixel"}
"""Options of `recon-cli convert` that give a length."""
SHORTEST, LONGEST = 1e-15, 1e-3
"""Wavelengths in metres beyond which nothing has one that diffracts."""
ARRAYS = {
    "positions": ("f", 2), "numbers": ("iu", 1), "mask": ("b", 2), "background": ("f", 2), "probe": ("c", 3), "intensities": ("f", 1)
}  # fmt: skip
"""Arrays besides the patterns: kinds of their types, and numbers of axes."""
OPTIONAL = tuple(ARRAYS)[2:]
VALUES = ("wavelength", "distance", "pixel", "angles", "full", "remarks")
"""Attributes with the other fields of a scan."""
SHARDS, DIGESTS = "shards", "arrays"
"""Attributes with the digest of the files of the patterns, and with those of the other arrays by their names."""


def digest_of_arrays(arrays: Mapping[str, NDArray[Any] | None], start: str = "") -> str:
    """Digest of values by their names."""
    found = hashlib.sha256(start.encode())
    for name, array in arrays.items():
        found.update(f"{name} {None if array is None else array.shape}".encode())
        found.update(b"" if array is None else array.tobytes())
    return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Scan:
    """Everything about a scan but its patterns."""

    wavelength: float  # wavelength, distance: of the light, and from the sample to the detector, in metres
    distance: float
    pixel: tuple[float, float]  # size of a pixel of the detector along rows and columns, in metres
    # place of the beam on the sample along rows and columns of the detector, in metres
    positions: NDArray[np.float64]
    numbers: NDArray[np.int64]  # number of each pattern in the file that it came from
    mask: NDArray[np.bool_] | None = None  # true where a pixel of the detector counts
    background: NDArray[np.float32] | None = None  # counts without a beam
    probe: NDArray[np.complex64] | None = None  # guess of the complex wave on the sample
    intensities: NDArray[np.float64] | None = None  # intensity of the beam at each position, relative to any
    # true where the pixels were given as angles, so that the distance is not known: it is 1 m, and the pixels are
    # their sizes there
    angles: bool = False
    # pixels that the mask leaves out since they reach the largest number of their type in a pattern
    full: int = 0
    # what a user should know of the patterns: a label and a text each
    remarks: tuple[tuple[str, str], ...] = ()

    def without_arrays(self) -> Scan:
        """Return the geometry alone."""
        no_places = np.empty((0, 2)), np.empty(0, np.int64)
        return Scan(self.wavelength, self.distance, self.pixel, *no_places, angles=self.angles)

    def digest(self) -> str:
        """Digest of every value."""
        start = json.dumps([self.wavelength, self.distance, self.pixel])
        return digest_of_arrays({name: getattr(self, name) for name in ARRAYS}, start)

    def check(self, shape: tuple[int, ...], path: str) -> None:
        """Refuse values that cannot be, for patterns of a shape (positions, rows, columns)."""
        lengths = {"wavelength": self.wavelength, "distance": self.distance, "pixel": min(self.pixel)}
        for name, length in lengths.items():
            if not 0 < length < np.inf:
                raise InputError(
                    f"{path}: the {name} is {length:g} m, which is no length. Give the right one: --{LENGTHS[name]}."
                )
        if not SHORTEST < self.wavelength < LONGEST:
            raise InputError(
                f"{path}: the wavelength is {self.wavelength:g} m, and that of photons and electrons is from 1 fm to 1 mm. Write the right one as --energy."
            )
        count, *pattern = shape
        expected = {"positions": [count, 2], "numbers": [count], "intensities": [count]}
        expected |= {"mask": pattern, "background": pattern}
        for name, wanted in expected.items():
            if (array := getattr(self, name)) is None:
                continue
            if list(array.shape) != wanted:
                raise InputError(
                    f"{path}: {name} has shape {list(array.shape)}, and {count:,} patterns of {pattern} need {wanted}."
                )
            if not np.isfinite(array).all():
                raise InputError(f"{path}: {name} has values that are not finite.")
        if self.probe is not None and self.probe.shape[-2:] != tuple(pattern):
            raise InputError(
                f"{path}: the probe has shape {list(self.probe.shape)}, and the patterns {pattern}. Leave it out: a guess is made."
            )
        if self.mask is not None and not self.mask.any():
            raise InputError(f"{path}: the mask leaves no pixel that counts.")
        if self.intensities is not None and not (self.intensities > 0).all():
            raise InputError(f"{path}: an intensity of the beam is not above 0.")
        if self.background is not None and (self.background < 0).any():
            raise InputError(f"{path}: the background has values below 0.")


def is_scan(path: str | Path) -> bool:
    """Return True for the group of a scan."""
    try:
        attributes = json.loads((Path(path) / "zarr.json").read_bytes()).get("attributes", {})
        return MARK in attributes
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def write_values(part: Path, scan: Scan, source: str, summary: Mapping[str, NDArray[Any]]) -> None:
    """Write everything of a scan into the group of its patterns, and the arrays for inspection."""
    import zarr

    attributes = {name: getattr(scan, name) for name in VALUES} | {"source": os.path.basename(source)}
    attributes |= {MARK: VERSION, SHARDS: stored_digest(part / PATTERNS).hex()}
    group = zarr.open_group(str(part), mode="a", attributes=attributes)
    for name, array in {**{name: getattr(scan, name) for name in ARRAYS}, **summary}.items():
        if array is not None:
            group.create_array(name, data=np.asarray(array))
    group.attrs[DIGESTS] = _digests_of(_arrays_in(group))


def _arrays_in(group: Any) -> dict[str, NDArray[Any]]:
    """Read every array of a scan but its patterns."""
    expected = ARRAYS | dict.fromkeys((MEAN, MAXIMUM), ("f", 2))
    found = {name: dataset_in(group, name, kinds=kind, ndim=n) for name, (kind, n) in expected.items()}
    return {name: array[:] for name, array in found.items() if array is not None}


def _digests_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Digest of each array: of its type, its shape and its values."""
    kinds = {name: f"{array.dtype.str} {array.shape}".encode() for name, array in arrays.items()}
    return {name: hashlib.sha256(kinds[name] + arrays[name].tobytes()).hexdigest() for name in arrays}


def _check_digests(arrays: Mapping[str, NDArray[Any]], expected: Any, path: str) -> None:
    """Refuse arrays other than those that were converted; older versions noted no digests."""
    if not isinstance(expected, Mapping):
        return
    found = _digests_of(arrays)
    if wrong := [name for name in {**expected, **found} if found.get(name) != expected.get(name)]:
        raise DamagedData(
            f"{path}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what the conversion wrote: files are lost, or something "
            "changed them. Restore them from a copy, or convert the scan again."
        )


def open_summary(path: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read the mean and the maximum of all patterns, (rows, columns) each; errors as of :func:`open_scan`."""
    import zarr

    _, patterns = open_scan(path)
    with reading(path):
        group = zarr.open_group(path, mode="r")
        found = [dataset_in(group, name, kinds="f") for name in (MEAN, MAXIMUM)]
        mean, maximum = (np.zeros(0, np.float32) if each is None else each[:] for each in found)
    if {mean.shape, maximum.shape} != {patterns.shape[1:]}:
        raise InputError(
            f"{path} is of an earlier halotile, which did not keep the mean of the patterns, or it is damaged. Convert it again."
        )
    return mean, maximum


def open_scan(path: str) -> tuple[Scan, Source]:
    """Open a scan and its patterns, (positions, rows, columns)."""
    import zarr

    if not is_scan(path):
        is_file = Path(path).is_file()
        source, target = (path, f"{Path(path).stem}.zarr") if is_file else ("scan.cxi", path)
        raise InputError(f"{path} is no scan in a Zarr. Make one of a file: recon-cli convert {source} {target}")
    with reading(path):
        group = zarr.open_group(path, mode="r")
        attributes: dict[str, Any] = dict(group.attrs)
        arrays = _arrays_in(group)
    if attributes[MARK] != VERSION:
        raise InputError(
            f"{path} is a scan of version {attributes[MARK]}, and this halotile reads {VERSION}. Convert it again."
        )
    _check_digests(arrays, attributes.get(DIGESTS), path)
    try:
        height, width = map(float, attributes["pixel"])
        scan = Scan(
            float(attributes["wavelength"]),
            float(attributes["distance"]),
            (height, width),
            angles=bool(attributes.get("angles")),
            full=int(attributes.get("full", 0)),
            remarks=tuple((str(label), str(text)) for label, text in attributes.get("remarks", ())),
            **{name: arrays[name] for name in ARRAYS if name in arrays},
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedData(f"{path}: its attributes are damaged. Convert the scan again.") from None
    folder = f"{path.rstrip('/')}/{PATTERNS}"
    patterns = open_source(folder)
    scan.check(patterns.shape, path)
    digest = stored_digest(folder, "or convert the scan again.").hex()
    if digest != attributes.get(SHARDS, digest):
        raise DamagedData(f"{folder} has files of another scan or another conversion. Convert it again.")
    return scan, patterns
