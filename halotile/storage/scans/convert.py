"""Scans written as Zarr groups: patterns in the order of a curve through the sample, so that a chunk holds neighbours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError, OutputRefused
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Region
from halotile.storage.run_directory.replacement import replacing
from halotile.storage.scans.counts import PatternCounts, blank_remarks
from halotile.storage.scans.formats import opened_scan
from halotile.storage.scans.framing import Framing, ShiftedPatterns, framed, shifted_scan
from halotile.storage.scans.hdf5 import reading
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.scan import MARK, MAXIMUM, MEAN, OPTIONAL, PATTERNS, SHARDS, VERSION, Scan
from halotile.storage.sharded.output import Layout, ShardWriter, create_metadata
from halotile.storage.sharded.ownership import stored_digest

CHUNK_BYTES, SHARD_BYTES = 2**20, 2**25
"""About the bytes of patterns that are decoded at once, and that one file has."""
MOST_LEFT_OUT = 0.9
"""Share of the pixels that a mask may leave out unless it is named."""
ORDER = 16
"""The curve has 2^16 steps along each axis."""


class PatternArray(Protocol):
    """Patterns, (positions, rows, columns), of which some are read at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all of them."""

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """The patterns of rising numbers, or of a slice of numbers; parts of them."""


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
        if not (known.good or known.bad) and found.scan.mask is not None:
            _check_mask(found.scan.mask, source)
        if not framing.corner:
            framing = replace(framing, center=framing.center or found.center)
        write_scan(
            path,
            found.scan,
            found.patterns,
            framing,
            overwrite=overwrite,
            remedy="--overwrite",
            leaves_negative_out=known.leaves_negative_out,
            source=source,
            report=report,
        )


def write_scan(
    path: str,
    scan: Scan,
    patterns: PatternArray,
    framing: Framing = Framing(),
    *,
    overwrite: bool = False,
    remedy: str = "overwrite=True",
    leaves_negative_out: bool = False,
    source: str = "",
    report: Callable[[int, int], None] = lambda done, count: None,
) -> None:
    """Write a scan as a Zarr group, with patterns that are read some at once; errors as of :func:`convert_scan`."""
    check = partial(check_place, path, overwrite=overwrite, key="the path", remedy=remedy)
    root = Path(path).absolute()
    if source:
        _check_apart(Path(source).resolve(), root.resolve())
    with replacing(root, check) as made:
        _write_group(made, scan, patterns, framing, leaves_negative_out, source or path, report)


def _check_mask(mask: NDArray[np.bool_], source: str) -> None:
    """Refuse a mask of the file that leaves out nearly all pixels."""
    if (left_out := 1 - mask.mean()) > MOST_LEFT_OUT:
        raise InputError(
            f"{source}: its mask leaves out {left_out:.0%} of the pixels, as an inverted one does. Name the mask: as --good-pixels where the pixels count in which it is not 0, else as --bad-pixels."
        )


def _check_apart(source: Path, target: Path) -> None:
    if source == target or source in target.parents or target in source.parents:
        raise OutputRefused(
            f"{target} and {source} are one, or one lies in the other: the recording would be gone. Write another path."
        )


def _write_group(
    part: Path,
    scan: Scan,
    patterns: PatternArray,
    framing: Framing,
    leaves_negative_out: bool,
    source: str,
    report: Callable[[int, int], None],
) -> None:
    if framing.corner:
        scan, patterns = shifted_scan(scan), ShiftedPatterns(patterns)
    kept = framed(scan, framing, patterns.shape)

    def copied(order: NDArray[np.int64]) -> tuple[PatternCounts, NDArray[np.float32]]:
        seen = PatternCounts(patterns.shape, scan.mask, framing, leaves_negative_out=leaves_negative_out)
        return seen, _write_patterns(part, patterns, seen, order, framing, source, report)

    order = along_curve(scan.positions)
    seen, maximum = copied(order)
    if len(blank := seen.blank()):
        # They are rare: only then is the scan copied twice.
        shutil.rmtree(part)
        order = order[~np.isin(order, blank)]
        seen, maximum = copied(order)
    full, negative = (framing.binned(pixels) > 0 for pixels in (seen.full, seen.negative))
    if (left_out := full | negative).any():
        good = ~left_out if kept.mask is None else kept.mask & ~left_out
        kept = replace(kept, mask=good, full=int(full.sum()))
    kept = replace(_in_order(kept, order), remarks=(*kept.remarks, *blank_remarks(blank), *seen.notes()))
    kept.check((len(order), *full.shape), source)
    _write_values(part, kept, source)
    mean = framing.binned(seen.sum) / len(order)
    _write_arrays(part, {MEAN: mean.astype(np.float32), MAXIMUM: maximum})


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
        "remarks": scan.remarks,
        "source": os.path.basename(source),
        SHARDS: stored_digest(part / PATTERNS).hex(),
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
    patterns: PatternArray,
    seen: PatternCounts,
    order: NDArray[np.int64],
    framing: Framing,
    source: str,
    report: Callable[[int, int], None],
) -> NDArray[np.float32]:
    """Write the patterns shard by shard, in the order of the curve, and return the maximum of each pixel."""
    count = len(order)
    rows, columns = framing.windows(*patterns.shape[1:])
    with reading(source):
        recorded = np.asarray(patterns[:1, rows, columns])
    if recorded.dtype.kind not in "uif":
        raise InputError(
            f"the patterns are {recorded.dtype.name}, which are no counts. Name an array of numbers: --patterns"
        )
    first = framing.binned(recorded)
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
    maximum = np.zeros(shape, np.float32)
    for start in range(0, count, shard):
        numbers = order[start : start + shard]
        rising = np.sort(numbers)
        with reading(source):
            read = np.asarray(patterns[rising, rows, columns])
        read = seen.cleaned(read, rising)
        pixels = framing.binned(read)[np.searchsorted(rising, numbers)]
        if dtype.kind in "ui" and pixels.max() > np.iinfo(dtype).max:
            raise InputError(
                f"a pattern has {pixels.max():,} counts in a pixel, and {np.iinfo(dtype).max:,} can be kept. Convert them to float32 before."
            )
        writer.write(Region((start, 0, 0), (start + len(numbers), *shape)), pixels.astype(dtype))
        maximum = np.maximum(maximum, pixels.max(0).astype(np.float32))
        report(start + len(numbers), count)
    return maximum


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which counts are kept."""
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype("uint32") if dtype.itemsize == 8 else dtype
