"""The residual of a finished job: was noise taken away, and nothing else, at a few places of the image."""

from __future__ import annotations

import math

import numpy as np

from halotile.graphs.jobs.denoise.words import residual_row, residual_warning
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.plans.notes import place_text
from halotile.storage.arrays import open_array
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.views import readable_parts
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.noise.estimate import Values, as_square, plane_level, plane_regions
from halotile.tasks.noise.known import has_photons, measured_at, noise_at
from halotile.tasks.noise.residual import Residual, local_mean

PLANES, PLACES = 4, 16
"""Planes that are looked at, at most, and squares of all of them together."""


def inspect_residual(task: DenoiseTask, output: OutputPath) -> Inspection:
    """Measure the residual of an image that was denoised; nothing is found where there is no noise, or no common shape."""
    if task.denoiser.scale != 1 or task.source.dtype.kind == "b":
        return Inspection()
    result = open_array(str(output))
    if result.shape != task.source.shape:
        return Inspection()
    found = {}
    places = _planes(task)
    for place in places:
        residual = _of_plane(task, result, place, max(1, PLACES // len(places)))
        if residual and residual.ratio > 0:
            found[place] = residual
    if not found:
        return Inspection()
    names = [place_text(task.roles, place) for place in found]
    figures = [
        {"plane": name, "ratio": r.ratio, "correlation": r.correlation, "holds_structure": r.is_structured}
        for name, r in zip(names, found.values(), strict=True)
    ]
    warning = residual_warning(names, list(found.values()))
    row = residual_row(names, list(found.values()))
    return Inspection({"residual": figures}, [row], [warning] if warning else [])


def _planes(task: DenoiseTask) -> list[tuple[int, ...]]:
    """Return the places of planes on the looped axes; of many, some that are spread evenly."""
    lengths = [task.source.shape[i] for i in task.roles.looped]
    count = math.prod(lengths)
    numbers = {round(n) for n in np.linspace(0, count - 1, min(count, PLANES))}
    return [
        tuple(int(i) for i in np.unravel_index(number, lengths)) if lengths else ()
        for number in sorted(numbers)
    ]


def _of_plane(task: DenoiseTask, result: Readable, place: tuple[int, ...], count: int) -> Residual | None:
    """Return the residual of a plane; None where it has no noise."""
    roles = task.roles
    square = (roles.spatial[-2], roles.spatial[-1])
    at = dict(zip(roles.looped, place, strict=True))
    regions = plane_regions(task.source.shape, square, at, count)
    squares: list[tuple[Region, Values, Values]] = []
    for region, pixels in readable_parts(task.source, regions):
        measured = np.where(measured_at(task, region, pixels), pixels, np.nan)
        denoised = as_square(result.read(region), square)
        squares.append((region, as_square(measured, square), denoised))
    level = plane_level([noisy for _, noisy, _ in squares])
    if not level > 0:
        return None
    return Residual.of(_relative(task, *parts, level) for parts in squares)


def _relative(task: DenoiseTask, region: Region, noisy: Values, denoised: Values, level: float) -> Values:
    """Return the residual relative to the noise."""
    square = task.roles.spatial[-2:]
    brightness = local_mean(noisy) if has_photons(task) else noisy
    shaped = (brightness if square[0] < square[1] else brightness.T).reshape(region.shape)
    noise = as_square(noise_at(task, region, shaped, level), square)
    return (noisy - denoised) / np.where(noise > 0, noise, np.nan)
