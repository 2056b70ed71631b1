"""Photon noise of an image: its gain, offset and read noise; and planes as samples show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from halotile.errors import InputError
from halotile.storage.rim import Readable
from halotile.tasks.noise.defects import outliers
from halotile.tasks.noise.estimate import Ends, PlaneLevel, measure_plane, plane_level, sampled_planes
from halotile.tasks.noise.noise_correlation import NoiseCorrelation, noise_correlation
from halotile.tasks.noise.quiet_windows import Fit, PlaneWindows, Values, finite_values, fit_noise, windows_of

SUITS = 2.0
"""Ratio of the variance that other planes predict for one and its own, or the inverse, up to which their noise is taken for it."""


@dataclass(frozen=True)
class PhotonNoise:
    """Noise of an image that counts photons: ``z = gain P(x) + offset + read_sigma n``, P a Poisson count, n standard normal.

    >>> float(PhotonNoise(np.array(2.0), np.array(100.0), np.array(3.0)).variance)
    -191.0
    >>> PhotonNoise.of(np.array(2.0), np.array(-191.0)).to_json()
    {'gain': 2.0, 'offset': 95.5, 'read_sigma': 0.0}
    """

    # value of one photon, in units of the image: one number, or one for each plane. 0 where no photons are counted:
    # noise of one level
    gain: Values
    offset: Values  # value without any photon, of the same shape
    read_sigma: Values  # standard deviation of the noise of the readout, of the same shape

    @classmethod
    def of(cls, gain: Values, variance: Values) -> Self:
        """The noise of variance ``gain * z + variance`` at a pixel of mean ``z``: an image does not tell offset and readout apart."""
        offset = np.maximum(-variance / np.where(gain > 0, gain, 1.0), 0.0) + 0.0
        return cls(gain, offset, np.sqrt(np.maximum(variance, 0.0)))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """The noise that :meth:`to_json` returned."""
        return cls(*(np.asarray(stored[name], np.float64) for name in ("gain", "offset", "read_sigma")))

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        return {name: getattr(self, name).tolist() for name in ("gain", "offset", "read_sigma")}

    @property
    def variance(self) -> Values:
        """Variance of the noise less ``gain`` times the value of the pixel."""
        variance: Values = self.read_sigma**2 - self.gain * self.offset
        return variance


def noise_of_planes(planes: Sequence[Sequence[Values]]) -> PhotonNoise:
    """Noise of an image of some channels, (channels, rows, columns), by samples of the plane of each; NaN where there is none.

    Photon noise where it clearly grows with brightness in every plane: one level for dark and bright alike would reward what leaves the noise of the bright.

    >>> rng = np.random.default_rng(0)
    >>> noise_of_planes([[rng.standard_normal((256, 256))]]).read_sigma.round(1).ravel().tolist()
    [1.0]
    """
    fits = [fit for fit in map(fit_noise, map(windows_of, planes)) if fit and fit.is_clear]
    if len(fits) == len(planes):
        found = PhotonNoise.of(np.array([fit.gain for fit in fits]), np.array([fit.variance for fit in fits]))
        return per_channel(found.gain, found.offset, found.read_sigma)
    levels = np.array([plane_level(squares) for squares in planes])
    return per_channel(0 * levels, 0 * levels, np.where(levels > 0, levels, np.nan))


def per_channel(*parts: Any) -> PhotonNoise:
    """Return the noise of several channels, which broadcasts to an image of them."""
    gain, offset, read_sigma = (np.reshape(np.asarray(part, np.float64), (-1, 1, 1)) for part in parts)
    return PhotonNoise(gain, offset, read_sigma)


class Even(NamedTuple):
    """A plane in which noise does not grow with brightness."""

    median: float
    level: float
    """Its noise level; NaN where nothing is measured."""


def estimate_photon_noise(
    source: Readable,  # image
    # spatial, looped: positions of the spatial axes, and of those of which each index is a plane by itself
    spatial: Sequence[int],
    looped: Sequence[int] = (),
    *,
    apart: Sequence[int] = (),  # looped axes whose indices share no noise: channels
    shared: bool = True,  # one noise for all planes of a channel, which one detector measured
    clearly: bool = False,  # require that the noise of every detector clearly grows with brightness
) -> PhotonNoise | None:
    """Estimate the photon noise of every detector from the samples of :func:`~halotile.tasks.noise.estimate.estimate_noise_levels`.

    A detector is a channel, or a plane if nothing is ``shared``. One whose noise does not grow with brightness gets noise of its own level, with a
    gain of 0; a plane where that is not clear, such as one of equal brightness, gets the median of the clear ones of its channel where that is as much noise as it has.

    Returns
    -------
    PhotonNoise or None
        One number for each index of the looped axes, or one for all; None where no detector shows such noise.
    """
    channel = [number for number, axis in enumerate(looped) if axis in apart]
    kept = channel if shared else list(range(len(looped)))
    windows: dict[tuple[int, ...], list[PlaneWindows]] = {}
    evens: dict[tuple[int, ...], list[Even]] = {}
    for place, squares in sampled_planes(source, spatial, looped):
        at, values = tuple(place[number] for number in kept), finite_values(squares)
        evens.setdefault(at, []).append(Even(float(np.median(values)) if values.size else 0.0, plane_level(squares)))
        if (found := windows_of(squares)) is not None:
            windows.setdefault(at, []).append(found)
    fits = {at: fit for at, parts in windows.items() if (fit := fit_noise(PlaneWindows.joined(parts))) and fit.gain}
    if not fits or (clearly and not (len(fits) == len(evens) and all(fit.is_clear for fit in fits.values()))):
        return None
    clear = {at: fit for at, fit in fits.items() if fit.is_clear}
    for at, planes in evens.items():
        if at not in clear:
            like = [] if shared else [fit for other, fit in clear.items() if all(other[i] == at[i] for i in channel)]
            others = _fit_of_even(Even(*np.nanmedian(planes, axis=0).tolist()), like)
            fits[at] = others if others.gain else fits.get(at, others)
    lengths = tuple(source.shape[axis] for axis in looped)
    parts = [np.array([fits[tuple(at[n] for n in kept)][i] for at in np.ndindex(lengths)]) for i in range(2)]
    gain, variance = (part.reshape(lengths) if len(fits) > 1 else part[0] for part in parts)
    return PhotonNoise.of(gain, variance)


def _fit_of_even(even: Even, others: Sequence[Fit]) -> Fit:
    """Return the noise of a plane whose own does not grow with brightness: that of the others where it suits, else of one level."""
    measured = not math.isnan(even.level)
    if others:
        gain, variance = (float(np.median([fit[i] for fit in others])) for i in range(2))
        predicted = gain * even.median + variance
        suits = even.level > 0 and 1 / SUITS <= predicted / even.level**2 <= SUITS
        if suits or not measured:
            return Fit(gain, variance, even.level, is_clear=False)
    return Fit(0.0, even.level**2 if measured else 0.0, even.level, is_clear=False)


PLANES = 64
"""Planes that are looked at, at most."""
ROUNDED = 0.25
"""Least variance of whole numbers: details of one step are none of noise."""
TAIL = 1e-3
"""Share of the samples below the range of values, and above."""


@dataclass(frozen=True)
class PlaneSurvey:
    """A plane as its samples show it."""

    place: tuple[int, ...]  # its index on each looped axis
    # low, high: range of all but the least and largest values, in the units of the file; NaN without any
    low: float
    high: float
    noise: PlaneLevel  # noise level in the same units; 0 or NaN where there is none
    grows: bool  # true if the noise clearly grows with brightness
    ends: Ends  # its least and largest values
    correlation: NoiseCorrelation | None  # that of its noise; None where too little is quiet
    defects: int  # samples that the noise does not explain
    size: int  # number of the samples


def survey_planes(source: Readable, spatial: Sequence[int], looped: Sequence[int] = ()) -> tuple[PlaneSurvey, ...]:
    """Look at samples of the planes, spread evenly where there are many; at none that are too small or cannot be read.

    ``source``: image; ``spatial, looped``: positions of the spatial axes, and of those of which each index is a plane by itself.
    """
    found = []
    with suppress(InputError):  # a run says so, where it matters
        for place, squares in sampled_planes(source, spatial, looped, PLANES):
            found.append(_surveyed(place, squares))
    return tuple(found)


def _surveyed(place: tuple[int, ...], squares: list[Values]) -> PlaneSurvey:
    values = finite_values(squares)
    low, high = np.quantile(values, [TAIL, 1 - TAIL]) if values.size else (math.nan, math.nan)
    fit = fit_noise(windows_of(squares))
    grows, level = fit is not None and fit.is_clear, measure_plane(squares)
    gain, variance = noise_of_plane(squares, fit, level.level)
    ends, correlation = Ends.of(values), noise_correlation(squares)
    defects = sum(len(outliers(square, gain, variance)) for square in squares)
    return PlaneSurvey(place, float(low), float(high), level, grows, ends, correlation, defects, values.size)


def noise_of_plane(squares: Sequence[Values], fit: Fit | None, level: float) -> tuple[float, float]:
    """Return the gain and the variance of a plane: that of its photons where the fit is clear, or else of one level; no less than that of rounding."""
    if fit is not None and fit.is_clear:
        return fit.gain, fit.variance
    values = finite_values(squares)
    is_whole = values.any() and not np.any(values % 1)
    return 0.0, max(level**2, ROUNDED * is_whole) if level > 0 else 0.0
