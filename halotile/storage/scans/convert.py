"""Scans written as Zarr groups: the part of each pattern that is kept, and patterns along a curve through the sample, so that a chunk holds neighbours."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation, label, minimum_filter

from halotile.errors import ConfigError, InputError
from halotile.storage.disk.place import check_apart, check_place
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import replacing
from halotile.storage.scans.formats import opened_scan
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.scan import MAXIMUM, MEAN, PATTERNS, Scan, reading, write_values
from halotile.storage.sharded.output import Layout, ShardWriter, create_metadata


@dataclass(frozen=True)
class Framing:
    """The part of each pattern that is kept."""

    crop: int | None = None  # edge of a square around the centre
    center: tuple[int, int] | None = None  # pixel of the beam without a sample; None: the middle
    binning: int = 1  # pixels along each axis whose counts are added
    # true where the beam is at the first pixel, as a Fourier transform leaves it: it is moved to the middle
    corner: bool = False

    def windows(self, rows: int, columns: int) -> tuple[slice, slice]:
        """The rows and columns that are kept."""
        if self.binning < 1:
            raise ConfigError(f"--bin is {self.binning}. Write 1 or more.")
        if self.corner and self.center:
            raise ConfigError("--corner and --center both say where the beam is. Leave one of them out.")
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

    def in_file(self, places: NDArray[np.int64], rows: int, columns: int) -> NDArray[np.int64]:
        """Rows and columns, (places, 2), in the patterns of the file, of places in what is kept before it is binned.

        >>> Framing(corner=True).in_file(np.array([[4, 4], [0, 0]]), 8, 8).tolist()
        [[0, 0], [4, 4]]
        """
        shape = np.array([rows, columns])
        whole = places + [window.start for window in self.windows(rows, columns)]
        return np.asarray((whole - shape // 2) % shape if self.corner else whole)

    def binned(self, images: NDArray[Any]) -> NDArray[Any]:
        """Images, (..., rows, columns), with the pixels of each bin added."""
        if self.binning == 1:
            return images
        *leading, rows, columns = images.shape
        size = self.binning
        bins = images.reshape(*leading, rows // size, size, columns // size, size)
        wide = np.float32 if images.dtype.kind == "f" else np.uint64
        return np.asarray(bins.sum((-3, -1)), wide)


class ShiftedPatterns:
    """Patterns, (positions, rows, columns), whose first pixel is moved to the middle."""

    def __init__(self, patterns: Any) -> None:
        self.patterns = patterns
        self.shape: tuple[int, ...] = patterns.shape

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """Parts of some patterns."""
        chosen, rows, columns = index
        return _shifted(np.asarray(self.patterns[chosen, :, :]))[:, rows, columns]


def shifted_scan(scan: Scan) -> Scan:
    """The scan with the first pixel of its images moved to the middle."""
    mask, dark = (None if image is None else _shifted(image) for image in (scan.mask, scan.background))
    return replace(scan, mask=mask, background=dark)


def _shifted(images: NDArray[Any]) -> NDArray[Any]:
    return np.fft.fftshift(images, (-2, -1))


def framed(scan: Scan, framing: Framing, shape: tuple[int, ...]) -> Scan:
    """The scan with its images as they are kept, and pixels of the detector as large as a bin."""
    rows, columns = framing.windows(*shape[1:])
    height, width = scan.pixel
    bins = framing.binning
    good = None if scan.mask is None else framing.binned(~scan.mask[rows, columns]) == 0
    dark = None if scan.background is None else framing.binned(scan.background[rows, columns])
    if scan.probe is not None and framing != Framing():
        raise ConfigError(
            "--probe has the pixels of whole patterns. Leave --crop, --center, --bin and --corner out; or leave --probe out, and the probe is guessed."
        )
    return replace(scan, pixel=(bins * height, bins * width), mask=good, background=dark)


# The largest number of 32 bits: no detector counts as far, and some write it where they have no count.
MOST_COUNTS = 2**32 - 1
BRIGHT = 100  # counts, of a pattern in the median or all around a pixel, beside which none are 0 by chance
DARK = 1e-3  # counts of a blank pattern at most, relative to the median: dark counts while the shutter is closed
SPREAD = 3  # ratio of the counts of bright and of faint patterns from which the beam may have varied

LOOKED_AT = 8  # patterns of those read at once that are searched for hot pixels; a scan of fewer is not
# A hot pixel is so many times above its neighbours, in this share of the patterns, and farther than so many pixels from
# the middle.
FAR_ABOVE, NEARLY_ALL, BEAM = 10, 0.9, 2
# The light is in the corners where they have so many times that of the middle, and its centre is as near to the first
# pixel, in edges of a corner.
CORNERS, NEAR_FIRST = 3, 0.25
# Pixels are saturated at MANY counts or more, where more than PILED of a pattern have the largest count, and more than
# half of those from NEAR times that.
NEAR, PILED, MANY = 0.99, 3, 500
AROUND = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]])  # the eight neighbours of a pixel
MANY_LEFT_OUT = 0.5  # share of the pixels that a mask leaves out from which it may be an inverted one
MOST_NAMED = 10  # patterns or pixels, at most, that are named in a line


Indices = NDArray[np.int64]
Reporter = Callable[[int, int], None]  # called with the numbers of patterns that are done and of all


class PatternCounts:
    """Everything that is found in patterns, (positions, rows, columns), which are read some at a time."""

    def __init__(
        self, shape: tuple[int, ...], mask: NDArray[np.bool_] | None, framing: Framing, *, negative: bool = False
    ) -> None:
        # negative: pixels that are negative or NaN in a pattern do not count; else they are refused
        self.framing, self.shape, self.leaves_negative_out = framing, shape, negative
        counting = np.ones(shape[1:], bool) if mask is None else mask
        self.counting = counting[framing.windows(*shape[1:])]
        # true where a pixel that counts has the largest number of its type in a pattern: a gap of the
        # detector, or saturated
        self.full = np.zeros(self.counting.shape, bool)
        # true where a pixel that counts is negative or NaN in a pattern
        self.negative = np.zeros(self.counting.shape, bool)
        self.sum = np.zeros(self.counting.shape)
        self.totals = np.full(shape[0], np.nan)  # counts of each pattern; NaN for one that was not read
        # the smallest count above 0: about one of a detector, in the unit of the patterns
        self.least = np.inf
        self.peak = np.zeros(self.counting.shape)  # the largest count of each pixel that counts
        self.piled = (0.0, 0)  # the largest of them, and the pixels that have it in one pattern
        # patterns in which a pixel is far above all around it, of the sampled ones
        self.alone, self.looked_at = np.zeros(self.counting.shape, np.int64), 0

    def cleaned(self, read: NDArray[Any], numbers: Indices) -> NDArray[Any]:
        """Patterns of these numbers, with 0 for what is no count."""
        zero = read.dtype.type(0)
        at_most = _at_most(read)
        if at_most.any():
            self.full |= at_most.any(0) & self.counting
            read = np.where(at_most, zero, read)
        wrong = ~(np.isfinite(read) & (read >= 0))
        if wrong.any():  # detectors mark bad pixels with -1 or NaN
            wrong_counts = wrong & self.counting
            if wrong_counts.any() and not self.leaves_negative_out:
                raise self._negative_error(read, wrong_counts, numbers)
            self.negative |= wrong_counts.any(0)
            read = np.where(wrong, zero, read)
        self.sum += read.sum(0, dtype=np.float64)
        self.totals[numbers] = np.where(self.counting, read, zero).sum((1, 2), dtype=np.float64)
        if (positive := read[read > 0]).size:
            self.least = min(self.least, float(positive.min()))
        lit = np.where(self.counting, read, zero)
        self.peak = np.maximum(self.peak, lit.max(0))
        self.piled = max(self.piled, (float(lit.max()), int((lit == lit.max()).sum((1, 2)).max())))
        some = read[np.linspace(0, len(read) - 1, min(len(read), LOOKED_AT)).astype(int)]
        self.alone += _alone(np.where(self.counting, some, zero)).sum(0)
        self.looked_at += len(some)
        return read

    def _negative_error(self, read: NDArray[Any], wrong: NDArray[np.bool_], numbers: Indices) -> InputError:
        """Say which pixels are no counts, and what to write."""
        first = np.argwhere(wrong)[0]
        row, column = self.framing.in_file(first[None, 1:], *self.shape[1:])[0]
        places, patterns = int(wrong.any(0).sum()), int(wrong.any((1, 2)).sum())
        advice = (
            ". If a dark image was subtracted, store the counts from before that, or 0 in place of negative values; "
            "bad pixels are left out of all patterns with --bad-pixels negative"
        )
        if int(wrong.sum()) == places * len(read):
            advice = ", and the same in each pattern, as gaps and bad pixels are. Leave them out: --bad-pixels negative"
        return InputError(
            f"{places:,} of the pixels {'is' if places == 1 else 'are'} negative or NaN in {patterns:,} of {len(read):,} patterns: the first one is "
            f"{read[tuple(first)]:g} in pattern {numbers[first[0]]}, row {row}, column {column}. These negative pixels or NaN are no counts{advice}"
        )

    def blank(self) -> Indices:
        """Indices of the patterns with next to no count where others have many: the shutter was closed."""
        lit = self.totals[self.totals > 0]
        if not lit.size or np.median(lit) < BRIGHT * self.least:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.totals <= DARK * np.median(lit))

    def hot(self) -> Indices:
        """Rows and columns of the file, (pixels, 2), of what is far above its neighbours in nearly every pattern; not near the middle, where the beam may be."""
        middle: Indices = np.reshape(self.alone.shape, (2, 1, 1)) // 2
        away = np.abs(np.indices(self.alone.shape) - middle).max(0)
        is_hot = self.looked_at >= LOOKED_AT and self.alone >= NEARLY_ALL * self.looked_at
        return self._in_file(is_hot & (away > BEAM))

    def dead(self) -> Indices:
        """Pixels that never count although all pixels around them do."""
        least = minimum_filter(self.sum, footprint=AROUND, mode="constant")
        known = self.counting & ~self.full & ~self.negative
        return self._in_file((self.sum == 0) & known & (least >= BRIGHT * self.least))

    def saturated(self) -> Indices:
        """Pixels at the largest count, where more pixels have it than nearly as much: no light does that."""
        most, together = self.piled
        at_most, near = self.peak == most, self.peak >= NEAR * most
        is_cut = most >= MANY and together > PILED and 2 * at_most.sum() > near.sum()
        return self._in_file(at_most & is_cut)

    def stop(self) -> Indices:
        """Pixels around the middle that never count although their neighbours do."""
        regions, _ = label(self.sum == 0)
        number = regions[tuple(n // 2 for n in regions.shape)]
        region = (regions == number) & self.counting & (number > 0)
        beside = binary_dilation(region) & ~region & self.counting
        is_stop = region.sum() > 1 and beside.any() and np.median(self.sum[beside]) >= BRIGHT * self.least
        return self._in_file(region & is_stop)

    def _in_file(self, chosen: NDArray[np.bool_]) -> Indices:
        return np.unique(self.framing.in_file(np.argwhere(chosen), *self.shape[1:]), axis=0)

    def notes(self) -> list[tuple[str, str]]:
        """Say what is most likely wrong with the patterns."""
        found = []
        if is_in_corners(np.where(self.counting, self.sum, 0)):
            found.append(
                "the light is in the four corners of the patterns, as a Fourier transform leaves it. The far field needs the beam in their middle: write --corner"
            )
        hot = f"more than {FAR_ABOVE} times as bright as all around in nearly every pattern, as hot ones are"
        most = f"{self.peak.max():,.0f} counts in some pattern, and none more, as saturated ones do"
        kinds = (
            (self.hot(), "a pixel is", "pixels are", hot),
            (self.dead(), "a pixel that never counts is", "pixels that never count are", "in the midst of light, as dead ones are"),
            (self.saturated(), "a pixel has", "pixels have", most),
            (self.stop(), "a pixel", "pixels", "in the middle never count, in the midst of light, as behind a beam stop"),
        )  # fmt: skip
        for pixels, one, several, text in kinds:
            if len(pixels):
                found.append(f"{one if len(pixels) == 1 else f'{len(pixels):,} {several}'} {text}")
        if len(bad := np.concatenate([pixels for pixels, *_ in kinds])):
            places = " ".join(f"{row},{column}" for row, column in bad[:MOST_NAMED])
            remedy = f"name an image of them as --bad-pixels; the first ones are {places}"
            remedy = f'--bad-pixels "{places}"' if len(bad) <= MOST_NAMED else remedy
            found[-1] += f". Leave {'it' if len(bad) == 1 else 'them'} out: {remedy}"
        if (left_out := 1 - self.counting.mean()) >= MANY_LEFT_OUT:
            found.append(
                f"the mask leaves out {left_out:.0%} of the pixels. If the mask is inverted, name it as --good-pixels instead of --bad-pixels, or as --bad-pixels instead of --good-pixels"
            )
        few, many = np.nanpercentile(np.delete(self.totals, self.blank()), (5, 95))
        if many > SPREAD * few > 0:
            found.append(
                f"one in twenty patterns has less than {few:.3g} counts, and one in twenty more than {many:.3g}. Where the beam varied, write intensities into model.refine"
            )
        return [("note", text) for text in found]


def is_in_corners(image: NDArray[Any]) -> bool:
    """Return True where an image has its light around its first pixel, which is in all four corners, and little in its middle.

    >>> disc = np.hypot(*np.indices((32, 32)) - 16) < 6
    >>> is_in_corners(disc), is_in_corners(np.fft.ifftshift(disc))
    (False, True)
    """
    height, width = (length // 4 for length in image.shape)
    if not height or not width:
        return False
    middle = np.sum(image[height:-height, width:-width])
    # The corners side by side, with the first pixel in their middle.
    corners = np.roll(image, (height, width), (0, 1))[: 2 * height, : 2 * width]
    if not np.sum(corners) > CORNERS * middle:
        return False
    centre = [np.average(places, weights=corners) for places in np.indices(corners.shape)]
    edges = np.array([height, width])
    return bool((np.abs(centre - edges) <= NEAR_FIRST * edges).all())


def _alone(images: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a pixel is far above its eight neighbours; those beyond an edge are at the other one, as in a Fourier transform."""
    light = images.astype(np.float32)
    beside = np.maximum(np.roll(light, 1, -1), np.roll(light, -1, -1))
    row = np.maximum(beside, light)
    around = np.maximum(beside, np.maximum(np.roll(row, 1, -2), np.roll(row, -1, -2)))
    return np.asarray(light > FAR_ABOVE * around)


