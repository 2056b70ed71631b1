"""A network rehearsed: a small image of random pixels in tiles and as one, which have to agree.

A probe looks at one pixel at a time, in windows of round lengths. What a network does to a whole image of other
lengths, such as padding it to a multiple of something, shows only here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Depth, Region
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.devices.device import Device, threads
from halotile.tasks.inner_tiles import TileRunner, Tiling, cut_evenly
from halotile.tasks.trials.trial import Trial, failing_as

SMALL = 20480
"""Windows of up to so many pixels go to another library in torch, which rounds otherwise."""
PERIOD = {1: 192, 2: 192, 3: 48}
"""An image that is cut down keeps its lengths modulo this: what a network pads to divides it."""
FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LARGEST = 64
"""The largest multiple that a network is tried with."""
MISSING = (0, 1, 2, 24)
"""What windows at the far end lack to a multiple of :data:`LARGEST`, in alignments: what is padded shows at the least of it."""
TOLERANCE = 1e-5
"""What tiles may differ by, of the largest pixel: rounding, after many layers."""


@dataclass(frozen=True)
class Rehearsal:
    """How tiles and whole agreed."""

    alignment: int
    """The alignment with which they agree best."""
    difference: float
    """The largest difference, of the largest pixel of the whole."""

    @property
    def agrees(self) -> bool:
        """Whether no seam would be seen."""
        return self.difference <= TOLERANCE


def rehearse(denoiser: Denoiser, depth: Depth, image: tuple[int, ...], *, search: bool) -> Rehearsal:
    """Denoise an image in tiles and whole.

    Parameters
    ----------
    denoiser : Denoiser
        With its alignment, so far.
    depth : tuple of (int, int)
        The halo on each tiled axis.
    image : tuple of int
        Lengths of the tiled axes of the real image.
    search : bool
        Whether larger alignments are tried where the tiles do not agree.
    """
    stage = _Stage.of(denoiser, depth, image)
    if not denoiser.convolutional:
        with threads():
            return _rehearsed(stage, search)
    found = _rehearsed(stage, search)
    # Its last bits, which depend on how many threads there are, are compared at the sizes of the job.
    return replace(found, difference=0.0) if found.agrees else found


def _rehearsed(stage: _Stage, search: bool) -> Rehearsal:
    denoiser = stage.denoiser
    everything = Region.whole(stage.lengths)
    whole = stage.denoised(everything)
    most = float(np.abs(whole).max()) or 1.0
    first = denoiser.alignment
    best = Rehearsal(first, math.inf)
    for alignment in _alignments(first, search):
        difference = 0.0
        for core in stage.tiles(alignment):
            tile = stage.denoised(everything, core, alignment)
            difference = max(difference, stage.apart(tile, core, whole, core))
        for window, core in stage.far_ends(alignment):
            alone = stage.denoised(window)
            difference = max(difference, stage.apart(alone, window, whole, core))
        found = Rehearsal(alignment, difference / most)
        best = min(best, found, key=lambda rehearsal: rehearsal.difference)
        if found.agrees:
            return found
    if not np.array_equal(stage.denoised(everything), whole, equal_nan=True):
        raise ConfigError(
            f"{denoiser.title} gave one image two results, after it had seen others between: it keeps state or draws random "
            "numbers, so the result would depend on the order of tiles. Write one whose result depends on its input alone."
        )
    return best


def read_error(denoiser: Denoiser, found: Rehearsal, image: tuple[int, ...]) -> ConfigError:
    """What to say of a network whose tiles do not agree with the whole."""
    sides = " x ".join(map(str, image))
    return ConfigError(
        f"{denoiser.title} gives other pixels in tiles than on a whole image whose sides are those of {sides}: by "
        f"{found.difference:.2g} of the largest pixel, on a trial. It may pad the image in front as well as behind, which "
        "no tile can do alike: let it pad behind only, or pad the image itself to a multiple of 64. Or it "
        "looks farther than was found: write receptive_field and alignment by hand, if you know better."
    )


def _alignments(first: int, search: bool) -> Iterator[int]:
    yield first
    for factor in FACTORS[1:] if search else ():
        if first * factor <= LARGEST:
            yield first * factor


@dataclass(frozen=True)
class _Stage:
    """The image, and what denoises it."""

    denoiser: Denoiser
    model: Model
    depth: Depth
    pixels: NDArray[np.float32]
    least: int

    @classmethod
    def of(cls, denoiser: Denoiser, depth: Depth, image: tuple[int, ...]) -> _Stage:
        dims = len(image)
        trial = Trial.of(denoiser, dims)
        least = math.ceil((SMALL + 1) ** (1 / dims))
        lengths = tuple(
            _cut(n, 2 * least + LARGEST + a + b, PERIOD[dims]) for n, (a, b) in zip(image, depth, strict=True)
        )
        return cls(denoiser, trial.model, depth, trial.noise(lengths).numpy()[0], least)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.pixels.shape[1:]

    def tiles(self, alignment: int) -> list[Region]:
        """Tiles down the diagonal, and that in the far corner: of all of them, each place on an axis is among these.

        They leave several seams on each axis, and are larger than the halo around them, which costs as much.
        """
        several = min(self.least, min(self.lengths) // 4)
        farthest = max(itertools.chain.from_iterable(self.depth))
        least = max(self.least // 2, several, 3 * farthest // 2)
        edge = -(-least // alignment) * alignment
        cuts = [cut_evenly(0, n, edge, alignment) for n in self.lengths]
        places = [[cut[i % len(cut)] for cut in cuts] for i in range(max(map(len, cuts)))]
        places.append([cut[-1] for cut in cuts])
        return list(dict.fromkeys(Region(*zip(*place, strict=True)) for place in places))

    def far_ends(self, alignment: int) -> Iterator[tuple[Region, Region]]:
        """Windows that end with the image on one axis, with the part of each that is far enough from where it begins."""
        whole = Region.whole(self.lengths)
        least = (max(self.least, after + LARGEST) for _, after in self.depth)
        near = tuple(min(-(-m // alignment) * alignment, n) for m, n in zip(least, self.lengths, strict=True))
        for axis, missing in itertools.product(range(len(near)), MISSING):
            length, period = self.lengths[axis], math.lcm(LARGEST, alignment)
            start = (length + (-length) % alignment + missing * alignment) % period
            spare = length - (start + self.least + self.depth[axis][0])
            if spare < 0:
                continue
            start += spare // period * period
            first = [0] * len(near)
            first[axis] = start
            window = Region(
                tuple(first), tuple(self.lengths[i] if i == axis else n for i, n in enumerate(near))
            )
            yield window, self._inner(window, whole)

    def _inner(self, window: Region, whole: Region) -> Region:
        start = tuple(
            a + before if a > 0 else a for a, (before, _) in zip(window.start, self.depth, strict=True)
        )
        stop = tuple(
            b - after if b < n else b
            for b, (_, after), n in zip(window.stop, self.depth, whole.stop, strict=True)
        )
        return Region(start, stop)

    def apart(
        self, alone: NDArray[np.float32], window: Region, whole: NDArray[np.float32], core: Region
    ) -> float:
        """The largest difference between a window by itself and the whole, over the core."""
        factor = (self.denoiser.scale,) * len(self.lengths)
        mine: tuple[Any, ...] = (slice(None), *core.relative_to(window).scale(factor).slices)
        there: tuple[Any, ...] = (slice(None), *core.scale(factor).slices)
        apart = float(np.abs(alone[mine] - whole[there]).max())
        return math.inf if math.isnan(apart) else apart

    def denoised(self, window: Region, core: Region | None = None, alignment: int = 1) -> NDArray[np.float32]:
        """A part of the image, as if it were all there is; of that one tile, or all as one."""
        lengths = window.shape
        everything = Region.whole(lengths)
        core = core or everything
        dims, scale = len(lengths), self.denoiser.scale
        tiling = Tiling(
            tile=tuple(-(-n // alignment) * alignment for n in core.shape),
            depth=self.depth,
            align=(alignment,) * dims,
            least=tuple(min(self.least, n) for n in lengths),
            image=lengths,
            scale=scale,
            batch=1,
            range=None,
            work_dtype="float32",
        )
        device = Device("cpu", "float32", self.denoiser.convolutional and dims == 2)
        pixels = self.pixels[(slice(None), *window.slices)]
        title = self.denoiser.title
        with failing_as(
            f"{title} failed on an image of {' x '.join(map(str, lengths))} pixels, or a tile of it"
        ):
            return TileRunner(self.model, device, tiling, title)(
                pixels, everything, core, self.denoiser.channels[1], {}
            )


def _cut(length: int, least: int, period: int) -> int:
    """A length that is no longer than it has to be, and the same modulo the period.

    Examples
    --------
    >>> _cut(4097, 288, 192), _cut(203, 288, 192)
    (449, 203)
    """
    shorter = length % period + -(-(least - length % period) // period) * period
    return min(length, shorter)
