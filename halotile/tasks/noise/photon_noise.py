"""Photon noise of an image: its gain, offset and read noise; and planes as samples show them."""

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

# Ratio of the variance that other planes predict for one and its own, or the inverse, up to which their noise is taken
# for it.
SUITS = 2.0


class PhotonNoise(NamedTuple):
    """Noise of an image that counts photons: ``z = gain P(x) + offset + read_sigma n``, P a Poisson count, n standard normal.

    >>> float(PhotonNoise(np.array(2.0), np.array(100.0), np.array(3.0)).variance)
    -191.0
    >>> PhotonNoise.from_values(np.array(2.0), np.array(-191.0)).to_json()
    {'gain': 2.0, 'offset': 95.5, 'read_sigma': 0.0}
    """

    # value of one photon, in units of the image: one number, or one for each plane. 0 where no photons are counted:
    # noise of one level
    gain: Values
    offset: Values  # value without any photon, of the same shape
    read_sigma: Values  # standard deviation of the noise of the readout, of the same shape

    @classmethod
    def from_values(cls, gain: Values, variance: Values) -> Self:
        """The noise of variance ``gain * z + variance`` at a pixel of mean ``z``: an image does not tell offset and readout apart."""
        offset = np.maximum(-variance / np.where(gain > 0, gain, 1.0), 0.0) + 0.0
        return cls(gain, offset, np.sqrt(np.maximum(variance, 0.0)))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """The noise that :meth:`to_json` returned."""
        return cls(*(np.asarray(stored[name], np.float64) for name in cls._fields))

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        return {name: part.tolist() for name, part in self._asdict().items()}

    @property
    def variance(self) -> Values:
        """Variance of the noise less ``gain`` times the value of the pixel."""
        with np.errstate(over="ignore"):  # infinite for values that have no squares
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
        return PhotonNoise.from_values(*(np.reshape([fit[i] for fit in fits], (-1, 1, 1)) for i in (0, 1)))
    levels = np.reshape([plane_level(squares) for squares in planes], (-1, 1, 1))
    return PhotonNoise(0 * levels, 0 * levels, np.where(levels > 0, levels, np.nan))


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
    seen: dict[tuple[int, ...], list[tuple[float, float]]] = {}  # median and level of each plane
    windows: dict[tuple[int, ...], list[PlaneWindows]] = {}
    joined: dict[tuple[int, ...], Fit | None] = {}
    for place, squares in sampled_planes(source, spatial, looped, PLANES if shared else None, apart=channel):
        values, found, at = finite_values(squares), windows_of(squares), tuple(place[n] for n in kept)
        assert found
        median = float(np.median(values)) if values.size else 0.0
        seen.setdefault(at, []).append((median, plane_level(squares)))
        if shared:
            windows.setdefault(at, []).append(found)
        else:
            joined[at] = fit_noise(found)
    joined |= {at: fit_noise(PlaneWindows.joined(alike(planes))) for at, planes in windows.items()}
    fits = {at: fit for at, fit in joined.items() if fit and fit.gain}
    clear = {at: fit for at, fit in fits.items() if fit.is_clear}
    if not fits or (clearly and len(clear) < len(seen)):
        return None
    for at in seen.keys() - clear.keys():
        like = [] if shared else [fit for other, fit in clear.items() if all(other[i] == at[i] for i in channel)]
        known = [plane for plane in seen[at] if not math.isnan(plane[1])] or [(0.0, 0.0)]
        others = _fit_of_even(like, *np.median(known, axis=0).tolist())
        fits[at] = others if others.gain else fits.get(at, others)
    lengths = tuple(source.shape[axis] for axis in looped)
    parts = [np.array([fits[tuple(at[n] for n in kept)][i] for at in np.ndindex(lengths)]) for i in range(2)]
    gain, variance = (part.reshape(lengths) if len(fits) > 1 else part[0] for part in parts)
    return PhotonNoise.from_values(gain, variance)


def alike(planes: Sequence[PlaneWindows]) -> Sequence[PlaneWindows]:
    """The planes that have as much noise as most; all of fewer than three.

    Correlated noise has small details: one plane of it would pass for the quiet part of all.
    """
    known = [(plane, fit) for plane, fit in zip(planes, map(fit_noise, planes), strict=True) if fit]
    if len(known) < 3:
        return planes
    gain, variance, middle = np.array([(fit.gain, fit.variance, plane.middle) for plane, fit in known]).T
    expected = np.outer(middle, gain) + variance  # of each plane by each fit
    ratios = expected.diagonal() / np.maximum(np.median(expected.clip(0), 1), np.finfo(float).tiny)
    kept = [plane for (plane, _), ratio in zip(known, ratios, strict=True) if 1 / SUITS <= ratio <= SUITS]
    return kept if 2 * len(kept) > len(known) else planes


def _fit_of_even(others: Sequence[Fit], median: float, level: float) -> Fit:
    """Return the noise of a plane whose own does not grow with brightness: that of the others where it suits, else of one level."""
    if others:
        gain, variance = (float(np.median([fit[i] for fit in others])) for i in range(2))
        suits = level > 0 and 1 / SUITS <= (gain * median + variance) / level**2 <= SUITS
        if suits or math.isnan(level):
            return Fit(gain, variance, level, is_clear=False)
    return Fit(0.0, np.nan_to_num(level) ** 2, level, is_clear=False)


PLANES, SURVEYED = 64, 16  # planes that are surveyed, and squares of each, at most
ROUNDED = 0.25  # least variance of whole numbers: details of one step are none of noise
TAIL = 1e-3  # share of the samples below the range of values, and above


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


def survey_planes(
    source: Readable, spatial: Sequence[int], looped: Sequence[int] = (), *, correlated: bool = True
) -> tuple[PlaneSurvey, ...]:
    """Look at samples of the planes, spread evenly where there are many; at none that are too small or cannot be read.

    ``source``: image; ``spatial, looped``: positions of the spatial axes, and of those of which each index is a plane by itself; ``correlated``: whether the
    correlation of the noise is wanted.
    """
    found = []
    with suppress(InputError):  # a run says so, where it matters
        for place, squares in sampled_planes(source, spatial, looped, PLANES, skips=True, squares=SURVEYED):
            values, (level, gain, variance) = finite_values(squares), noise_of_plane(squares)
            low, high = np.quantile(values, [TAIL, 1 - TAIL]).tolist() if values.size else (math.nan, math.nan)
            defects = sum(len(outliers(square, gain, variance)) for square in squares)
            ends, correlation = Ends.from_values(values), noise_correlation(squares) if correlated else None
            found.append(PlaneSurvey(place, low, high, level, gain > 0, ends, correlation, defects, values.size))
    return tuple(found)


def noise_of_plane(squares: Sequence[Values]) -> tuple[PlaneLevel, float, float]:
    """Return the level of a plane, and its gain and variance: of its photons where these are clear, or else of the level; no less than that of rounding."""
    fit = fit_noise(windows := windows_of(squares))
    found = measure_plane(squares, fit if windows and windows.whole.all() else None)
    if fit and fit.is_clear:
        return found, fit.gain, fit.variance
    values = finite_values(squares)
    is_whole = values.any() and not np.any(values % 1)
    return found, 0.0, max(found.level * found.level, ROUNDED * is_whole) if found.level > 0 else 0.0