def blank_remarks(blank: Indices) -> list[tuple[str, str]]:
    """Say which patterns are left out.

    >>> blank_remarks(np.array([10, 77]))
    [('left out', '2 blank patterns, in which next to nothing was counted: numbers 10, 77 of the file')]
    """
    if not len(blank):
        return []
    one = len(blank) == 1
    what = f"{len(blank):,} blank pattern{'' if one else 's'}, in which next to nothing was counted"
    named = ", ".join(map(str, blank[:MOST_NAMED]))
    more = f" and {len(blank) - MOST_NAMED:,} more" if len(blank) > MOST_NAMED else ""
    return [("left out", f"{what}: number{'' if one else 's'} {named}{more} of the file")]


def _at_most(read: NDArray[Any]) -> NDArray[np.bool_]:
    """True where integers have the largest number of their type, and where floats are infinite or have that of an integer of 32 bits."""
    if read.dtype.kind in "iu":
        return np.asarray(read >= min(np.iinfo(read.dtype).max, MOST_COUNTS))
    # A float of 32 bits has no place between these two.
    flags = np.array([MOST_COUNTS, MOST_COUNTS + 1]).astype(np.result_type(read.dtype, np.float32))
    return np.asarray(np.isin(read, flags) | (read > np.finfo(np.float32).max))


