"""The pixels of an image beside those that the weights of its denoiser learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import readable_parts
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.noise.estimate import sample_regions
from halotile.tasks.roles import Roles

SAMPLES = 16
"""Squares of the image that are looked at."""
TAILS = 0.01, 0.99
"""Quantiles beyond which values may be cut off: few that are far from the others may have been in no patch of the training, or here in no square."""
NOTED, FAR = 4.0, 16.0
"""Ratio of deviations above which there is a note; and ratio, or distance of means in deviations, above which the units are others."""
AWAY = 1.25
"""Distance of means in deviations above which there is a note: an image of half the photons, whose PSNR falls by 6 dB, is 1.4 away."""
FLAT, COUNTS = 1000.0, 0.5
"""An image may be so many times flatter, such as an empty field of view; but not by less than this, where whole numbers were learned from."""
USUAL = (0.0, 1.0), (0.0, 255.0), (0.0, 4095.0), (0.0, 65535.0)
"""Ranges that are offered where they fit."""


class _Spread(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4g} and deviation {self.deviation:.4g}"

    def within(self, low: float, high: float) -> _Spread:
        """The same where these values count as 0 and 1."""
        return _Spread((self.mean - low) / (high - low), self.deviation / (high - low))

    def outside(self, low: float, high: float) -> _Spread:
        """The same in units of the file, where these values count as 0 and 1."""
        return _Spread(self.mean * (high - low) + low, self.deviation * (high - low))

    def distance(self, other: _Spread) -> float:
        """Distance of the means, in the larger of the deviations."""
        return abs(self.mean - other.mean) / (max(self.deviation, other.deviation) or 1.0)

    def difference(self, other: _Spread) -> float:
        """Ratio of the deviations, or the distance of the means with the same weight: whichever is larger."""
        small, large = sorted((self.deviation, other.deviation))
        return max(self.distance(other) * NOTED / AWAY, large / small if small else 1.0)


def note_of_trained_pixels(
    job: Denoising,
    denoiser: Denoiser,
    view: Readable,  # image, with NaN in its holes
    roles: Roles,
    values: tuple[float, float] | None,  # values that count as 0 and 1
    dtype: np.dtype[Any],  # type of the image in its file
    previous: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """Return a note on an image whose pixels are unlike those that the weights learned from."""
    trained = denoiser.trained_pixels
    if trained is None or previous is not None:
        return ()
    low, high = values or (0.0, 1.0)
    notes: list[str] = []
    spreads = map(_Spread, trained.mean, trained.deviation)
    for channel, (learned, (whole, middle)) in enumerate(zip(spreads, _spreads(view, roles), strict=False)):
        seen = min((part.within(low, high) for part in (whole, middle)), key=learned.difference)
        if learned.difference(seen) <= NOTED:
            continue
        where = f" of channel {channel}" if len(trained.mean) > 1 else ""
        found = f"the pixels{where} have {seen.outside(low, high)}, and the weights expect {learned.outside(low, high)}"
        lit = "darker" if seen.mean < learned.mean else "brighter"
        instead = f"if it is the same, {lit} or in other units, write input.range: {_range_text(learned, middle, high - low)}"
        # No type of fewer numbers than those that were learned from has the same unit.
        is_narrower = dtype.kind in "iu" and np.iinfo(dtype).max < high
        if job.input.range == "auto" and (is_narrower or _is_in_other_units(seen, learned, high - low)):
            raise ConfigError(
                f"input.range is auto, which takes the numbers as they were in the training: {found}. For this image, {instead}; if it is not, train on "
                f"images like it, or write input.range: [{low:g}, {high:g}] to go on."
            )
        notes.append(f"{found}: {instead}; else weights that learned from images like it do better")
    return tuple(notes[:1])


def _spreads(view: Readable, roles: Roles) -> Iterator[tuple[_Spread, _Spread]]:
    """Yield mean and deviation of each channel that a network takes, with all values and without the tails."""
    square = tuple(sorted((*roles.spatial[-2:], *(() if roles.channel is None else (roles.channel,)))))
    regions = sample_regions(view.shape, SAMPLES, square)
    parts = [roles.arrange(part) for _, part in readable_parts(view, regions)]
    for channel in range(parts[0].shape[len(roles.looped)] if parts else 0):
        values = np.concatenate([_finite(part.take(channel, len(roles.looped))) for part in parts])
        if values.size:
            low, high = np.quantile(values, TAILS)
            middle = values[(values >= low) & (values <= high)]
            yield _spread(values), _spread(middle)


def _finite(pixels: Pixels) -> Pixels:
    return pixels[np.isfinite(pixels)].astype(np.float64)


def _spread(values: Pixels) -> _Spread:
    return _Spread(float(values.mean()), float(values.std()))


def _is_in_other_units(seen: _Spread, learned: _Spread, width: float) -> bool:
    """Return True where no image like those of the training has such pixels."""
    if not seen.deviation:  # an empty image has no scale that could be another
        return learned.distance(seen) > FAR
    is_flat = seen.deviation * FAR < learned.deviation
    is_below_counts = width >= USUAL[1][1] and seen.deviation * width < COUNTS
    return (
        learned.distance(seen) > FAR
        or seen.deviation > FAR * learned.deviation
        or seen.deviation * FLAT < learned.deviation
        or (is_flat and is_below_counts)
    )


def _range_text(learned: _Spread, seen: _Spread, usual: float) -> str:
    """Return the range in which an image has the mean and deviation that were learned from, or a usual one near it; of the usual width where all is equal.

    Examples
    --------
    >>> _range_text(_Spread(0.42, 0.33), _Spread(110.0, 80.0), 1.0), _range_text(_Spread(0.02, 0.01), _Spread(0.4, 0.3), 1.0)
    ('[0, 255]', '[-0.2, 29.8]')
    >>> _range_text(_Spread(0.3, 0.1), _Spread(50.0, 0.0), 100.0)
    '[20, 120]'
    """
    width = seen.deviation / learned.deviation if seen.deviation and learned.deviation else usual
    low = seen.mean - learned.mean * width
    near = [ends for ends in USUAL if learned.difference(seen.within(*ends)) < 2] if seen.deviation else []
    if near:
        ends = min(near, key=lambda ends: learned.difference(seen.within(*ends)))
        return f"[{ends[0]:g}, {ends[1]:g}]"
    digits = max(3, math.ceil(math.log10(max(abs(low), width) / width)) + 3)
    return f"[{_plain(low, digits)}, {_plain(low + width, digits)}]"


def _plain(number: float, digits: int) -> str:
    """Return a rounded number without an exponent, as a person writes it."""
    return f"{float(f'{number:.{digits}g}'):.15g}"
