"""Scans in arrays that a user names: in HDF5 and Zarr, or in .npy, .csv and .txt files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.scans.hdf5 import check_there, dataset_in, opened, reading
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.scan import Scan

FILES = (".npy", ".csv", ".txt")


class StoredPatterns:
    """Patterns of positions in a row, or of a raster row by row: (rows of positions, columns of positions, rows, columns)."""

    def __init__(self, array: Any, *, last: bool = False) -> None:
        # last: the axes of the positions come after those of the patterns
        self.array, self.last = array, last
        self.raster = array.shape[2:] if last else array.shape[:-2]
        self.shape = (math.prod(self.raster), *(array.shape[:2] if last else array.shape[-2:]))

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """Parts of some patterns; of a raster the rectangle that has them is read."""
        chosen, *pixels = index
        numbers = np.arange(self.shape[0])[chosen]
        if len(self.raster) == 1:
            return self._read(getattr(self.array, "oindex", self.array), (numbers,), pixels)  # of Zarr
        places = np.stack(np.divmod(numbers, self.raster[1]))
        (top, left), (bottom, right) = places.min(1).tolist(), places.max(1).tolist()
        block = self._read(self.array, (slice(top, bottom + 1), slice(left, right + 1)), pixels)
        return block[places[0] - top, places[1] - left]

    def _read(self, array: Any, places: tuple[Any, ...], pixels: list[slice]) -> NDArray[Any]:
        if not self.last:
            return np.asarray(array[(*places, *pixels)])
        return np.moveaxis(np.asarray(array[(*pixels, *places)]), (0, 1), (-2, -1))

    def remarks(self) -> list[tuple[str, str]]:
        """Say which axes of a raster were taken for what, and where they may be others."""
        if len(self.raster) != 2:
            return []
        where = "last" if self.last else "first"
        said = f"{_by(self.raster)} positions, the {where} two axes of {_by(self.array.shape)}"
        note = (
            "there are more rows and columns of positions than of pixels. Where the file has the pixels first and then the positions, "
            "write --positions-last"
        )
        is_odd = not self.last and self.shape[1] < self.raster[0] and self.shape[2] < self.raster[1]
        return [("raster", said), *([("note", note)] if is_odd else [])]


def _by(lengths: tuple[int, ...]) -> str:
    return " × ".join(map(str, lengths))


def read_named(container: Any, path: str, known: KnownValues) -> tuple[Scan, StoredPatterns]:
    """Read a scan whose arrays are named; ``container`` has the datasets, or is itself the patterns."""
    stored = container
    if not hasattr(container, "shape"):
        stored = _dataset(container, path, known.patterns, "--patterns")
    if stored.dtype.kind not in "iuf":
        raise InputError(
            f"{path}: the patterns are {stored.dtype}, which are not counts. Name an array of numbers: --patterns"
        )
    if len(stored.shape) not in (3, 4):
        raise InputError(
            f"{path}: the patterns have shape {list(stored.shape)}, and a scan has (positions, rows, columns), or a raster of such."
        )
    patterns = StoredPatterns(stored, last=known.positions_last)
    _check_given(path, known)
    scan = Scan(
        known.wavelength or 0.0,
        known.distance or 0.0,
        known.pixel or (0.0, 0.0),
        _positions(container, path, known, patterns),
        np.arange(patterns.shape[0]),
        mask=known.without_pixels(mask_of(container, path, known), patterns.shape[1:]),
        angles=known.angles,
        remarks=tuple(patterns.remarks()),
    )
    scan.check(patterns.shape, path)
    return scan, patterns


def mask_of(container: Any, path: str, known: KnownValues) -> NDArray[np.bool_] | None:
    """The mask of the images that are named, True where a pixel counts; None where there is none."""
    named = [(known.good, True), *((name, False) for name in known.bad_images)]
    masks = [(small_array(container, path, name) != 0) == good for name, good in named if name is not None]
    return np.asarray(np.logical_and.reduce(masks)) if masks else None


@contextmanager
def container_of(path: str) -> Iterator[Any]:
    """Open a file that holds arrays, or the patterns alone."""
    check_there(path)
    if path.endswith(".npy"):
        with reading(path):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        yield array
    elif Path(path).is_dir():
        import zarr

        try:
            found: Any = zarr.open(path, mode="r")
        except Exception as error:
            raise InputError(f"{path} is no Zarr: {error}.") from error
        yield found
    else:
        with opened(path) as file:
            yield file


def _positions(container: Any, path: str, known: KnownValues, patterns: StoredPatterns) -> NDArray[np.float64]:
    if known.positions is None:
        if len(patterns.raster) != 2 or known.step is None:
            what = "--step, or --positions" if len(patterns.raster) == 2 else "--positions"
            raise ConfigError(f"{path}: nothing says where the beam was. Write {what}.")
        return known.placed(np.indices(patterns.raster).reshape(2, -1).T * known.step / known.unit)
    if known.step is not None:
        raise ConfigError(f"{path}: --positions and --step both say where the beam was. Leave one of them out.")
    parts = [small_array(container, path, name.strip()) for name in known.positions.split(",")]
    if len(parts) == 1 and parts[0].ndim == 2 and parts[0].shape[1] in (2, 3):
        return known.placed(parts[0])
    if len(parts) == 2 and parts[0].size == parts[1].size:
        return known.placed(np.stack([part.reshape(-1) for part in parts], 1))
    shapes = " and ".join(str(list(part.shape)) for part in parts)
    raise InputError(
        f"{path}: the positions have shape {shapes}. Name an array of (positions, 2), or two arrays with a comma between their names."
    )


def small_array(container: Any, path: str, name: str) -> NDArray[Any]:
    """An array that is small, of this file or of one of its own."""
    if name.endswith(FILES) and not (hasattr(container, "keys") and name in container):
        try:
            delimiter = "," if name.endswith(".csv") else None
            load = np.load if name.endswith(".npy") else partial(np.loadtxt, delimiter=delimiter)
            array = np.asarray(load(name))
        except Exception as error:
            raise InputError(f"{name} cannot be read: {error}.") from error
    else:
        array = np.asarray(_dataset(container, path, name, "the name")[...])
    if array.dtype.kind not in "biufc":
        raise InputError(f"{path}: {name} is of type {array.dtype}. Name an array of numbers.")
    return array


def _dataset(container: Any, path: str, name: str | None, option: str) -> Any:
    """A dataset of a file by its name."""
    if not hasattr(container, "keys"):
        raise ConfigError(
            f"{path} has one array, and {name} is none of it. Write the path of a file that ends with {', '.join(FILES)}."
        )
    found = None if name is None else dataset_in(container, name, kinds="")
    if found is None:
        what = f"{path} is no CXI file" if name is None else f"{path} has no dataset {name}"
        raise ConfigError(
            f"{what}. Write for {option} one of {', '.join(_names(container)) or 'its datasets: it has none'}."
        )
    return found


def _names(container: Any) -> list[str]:
    """Names of all datasets, as far as they fit into a message."""
    found: list[str] = []
    if hasattr(container, "visititems"):
        container.visititems(lambda name, item: found.append(name) if hasattr(item, "shape") else None)
    else:
        found = [str(name) for name, _ in container.arrays()]
    return found if len(found) <= 20 else [*found[:20], "..."]


def _check_given(path: str, known: KnownValues) -> None:
    given = {"--energy": known.wavelength, "--distance": known.distance, "--pixel": known.pixel}
    if missing := [option for option, value in given.items() if value is None]:
        raise ConfigError(f"{path} does not say the geometry of the scan. Write {', '.join(missing)}.")
