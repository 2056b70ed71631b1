"""Scans written as Zarr groups: patterns in the order of a curve through the sample, so that a chunk holds neighbours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.place import ZARR_FILES, check_path, check_place
from halotile.storage.grid import Region
from halotile.storage.scans.formats import opened_scan
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.scan import MARK, MAXIMUM, MEAN, OPTIONAL, PATTERNS, VERSION, Scan
from halotile.storage.sharded.output import Layout, ShardWriter, create_metadata

CHUNK_BYTES, SHARD_BYTES = 2**20, 2**25
"""About the bytes of patterns that are decoded at once, and that one file has."""
MOST_COUNTS = 2**32 - 1
"""No detector counts as far; some write it where they have no count."""
ORDER = 16
"""The curve has 2^16 steps along each axis."""


class PatternArray(Protocol):
    """Patterns, (positions, rows, columns), of which some are read at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all of them."""

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """The patterns of rising numbers, or of a slice of numbers; parts of them."""


@dataclass(frozen=True)
class Framing:
    """The part of each pattern that is kept.

    Parameters
    ----------
    crop : int, optional
        Edge of a square around the centre.
    center : tuple of int, optional
        The pixel of the beam without a sample; None: the middle.
    binning : int
        Pixels along each axis whose counts are added.
    """

    crop: int | None = None
    center: tuple[int, int] | None = None
    binning: int = 1

    def windows(self, rows: int, columns: int) -> tuple[slice, slice]:
        """The rows and columns that are kept.

        Raises
        ------
        ConfigError
            When they are not inside the pattern, or the binning does not divide them.
        """
        if self.binning < 1:
            raise ConfigError(f"--bin is {self.binning}. Write 1 or more.")
        center = self.center or (rows // 2, columns // 2)
        kept = []
        for length, middle in zip((rows, columns), center, strict=True):
            around = 2 * min(middle, length - middle) if self.center else length
            edge = self.crop or around or length
            start = middle - edge // 2
            if not (edge > 0 and start >= 0 and start + edge <= length):
                raise ConfigError(
                    f"a crop of {edge} around pixel {middle} leaves the pattern of {length}. Write a smaller --crop."
                )
            if edge % self.binning:
                raise ConfigError(
                    f"--bin is {self.binning}, which does not divide the {edge} pixels that are kept. Write --crop {edge // self.binning * self.binning}."
                )
            kept.append(slice(start, start + edge))
        return kept[0], kept[1]

    def binned(self, images: NDArray[Any]) -> NDArray[Any]:
        """Images, (..., rows, columns), with the pixels of each bin added."""
        if self.binning == 1:
            return images
        *leading, rows, columns = images.shape
        bins = images.reshape(
            *leading, rows // self.binning, self.binning, columns // self.binning, self.binning
        )
        wide = np.float32 if images.dtype.kind == "f" else np.uint32
        return np.asarray(bins.sum((-3, -1)), wide)


def convert_scan(
    source: str,
    path: str,
    framing: Framing = Framing(),
    known: KnownValues = KnownValues(),
    *,
    overwrite: bool = False,
    report: Callable[[int, int], None] = lambda done, count: None,
) -> None:
    """Write the scan in a file as a Zarr group, which is there as a whole or not at all.

    Raises
    ------
    InputError
        When the file has no scan, or patterns that are negative or NaN.
    OutputRefused
        When something is at the path.
    """
    with opened_scan(source, known) as found:
        framing = replace(framing, center=framing.center or found.center)
        write_scan(
            path, found.scan, found.patterns, framing, overwrite=overwrite, source=source, report=report
        )


def write_scan(
    path: str,
    scan: Scan,
    patterns: PatternArray,
    framing: Framing = Framing(),
    *,
    overwrite: bool = False,
    source: str = "",
    report: Callable[[int, int], None] = lambda done, count: None,
) -> None:
    """Write a scan as a Zarr group, with patterns that are read some at once; errors as of :func:`convert_scan`."""
    check_path(path, "the path")
    check_place(path, overwrite=overwrite)
    root = Path(path).absolute()
    part = root.with_name(f".{root.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    order = along_curve(scan.positions)
    kept = _in_order(framed(scan, framing, patterns.shape), order)
    seen, full = _write_patterns(part, patterns, scan.mask, order, framing, report)
    if full.any():
        kept = replace(kept, mask=~full if kept.mask is None else kept.mask & ~full, full=int(full.sum()))
    kept.check((len(order), *full.shape), source or path)
    _write_values(part, kept, source)
    _write_arrays(part, seen)
    for written in part.rglob("*"):
        if written.is_file():
            DISK.sync(written)
    if root.exists():
        DISK.remove_tree(root, last=ZARR_FILES)
    DISK.move(part, root)


def framed(scan: Scan, framing: Framing, shape: tuple[int, ...]) -> Scan:
    """The scan with its images as they are kept, and pixels of the detector as large as a bin."""
    rows, columns = framing.windows(*shape[1:])
    height, width = scan.pixel
    bins = framing.binning
    good = None if scan.mask is None else framing.binned(~scan.mask[rows, columns]) == 0
    dark = None if scan.background is None else framing.binned(scan.background[rows, columns])
    return replace(scan, pixel=(bins * height, bins * width), mask=good, background=dark, probe=None)


def along_curve(positions: NDArray[np.float64]) -> NDArray[np.int64]:
    """The order of positions along a Hilbert curve, whose neighbours are neighbours on the sample.

    References
    ----------
    D. Hilbert, Über die stetige Abbildung einer Linie auf ein Flächenstück, Mathematische Annalen 38 (1891) 459.

    Examples
    --------
    >>> along_curve(np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])).tolist()
    [0, 2, 1, 3]
    """
    span = max(np.ptp(positions, axis=0).max(), np.finfo(float).tiny)
    x, y = ((positions - positions.min(0)) / span * (2**ORDER - 1)).astype(np.int64).T
    number = np.zeros(len(positions), np.int64)
    for side in (1 << bit for bit in reversed(range(ORDER))):
        right, upper = (x & side) > 0, (y & side) > 0
        number += side * side * ((3 * right) ^ upper)
        x, y = x & (side - 1), y & (side - 1)
        mirrored = right & ~upper
        x, y = np.where(mirrored, side - 1 - x, x), np.where(mirrored, side - 1 - y, y)
        x, y = np.where(upper, x, y), np.where(upper, y, x)
    return np.argsort(number, kind="stable")


def _in_order(scan: Scan, order: NDArray[np.int64]) -> Scan:
    intensities = None if scan.intensities is None else scan.intensities[order]
    return replace(
        scan, positions=scan.positions[order], numbers=scan.numbers[order], intensities=intensities
    )


def _write_values(part: Path, scan: Scan, source: str) -> None:
    import zarr

    attributes = {
        MARK: VERSION,
        "wavelength": scan.wavelength,
        "distance": scan.distance,
        "pixel": scan.pixel,
        "angles": scan.angles,
        "full": scan.full,
        "source": os.path.basename(source),
    }
    zarr.open_group(str(part), mode="a", attributes=attributes)
    _write_arrays(part, {name: getattr(scan, name) for name in ("positions", "numbers", *OPTIONAL)})


def _write_arrays(part: Path, arrays: Mapping[str, NDArray[Any] | None]) -> None:
    import zarr

    group = zarr.open_group(str(part), mode="r+")
    for name, array in arrays.items():
        if array is not None:
            group.create_array(name, data=np.asarray(array))


def _write_patterns(
    part: Path,
    patterns: Any,
    mask: NDArray[np.bool_] | None,
    order: NDArray[np.int64],
    framing: Framing,
    report: Callable[[int, int], None],
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Write the patterns shard by shard, in the order of the curve, 0 for no counts that the mask leaves out.

    Returns
    -------
    summary : dict of str to ndarray
        Their mean and their maximum.
    full : ndarray of bool, (rows, columns)
        True where a pixel that the mask does not leave out has the largest number of its type in a pattern: a gap of the detector, or saturated.
    """
    count = len(order)
    rows, columns = framing.windows(*patterns.shape[1:])
    raw = np.asarray(patterns[:1, rows, columns])
    largest = min(np.iinfo(raw.dtype).max if raw.dtype.kind in "iu" else MOST_COUNTS, MOST_COUNTS)
    first = framing.binned(raw)
    dtype = _stored(first.dtype)
    shape = first.shape[1:]
    size = first[0].size * dtype.itemsize
    chunk = max(1, min(count, CHUNK_BYTES // size))
    shard = chunk * max(1, min(-(-count // chunk), SHARD_BYTES // (size * chunk)))
    layout = Layout(
        (count, *shape), dtype.name, (shard, *shape), (chunk, *shape), "lz4", ("n", "y", "x"), (1.0,) * 3, (None,) * 3, ome=False
    )  # fmt: skip
    create_metadata(part / PATTERNS, layout)
    writer = ShardWriter(part / PATTERNS, layout)
    total, maximum, full = np.zeros(shape), np.zeros(shape, np.float32), np.zeros(shape, bool)
    for start in range(0, count, shard):
        numbers = order[start : start + shard]
        rising = np.sort(numbers)
        read = np.asarray(patterns[rising, rows, columns])
        at_most = read >= largest
        if at_most.any():
            counting = np.ones(at_most.shape[1:], bool) if mask is None else mask[rows, columns]
            full |= framing.binned(np.logical_and(at_most.any(0), counting)) > 0
            read = np.where(at_most, read.dtype.type(0), read)
        wrong = ~(np.isfinite(read) & (read >= 0))
        if mask is not None and wrong.any():  # detectors mark bad pixels with -1 or NaN
            read = np.where(wrong & ~mask[rows, columns], read.dtype.type(0), read)
            wrong &= mask[rows, columns]
        pixels = framing.binned(read)[np.searchsorted(rising, numbers)]
        if wrong.any():
            raise InputError(
                "a pattern has negative pixels or NaN, which are no counts. Take out the offset, or mark these pixels in the mask."
            )
        writer.write(Region((start, 0, 0), (start + len(numbers), *shape)), pixels.astype(dtype))
        total += pixels.sum(0, dtype=np.float64)
        maximum = np.maximum(maximum, pixels.max(0).astype(np.float32))
        report(start + len(numbers), count)
    return {MEAN: (total / count).astype(np.float32), MAXIMUM: maximum}, full


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which counts are kept."""
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype("uint32") if dtype.itemsize == 8 else dtype
