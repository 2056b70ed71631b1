"""Rehearsal of a network: a small image of random pixels is denoised in tiles and as a whole, which must agree.

A probe changes one pixel at a time, in windows of round lengths. Effects of other lengths on a network,
such as padding to a multiple, appear only here.
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
from halotile.tasks.devices.device import Device, torch_threads
from halotile.tasks.inner_tiles import TileRunner, Tiling, cut_evenly
from halotile.tasks.trials.trial import Trial, failing_as, valid_part

SMALL = 20480
"""torch computes windows of up to this many pixels with another library, which rounds differently."""
PERIOD = {1: 192, 2: 192, 3: 48}
"""A shortened image keeps its lengths modulo this, which the multiples that networks pad to divide."""
FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LARGEST = 64
"""The largest alignment to try."""
MISSING = (0, 1, 2, 24)
"""Lengths that windows at the far end lack to a multiple of :data:`LARGEST`, in alignments; padding shows at the smallest."""
TOLERANCE = 1e-5
"""Allowed difference of tiles, relative to the largest pixel: rounding, after many layers."""


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal."""

    alignment: int
    """The alignment with which tiles and whole agree best."""
    difference: float
    """The largest difference, relative to the largest pixel of the whole."""

    @property
    def agrees(self) -> bool:
        """True if no seam would be visible."""
        return self.difference <= TOLERANCE


def rehearse(denoiser: Denoiser, depth: Depth, image: tuple[int, ...], *, search: bool) -> Rehearsal:
    """Denoise an image in tiles and as a whole.

    Parameters
    ----------
    denoiser : Denoiser
        With its known alignment.
    depth : tuple of (int, int)
        The halo on each tiled axis.
    image : tuple of int
        Lengths of the tiled axes of the real image.
    search : bool
        Whether to try larger alignments if the tiles do not agree.
    """
    stage = _Stage.of(denoiser, depth, image)
    if not denoiser.convolutional:
        with torch_threads():
            return _rehearse(stage, search)
    found = _rehearse(stage, search)
    # The last bits, which depend on the number of threads, are compared separately, at the sizes of the job.
    return replace(found, difference=0.0) if found.agrees else found


def _rehearse(stage: _Stage, search: bool) -> Rehearsal:
    denoiser = stage.denoiser
    everything = Region.whole(stage.lengths)
    whole = stage.denoised(everything)
    largest = float(np.abs(whole).max()) or 1.0
    first = denoiser.alignment
    best = Rehearsal(first, math.inf)
    for factor in FACTORS if search else (1,):
        alignment, difference = first * factor, 0.0
        if factor > 1 and alignment > LARGEST:
            break
        for core in stage.tiles(alignment):
            tile = stage.denoised(everything, core, alignment)
            difference = max(difference, stage.difference(tile, core, whole, core))
        for window, core in stage.far_ends(alignment):
            alone = stage.denoised(window)
            difference = max(difference, stage.difference(alone, window, whole, core))
        found = Rehearsal(alignment, difference / largest)
        best = min(best, found, key=lambda rehearsal: rehearsal.difference)
        if found.agrees:
            return found
    if not np.array_equal(stage.denoised(everything), whole, equal_nan=True):
        raise ConfigError(
            f"{denoiser.title} returned two results for one image, with others in between: it keeps state or draws random "
            "numbers, so the result would depend on the order of tiles. Write a function whose result depends on its input alone."
        )
    return best


def tiling_error(denoiser: Denoiser, found: Rehearsal, image: tuple[int, ...]) -> ConfigError:
    """The error for a network whose tiles do not agree with the whole."""
    sides = " x ".join(map(str, image))
    return ConfigError(
        f"{denoiser.title} gives other pixels in tiles than on a whole image with sides like those of {sides}: they differed by "
        f"{found.difference:.2g} of the largest pixel in a trial. It may pad the image at its start as well as at its end, which "
        "tiles cannot reproduce: let it pad at the end only, or pad the image itself to a multiple of 64. Or it "
        "looks farther than the probe found: write receptive_field and alignment, if you know them."
    )


@dataclass(frozen=True)
class _Stage:
    """The random image and the model of a rehearsal."""

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
            _shorten(n, 2 * least + LARGEST + a + b, PERIOD[dims])
            for n, (a, b) in zip(image, depth, strict=True)
        )
        return cls(denoiser, trial.model, depth, trial.noise(lengths).numpy()[0], least)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.pixels.shape[1:]

    def tiles(self, alignment: int) -> list[Region]:
        """Tiles along the diagonal, and the one in the far corner, which cover all positions on each axis.

        There are several seams on each axis, and the tiles are larger than their halo, which limits its cost.
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
        """Yield windows that end with the image on one axis, each with the part that its ends do not affect."""
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
            yield window, valid_part(window, self.depth, self.lengths)

    def difference(
        self, alone: NDArray[np.float32], window: Region, whole: NDArray[np.float32], core: Region
    ) -> float:
        """The largest difference between a window by itself and the whole, over the core."""
        factor = (self.denoiser.scale,) * len(self.lengths)
        mine: tuple[Any, ...] = (slice(None), *core.relative_to(window).scale(factor).slices)
        there: tuple[Any, ...] = (slice(None), *core.scale(factor).slices)
        difference = float(np.abs(alone[mine] - whole[there]).max())
        return math.inf if math.isnan(difference) else difference

    def denoised(self, window: Region, core: Region | None = None, alignment: int = 1) -> NDArray[np.float32]:
        """Denoise a part of the image as if it were the whole: one tile of it, or all at once."""
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
        title, sides = self.denoiser.title, " x ".join(map(str, lengths))
        runner = TileRunner(self.model, device, tiling, title)
        with failing_as(f"{title} failed on an image of {sides} pixels, or a tile of it"):
            return runner(pixels, everything, core, self.denoiser.channels[1], {})


def _shorten(length: int, least: int, period: int) -> int:
    """A shorter length of at least ``least``, if possible, that is equal modulo the period.

    Examples
    --------
    >>> _shorten(4097, 288, 192), _shorten(203, 288, 192)
    (449, 203)
    """
    shorter = length % period + -(-(least - length % period) // period) * period
    return min(length, shorter)
