"""The known noise at a region, and the residual of a denoised image, what was taken away: its size relative to the noise, and the structure that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels
from halotile.storage.views import PlaneValues, axes_of_side, side_at
from halotile.tasks.holes import Valid
from halotile.tasks.noise.noise_correlation import direction_text
from halotile.tasks.noise.quiet_windows import Values, finite_values

if TYPE_CHECKING:
    from halotile.tasks.denoise_block import DenoiseTask

PART = 128
"""Edge of the parts whose correlations are measured one by one, in pixels: structure fills a part of an image."""
STRUCTURED = 0.15
"""Correlation above which a residual holds structure: see docs/choosing.md for what it was measured on."""
SHIFTED = 0.5
"""Mean above which, relative to the noise, brightness was changed: filters keep it."""
MEASURED = 0.25
"""Share of the pixels of a part that has to be measured, not holes."""


@dataclass(frozen=True)
class Residual:
    """Statistics of a residual, ``noisy - denoised``.

    >>> noise = np.random.default_rng(0).standard_normal((256, 256))
    >>> found = Residual.of([noise])
    >>> round(found.ratio, 1), abs(found.correlation) < 0.02, found.is_structured
    (1.0, True, False)
    >>> Residual.of([noise + np.sin(np.arange(256) / 5)]).is_structured
    True
    >>> Residual.of([noise + 1]).is_shifted
    True
    """

    # standard deviation relative to that of the noise: 1 where all noise was taken away and nothing else
    ratio: float
    # correlation of neighbouring pixels along both axes, each exceeded in a quarter of the parts: about
    # 0 for white noise, less where noise was only smoothed, more where the residual holds structure of the image
    correlations: tuple[float, float]
    # mean relative to the noise, or median where that is closer to 0: a few hot pixels have a large mean, skewed
    # noise has a median of its own
    shift: float = 0.0
    axes: tuple[str, str] = ("y", "x")  # letters of both axes

    @classmethod
    def of(cls, residuals: Iterable[Values], axes: tuple[str, str] = ("y", "x")) -> Residual:
        """The statistics of places of one image.

        ``residuals``: rows and columns, relative to the standard deviation of the noise; NaN in holes; ``axes``: letters of both axes.
        """
        residuals = list(residuals)
        values = finite_values(residuals)
        found = [r for part in _parts(residuals) if np.isfinite(r := _correlations(part)).all()]
        if not values.size:
            return cls(0.0, (0.0, 0.0), axes=axes)
        down, along = np.quantile(found, 0.75, axis=0).tolist() if found else (0.0, 0.0)
        shift = float(min(values.mean(), np.median(values), key=abs))
        return cls(float(values.std()), (down, along), shift, axes)

    @property
    def correlation(self) -> float:
        """The larger correlation of both axes."""
        return max(self.correlations)

    @property
    def correlation_text(self) -> str:
        """The larger correlation, and its axis."""
        axis = self.axes[self.correlations.index(self.correlation)]
        return f"{round(self.correlation, 2) + 0.0:.2f} {direction_text(axis)}"

    def correlations_json(self) -> dict[str, Any]:
        """The larger correlation, and that of each axis, for programs."""
        return {"correlation": self.correlation, "correlations": dict(zip(self.axes, self.correlations, strict=True))}

    @property
    def is_structured(self) -> bool:
        """True if more than noise was taken away."""
        return self.correlation > STRUCTURED

    @property
    def is_shifted(self) -> bool:
        """True if the brightness was changed."""
        return abs(self.shift) > SHIFTED


def local_mean(pixels: NDArray[Any], reach: int = 2) -> Values:
    """Mean of the finite pixels around each pixel of an image of rows and columns, on squares of ``2 * reach + 1`` pixels; NaN without any."""
    windows = [_window_sums(part, reach) for part in (np.nan_to_num(pixels), np.isfinite(pixels))]
    with np.errstate(invalid="ignore"):
        mean: Values = windows[0] / windows[1]
    return mean


def _window_sums(pixels: NDArray[Any], reach: int) -> Values:
    sums = pixels.astype(np.float64)
    for axis in (0, 1):
        width = [(reach, reach) if i == axis else (0, 0) for i in (0, 1)]
        padded = np.pad(sums, width)
        sums = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis).sum(-1)
    return sums


def _parts(residuals: Iterable[Values]) -> Iterator[Values]:
    for residual in residuals:
        rows, columns = (max(1, round(n / PART)) for n in residual.shape)
        for band in np.array_split(residual, rows, 0):
            yield from np.array_split(band, columns, 1)


def _correlations(part: Values) -> Values:
    """Correlation with the next pixel, along each axis; NaN where nothing varies, or most is not finite."""
    finite = np.isfinite(part)
    if finite.mean() < MEASURED:
        return np.full(2, math.nan)
    centred = np.where(finite, part - part[finite].mean(), 0.0)
    variance = np.square(centred).sum() / finite.sum()
    products = [(each[1:] * each[:-1]).sum() for each in (centred, centred.T)]
    pairs = [(each[1:] & each[:-1]).sum() for each in (finite, finite.T)]
    if not variance or not all(pairs):
        return np.full(2, math.nan)
    found: Values = np.divide(products, pairs) / variance
    return found


def measured_at(task: DenoiseTask, region: Region, pixels: Pixels) -> Valid:
    """The pixels of a region that are no holes and that no mask keeps as they are."""
    valid = task.holes.valid(pixels) if task.holes else None
    kept = np.isfinite(pixels) if valid is None else valid & np.isfinite(pixels)
    return kept & (_side_at(task, "mask", region) != 0) if "mask" in task.sides else kept


def noise_at(task: DenoiseTask, region: Region, brightness: Array, level: Array | float) -> Array:
    """The standard deviation of the noise of each pixel, in the units of the file.

    ``task``: its noise map, or its photon noise, comes before `level`; ``region``: place; ``brightness``: image there, of less noise; ``level``:
    noise level, of a shape that broadcasts.
    """
    if has_photons(task):
        gain, variance = (
            _side_at(task, name, region) if name in task.sides else getattr(task.denoiser, name)
            for name in ("gain", "variance")
        )
        return photon_sigma(gain, variance, brightness)
    if has_noise_map(task):
        return np.broadcast_to(noise_map_at(task, region), brightness.shape)
    return np.broadcast_to(np.asarray(level, np.float64), brightness.shape)


def photon_sigma(gain: Array | float, variance: Array | float, brightness: Array) -> Array:
    """The standard deviation of the noise of photons at pixels of that brightness, all in the units of the file."""
    # No less than that of one photon: the brightness is not exact.
    sigma: Array = np.sqrt(np.maximum(gain * brightness + variance, np.square(gain)))
    return sigma


def noise_map_at(task: DenoiseTask, region: Region) -> Array:
    """The noise map of a task at a region, in the units of the file."""
    low, high = task.tiling.range or (0.0, 1.0)
    return np.broadcast_to(_side_at(task, "sigma", region) * (high - low), region.shape)


def has_photons(task: DenoiseTask) -> bool:
    """True where the noise of a task is that of photons."""
    return "gain" in task.denoiser.side_inputs


def has_noise_map(task: DenoiseTask) -> bool:
    """True where a job has a noise level for each pixel."""
    return "sigma" in task.sides and not isinstance(task.sides["sigma"], PlaneValues)


def _side_at(task: DenoiseTask, name: str, region: Region) -> Array:
    """A side input, of a shape that broadcasts with that of the region."""
    side, roles = task.sides[name], task.roles
    if isinstance(side, PlaneValues):
        return side.read(region)
    return side_at(side, axes_of_side(side, roles.spatial, len(roles.axes)), region)
