"""Noise and holes at a region of an image, as a denoising task knows them."""

from __future__ import annotations

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels
from halotile.storage.views import PlaneValues, axes_of_side, side_at
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.holes import Valid


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
    low, high = task.tiling.range or (0.0, 1.0)
    if has_photons(task):
        gain, variance = (
            _side_at(task, name, region) if name in task.sides else getattr(task.denoiser, name)
            for name in ("gain", "variance")
        )
        return photon_sigma(gain, variance, brightness)
    if has_noise_map(task):
        return np.broadcast_to(_side_at(task, "sigma", region) * (high - low), brightness.shape)
    return np.broadcast_to(np.asarray(level, np.float64), brightness.shape)


def photon_sigma(gain: Array | float, variance: Array | float, brightness: Array) -> Array:
    """The standard deviation of the noise of photons at pixels of that brightness, all in the units of the file."""
    # No less than that of one photon: the brightness is not exact.
    sigma: Array = np.sqrt(np.maximum(gain * brightness + variance, np.square(gain)))
    return sigma


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
