"""Patches of images for training: pairs of images that are aligned, and patches drawn from them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import fourier_gaussian

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.inner_tiles import respanned, spanned
from halotile.tasks.networks.base import Network
from halotile.tasks.noise.estimate import UNKNOWN, ImageValues, sample_regions
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quiet_windows import Values, cut

PART = 128  # edge of the parts that are compared, in pixels: what fills an image is no structure of theirs
BINNED = 4  # edge of the bins whose means show fine structure: of 16 pixels, with a quarter of the noise
FINE = 0.15  # share of structure in these means, without slow illumination, from which it can be compared
MEASURED = 0.5  # share of the pixels of a part that has to be finite in both
# Peak of the phase correlation over its deviation above which it tells a shift, of noise or different images it is 4 to
# 8; and its height above the value without a shift: in noise a broad peak moves by a pixel.
CLEAR, APART = 10.0, 5.0
NOISY = 1.0  # deviation in pixels of the blur of the phase correlation: finer structure is mostly noise
ROUNDING = 1e-9  # correlation of copies, below 1


@dataclass(frozen=True)
class Pair:
    """Statistics of two images.

    >>> rng = np.random.default_rng(0)
    >>> image = np.cumsum(np.cumsum(rng.standard_normal((256, 256)), 0), 1)
    >>> first, second = (image + rng.standard_normal(image.shape) for _ in range(2))
    >>> found = Pair.from_squares([(first, 2 * np.roll(second, 3, 1))])
    >>> found.shift, round(found.contrast, 1)
    ((0, 3), 2.0)
    """

    # share of structure in the variance of the pixels, by the correlation of neighbours: about 0 for white noise
    structure: float
    # correlation of both, relative to that share: about 1 for the same with noise that differs from pixel to pixel,
    # about 0 for others
    shared: float
    shift: tuple[int, int]  # rows and columns by which the second is shifted; 0 where that is not clear
    contrast: float  # contrast of the structure of the second, relative to that of the first
    offset: float  # difference of the means, in standard deviations of the first
    # correlation as `shared` of means of 4 x 4 pixels, without slow illumination; NaN where there is too little
    # structure in them
    shared_finely: float = math.nan
    is_copy: bool = False  # true where the second is the first, but for brightness and contrast

    @classmethod
    def from_squares(cls, squares: Iterable[tuple[Values, Values]]) -> Pair | None:
        """Compare squares of the same places, NaN in holes; None where nothing can be compared.

        References
        ----------
        C. D. Kuglin, D. C. Hines, The phase correlation image alignment method, IEEE Conf. Cybernetics and Society (1975) 163-165.
        """
        parts = [part for square in squares for part in _parts(*square)]
        if not parts:
            return None
        smallest = [min(lengths) for lengths in zip(*(part[0].shape for part in parts), strict=True)]
        first, second = (np.stack([part[which][: smallest[0], : smallest[1]] for part in parts]) for which in (0, 1))
        means = first.mean((1, 2), keepdims=True), second.mean((1, 2), keepdims=True)
        offset = float(np.mean(means[1] - means[0]))
        deviation = float(first.std())
        first, second = first - means[0], second - means[1]
        if not (first.any() and second.any()):
            return None
        structure, correlation = _alike(first, second)
        alike = [max(_neighbours(image), 0.0) for image in (first, second)]
        finely, correlated_finely = _alike(_fine(first), _fine(second))
        return cls(
            structure,
            correlation / structure if structure else 0.0,
            _shift(first, second),
            math.sqrt(alike[1] / alike[0]) if all(alike) else 1.0,
            offset / deviation,
            correlated_finely / finely if finely >= FINE else math.nan,
            is_copy=correlation > 1 - ROUNDING,
        )


def _parts(first: Values, second: Values) -> Iterator[tuple[Values, Values]]:
    """Yield the parts of a square, with the mean of each in place of what is not finite in both."""
    finite = np.isfinite(first) & np.isfinite(second)
    edges = [min(PART, n) for n in first.shape]
    for row in range(0, first.shape[0] - edges[0] + 1, edges[0]):
        for column in range(0, first.shape[1] - edges[1] + 1, edges[1]):
            at = slice(row, row + edges[0]), slice(column, column + edges[1])
            known = finite[at]
            if known.mean() >= MEASURED:
                one, other = (np.where(known, image[at], image[at][known].mean()) for image in (first, second))
                yield one, other


def _alike(first: Values, second: Values) -> tuple[float, float]:
    """Share of structure in the pixels of both, by that of each, and their correlation; 0 where one is empty."""
    power = math.sqrt(float(np.square(first).mean()) * float(np.square(second).mean()))
    alike = math.sqrt(max(_neighbours(first), 0.0) * max(_neighbours(second), 0.0))
    return (alike / power, float((first * second).mean()) / power) if power else (0.0, 0.0)


def _fine(parts: Values) -> Values:
    """Means of bins of the parts, less the quadratic polynomial of rows and columns that fits them best."""
    count, rows, columns = (n if axis == 0 else n // BINNED for axis, n in enumerate(parts.shape))
    if min(rows, columns) < BINNED:
        return np.zeros((count, 2, 2))
    inside = parts[:, : rows * BINNED, : columns * BINNED]
    means = inside.reshape(count, rows, BINNED, columns, BINNED).mean((2, 4))
    y, x = (axis.ravel() for axis in np.meshgrid(*map(_centred, (rows, columns)), indexing="ij"))
    slow, _ = np.linalg.qr(np.stack([np.ones_like(y), y, x, y * y, x * x, x * y], 1))
    flat = means.reshape(count, -1)
    return np.asarray(flat - flat @ slow @ slow.T).reshape(means.shape)


def _centred(length: int) -> Values:
    return np.linspace(-1, 1, length)


def _neighbours(parts: Values) -> float:
    """Covariance of neighbouring pixels, the mean of both directions; parts have a mean of 0."""
    rows, columns = parts[:, 1:] * parts[:, :-1], parts[:, :, 1:] * parts[:, :, :-1]
    return float((rows.mean() + columns.mean()) / 2)


def _shift(first: Values, second: Values) -> tuple[int, int]:
    """Place of the peak of the phase correlation, where it is clear."""
    rows, columns = first.shape[1:]
    window = np.hanning(rows)[:, None] * np.hanning(columns)
    spectra = np.conj(np.fft.rfft2(first * window)) * np.fft.rfft2(second * window)
    phases = spectra / np.maximum(np.abs(spectra), np.finfo(float).tiny)
    correlation = np.fft.irfft2(fourier_gaussian(phases.mean(0), NOISY, columns), (rows, columns))
    deviation = correlation.std()
    if correlation.max() < max(CLEAR * deviation, correlation[0, 0] + APART * deviation):
        return 0, 0
    row, column = divmod(int(correlation.argmax()), columns)
    return (row + rows // 2) % rows - rows // 2, (column + columns // 2) % columns - columns // 2


HELD_EVERY, HELD_FIRST = 11, 5  # one of so many cells is held out for validation, beginning with this one
POOL_STEPS = 16  # steps whose patches come from the same cells, which are read once
CELL_PATCHES, SMALL = 4, 16  # edge of a cell in patches, half as many in an image with an edge of less than so many
HELD_PATCHES = 8  # most patches of a cell that is held out; they may overlap
LEAST_VALID = 0.5  # share of valid pixels of a cell that is used
# A saturated pixel may be on its own where at most so many are saturated in the square around it, itself included.
ALONE_EDGE, ALONE = 5, 2
MOST_TRIES = 200
Structure = Literal["none", "x", "y"]  # axis along which neighbours share noise
VALIDATION = 2**32  # number in place of a step for the places of patches that validate


@dataclass(frozen=True)
class TrainingImage:
    """An image that a network is trained on."""

    source: Readable  # image, with NaN where nothing was measured
    spatial: tuple[int, int]  # positions of the axes of rows and columns
    channel: int | None = None  # position of the axis of channels; all others are planes by themselves
    values: ImageValues = UNKNOWN  # its values, by samples
    second: Readable | None = None  # second image of the same, with other noise
    second_values: ImageValues = UNKNOWN  # its values, by samples

    @property
    def planes(self) -> tuple[int, ...]:
        """Lengths of the other axes, 1 for the spatial ones and the channels."""
        own = {*self.spatial, self.channel}
        return tuple(1 if axis in own else n for axis, n in enumerate(self.source.shape))

    @property
    def edges(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = (self.source.shape[axis] for axis in self.spatial)
        return rows, columns

    @property
    def channels(self) -> int:
        return 1 if self.channel is None else self.source.shape[self.channel]

    def sampled(self, squares: int, channel: int) -> list[Region]:
        """Places of so many squares of a channel at most, spread evenly."""
        regions = sample_regions(self.source.shape, squares, self.spatial)
        spans = {} if self.channel is None else {self.channel: (channel, channel + 1)}
        return [respanned(region, spans) for region in regions]

    def read(self, source: Readable, plane: Sequence[int], rows: range, columns: range) -> NDArray[Any]:
        """The pixels of a cell, (channels, rows, columns)."""
        spans = {axis: (n, n + 1) for axis, n in enumerate(plane)}
        spans |= {axis: (p.start, p.stop) for axis, p in zip(self.spatial, (rows, columns), strict=True)}
        if self.channel is not None:
            spans[self.channel] = 0, self.channels
        pixels = source.read(spanned(spans.values()))
        order = [axis for axis in (self.channel, *self.spatial) if axis is not None]
        others = [axis for axis in range(pixels.ndim) if axis not in order]
        return pixels.transpose(*others, *order).reshape(self.channels, len(rows), len(columns))


class Patches(NamedTuple):
    """Some patches, with what is known of their pixels.

    ``pixels``: normalised pixels, (patches, channels, rows, columns); holes have the median of their cell; ``valid``: True where a pixel was
    measured, and is no saturated one on its own; ``second``: those of the second image; the same where there is none.
    """

    pixels: NDArray[np.float32]
    valid: NDArray[np.bool_]
    second: NDArray[np.float32]


@dataclass(frozen=True)
class PatchSource:
    """Draws patches of images; the same ones for the same numbers."""

    images: tuple[TrainingImage, ...]  # images, of the same number of channels
    patch: int  # edge of a patch
    values: tuple[float, float] = (0.0, 1.0)  # values of the pixels that become 0 and 1
    seed: int = 0  # number that all places follow from
    structure: Structure = "none"  # axis along which neighbours share noise

    @cached_property
    def counts(self) -> list[tuple[int, int]]:
        """Numbers of cells along rows and columns of a plane of each image."""
        counts = []
        for image in self.images:
            edge = self.patch * (CELL_PATCHES if min(image.edges) >= SMALL * self.patch else CELL_PATCHES // 2)
            rows, columns = (max(1, n // edge) for n in image.edges)
            counts.append((rows, columns))
        return counts

    @cached_property
    def ends(self) -> list[int]:
        """Number of the first cell behind each image."""
        sizes = [
            math.prod(image.planes) * rows * columns
            for image, (rows, columns) in zip(self.images, self.counts, strict=True)
        ]
        return list(itertools.accumulate(sizes))

    @property
    def cell_bytes(self) -> int:
        """Memory of the largest cell with what is known of it."""
        edges = (
            math.prod(-(-n // parts) for n, parts in zip(image.edges, counts, strict=True))
            for image, counts in zip(self.images, self.counts, strict=True)
        )
        return 9 * self.images[0].channels * max(edges)

    @property
    def cells(self) -> int:
        return self.ends[-1]

    @property
    def has_held_out(self) -> bool:
        """True where there are cells for validation."""
        return self.cells > HELD_FIRST

    def draw(self, step: int, slot: int, count: int) -> Patches:
        """Patches of a slot of a step, of cells that are not held out, turned and flipped at random."""
        pool = step // POOL_STEPS
        if pool != self._kept.get("pool"):
            self._kept.clear()
            self._kept["pool"] = pool
        cells: list[Patches] = self._kept.get(slot) or self._kept.setdefault(slot, self._pool(pool, slot, count))
        rng = np.random.default_rng((self.seed, step, slot, 1))
        return _stacked([self._patch(cell, rng) for cell in cells])

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        """Cells of the current pool."""
        return {}

    def _pool(self, pool: int, slot: int, count: int) -> list[Patches]:
        rng = np.random.default_rng((self.seed, pool, slot, 0))
        numbers = (int(rng.integers(self.cells)) for _ in range(count * MOST_TRIES))
        chosen = (number for number in numbers if not (self.has_held_out and number % HELD_EVERY == HELD_FIRST))
        found = list(itertools.islice(self._usable(chosen), count))
        if not found:
            raise InputError(
                f"nearly everywhere less than {LEAST_VALID:.0%} of the pixels are measured, or all are saturated: there is nothing to train on. "
                "Write the path of another image; or input.nodata: none, where measurements are declared as holes by a value."
            )
        return list(itertools.islice(itertools.cycle(found), count))

    def held_out(self, count: int) -> Patches | None:
        """So many patches at most of cells that are held out, spread evenly, several of each where these are few; None where there are none."""
        numbers = range(HELD_FIRST, self.cells, HELD_EVERY)
        step = max(1, len(numbers) // count)
        found = list(itertools.islice(self._usable(iter(numbers[::step])), count))
        if not found:
            found = list(itertools.islice(self._usable(iter(numbers)), count))
        if not found:
            return None
        return _stacked(
            [
                self._patch(cell, np.random.default_rng((self.seed, VALIDATION, number)))
                for number, cell in enumerate(
                    itertools.islice(itertools.cycle(found), min(count, HELD_PATCHES * len(found)))
                )
            ]
        )

    def _usable(self, numbers: Iterator[int]) -> Iterator[Patches]:
        """Cells with enough measured pixels, not all of them saturated."""
        for number in numbers:
            if cell := self._cell(number):
                yield cell

    def crop(self, edge: int, most: int) -> Values | None:
        """The middle of that cell of the first image which has most structure of so many that are held out, normalised, (channels, rows, columns).

        Pixels that do not count are NaN. None where no cell has a quarter of that edge or more.
        """
        numbers = range(HELD_FIRST, self.ends[0], HELD_EVERY)
        found = [cell for n in numbers[:: max(1, len(numbers) // most)] if (cell := self._cell(n))][:most]
        if not found:
            return None
        pixels, valid, _ = max(found, key=lambda cell: _structure(cell.pixels))
        inside = tuple(slice((n - min(n, edge)) // 2, (n + min(n, edge)) // 2) for n in pixels.shape[1:])
        noisy = np.where(valid, pixels, np.nan)[:, *inside].astype(np.float64)
        return noisy if min(noisy.shape[1:]) >= edge // 4 else None

    def _cell(self, number: int) -> Patches | None:
        """The pixels of a cell, normalised; None where there is too little to learn from."""
        which = bisect.bisect_right(self.ends, number)
        image, (rows, columns) = self.images[which], self.counts[which]
        inside = number - (self.ends[which - 1] if which else 0)
        plane, cell = divmod(inside, rows * columns)
        ranges = [
            range(n * index // parts, n * (index + 1) // parts)
            for n, index, parts in zip(image.edges, divmod(cell, columns), (rows, columns), strict=True)
        ]
        place = [int(i) for i in np.unravel_index(plane, image.planes)]
        stored = image.read(image.source, place, *ranges)
        valid = _trusted(stored, image.values.saturated)
        pixels = second = self._filled(stored)
        if image.second is not None:
            other = image.read(image.second, place, *ranges)
            valid, second = valid & _trusted(other, image.second_values.saturated), self._filled(other)
        if valid.mean() < LEAST_VALID or np.isin(stored[valid], image.values.saturated).all():
            return None
        return Patches(pixels, valid, second)

    def _filled(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Normalised pixels, with a median in place of what is not finite."""
        low, high = self.values
        # A difference may be beyond the range of the image's own type.
        wide = np.subtract(stored, low, dtype=np.float64)
        pixels: NDArray[np.float32] = (wide / (high - low)).astype(np.float32)
        finite = np.isfinite(pixels)
        if not finite.all():
            pixels[~finite] = np.median(pixels[finite]) if finite.any() else 0
        return pixels

    def _patch(self, cell: Patches, rng: np.random.Generator) -> Patches:
        """A patch of a cell, turned and flipped."""
        rows, columns = (
            slice(start, start + self.patch)
            for n in cell.pixels.shape[1:]
            for start in [int(rng.integers(n - self.patch + 1))]
        )
        turns, flip, swap = int(rng.integers(4)), bool(rng.integers(2)), bool(rng.integers(2))
        if self.structure != "none":  # its axis stays that
            turns -= turns % 2

        def turned(part: NDArray[Any]) -> NDArray[Any]:
            return np.rot90(part[:, rows, columns][:, :: -1 if flip else 1], turns, (1, 2))

        first, second = (turned(image) for image in (cell.pixels, cell.second))
        return Patches(second if swap else first, turned(cell.valid), first if swap else second)