CHUNK_BYTES, SHARD_BYTES = 2**20, 2**25  # about the bytes of patterns that are decoded at once, and that one file has
MOST_LEFT_OUT = 0.9  # share of the pixels that a mask may leave out unless it is named
ORDER = 16  # the curve has 2^16 steps along each axis


class PatternArray(Protocol):
    """Patterns, (positions, rows, columns); some are read at once."""

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
    report: Reporter = lambda done, count: None,
) -> None:
    """Write the scan in a file as a Zarr group, which is there as a whole or not at all."""
    with opened_scan(source, known) as found:
        if not (known.good or known.bad) and found.scan.mask is not None:
            _check_mask(found.scan.mask, source)
        if not framing.corner:
            framing = replace(framing, center=framing.center or found.center)
        options: Any = {"overwrite": overwrite, "remedy": "--overwrite", "source": source, "report": report}
        negative = known.leaves_negative_out
        write_scan(path, found.scan, found.patterns, framing, leaves_negative_out=negative, **options)


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
    report: Reporter = lambda done, count: None,
) -> None:
    """Write a scan as a Zarr group, with patterns that are read some at once; errors as of :func:`convert_scan`."""
    check = partial(check_place, path, overwrite=overwrite, key="the path", remedy=remedy)
    root = Path(path).absolute()
    if source:
        check_apart(Path(source), root, "the path")
    with replacing(root, check) as made:
        _write_group(made, scan, patterns, framing, leaves_negative_out, source or path, report)