def _trusted(stored: NDArray[Any], ends: Sequence[float]) -> NDArray[np.bool_]:
    """True where a pixel was measured, and is no saturated one on its own: further from its neighbours than they are from one another.

    A hot or a dead pixel would pull the mean of what surrounds it towards itself. Others that are saturated count, such as zeros among few photons: without
    them the mean of pixels near the end of the range would be that of those inside it alone.
    """
    trusted: NDArray[np.bool_] = np.isfinite(stored)
    if not ends:
        return trusted
    from scipy.ndimage import maximum_filter, minimum_filter, uniform_filter

    around = (1, ALONE_EDGE, ALONE_EDGE)
    saturated = np.isin(stored, ends)
    others = trusted & ~saturated
    low = minimum_filter(np.where(others, stored, np.inf), around)
    high = maximum_filter(np.where(others, stored, -np.inf), around)
    few = uniform_filter(saturated.astype(np.float32), around) * ALONE_EDGE**2 < ALONE + 0.5
    trusted &= ~(saturated & few & (np.maximum(stored - high, low - stored) > high - low))
    return trusted


def _structure(pixels: NDArray[np.float32]) -> float:
    """Deviation of the means of squares: that of pixels would choose a cell by its noise."""
    return float(cut(pixels).mean((2, 4)).std())


def _stacked(patches: Sequence[Patches]) -> Patches:
    pixels, valid, second = zip(*patches, strict=True)
    return Patches(np.stack(pixels), np.stack(valid), np.stack(second))


@dataclass(frozen=True)
class Recipe:
    """A training."""

    patches: PatchSource  # images
    network: Network  # architecture
    method: str  # one of `METHODS`
    # steps, batch, slots: number of steps, patches of a step, and parts that a batch has for the ranks to share
    steps: int
    batch: int
    slots: int
    rate: float  # learning rate of Adam in the first step; it ends at 0, along half a cosine
    every: int  # steps from one row of the curve to the next
    mode: Literal["exact", "fast"] = "exact"  # order in which gradients are added: see `fit`
    noise: PhotonNoise | None = (
        None  # that of each channel of the first image, normalised; None where pixels share noise
    )
    checkpoint: Path = Path()  # checkpoint, curve, examples: files on a disk that all ranks see
    curve: Path = Path()
    examples: Path = Path()

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.patches.images[0].channels