def _check_mask(mask: NDArray[np.bool_], source: str) -> None:
    """Refuse a mask of the file that leaves out nearly all pixels."""
    if (left_out := 1 - mask.mean()) > MOST_LEFT_OUT:
        raise InputError(
            f"{source}: its mask leaves out {left_out:.0%} of the pixels, as an inverted one does. Name the mask as --good-pixels if it is not 0 in valid pixels, otherwise as --bad-pixels."
        )


def _write_group(
    part: Path, scan: Scan, patterns: PatternArray, framing: Framing, negative: bool, source: str, report: Reporter
) -> None:

    if framing.corner:
        scan, patterns = shifted_scan(scan), ShiftedPatterns(patterns)
    kept = framed(scan, framing, patterns.shape)

    def copied(order: Indices) -> tuple[PatternCounts, NDArray[np.float32]]:
        seen = PatternCounts(patterns.shape, scan.mask, framing, negative=negative)
        return seen, _write_patterns(part, patterns, seen, order, source, report)

    order = along_curve(scan.positions)
    seen, maximum = copied(order)
    if len(blank := seen.blank()):
        # They are rare: only then is the scan copied twice.
        shutil.rmtree(part)
        order = order[~np.isin(order, blank)]
        seen, maximum = copied(order)
    full, negative_pixels = (framing.binned(pixels) > 0 for pixels in (seen.full, seen.negative))
    if (left_out := full | negative_pixels).any():
        good = ~left_out if kept.mask is None else kept.mask & ~left_out
        kept = replace(kept, mask=good, full=int(full.sum()))
    intensities = None if kept.intensities is None else kept.intensities[order]
    remarks = (*kept.remarks, *blank_remarks(blank), *seen.notes())
    kept = replace(kept, positions=kept.positions[order], numbers=kept.numbers[order])
    kept = replace(kept, intensities=intensities, remarks=remarks)
    kept.check((len(order), *full.shape), source)
    mean = (framing.binned(seen.sum) / len(order)).astype(np.float32)
    write_values(part, kept, source, {MEAN: mean, MAXIMUM: maximum})


def along_curve(positions: NDArray[np.float64]) -> Indices:
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


def _write_patterns(
    part: Path, patterns: PatternArray, seen: PatternCounts, order: Indices, source: str, report: Reporter
) -> NDArray[np.float32]:
    """Write the patterns shard by shard, in the order of the curve, and return the maximum of each pixel."""
    count, framing = len(order), seen.framing
    rows, columns = framing.windows(*patterns.shape[1:])
    with reading(source):
        recorded = np.asarray(patterns[:1, rows, columns])
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
