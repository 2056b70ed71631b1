"""The part of an image on which settings are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from halotile.errors import ConfigError, InputUnreadable
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.images.planes import choose_planes
from halotile.storage.rim import Array, Readable
from halotile.storage.views import measured, readable_parts
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.noise.estimate import SAMPLES, as_square, plane_regions, sample_regions
from halotile.tasks.trials.place import Spans

EDGE = 512
"""Edge of a crop in pixels."""
CANDIDATES = 16
"""Places of which the one with most structure is taken."""
SMALLEST, NARROWEST = 16, 4
"""Edge of the smallest square crop whose figures mean something, and of the narrowest one that has neighbours to go by."""
LARGEST = 1024
"""Edge of the largest crop that is asked for."""
COARSE = 8
"""Edge of the squares whose medians are compared."""


def choose_crop(source: Source, task: DenoiseTask, at: Mapping[str, int], region: Region | None) -> Spans:
    """Return the place to compare settings on; where it is left open, the one with most structure of a fixed number of places.

    Parameters
    ----------
    source : Source
        The image as it is stored.
    task : DenoiseTask
        What is known of its holes.
    at : mapping of str to int
        Index along axes other than y and x.
    region : Region, optional
        Rows and columns.

    Raises
    ------
    ConfigError
        When there is no such place, or it is too large.
    InputUnreadable
        When no candidate can be read.
    """
    if region is not None and max(region.shape) > LARGEST:
        rows, columns = region.shape
        raise ConfigError(
            f"the region has {rows:,} × {columns:,} pixels, and a crop is compared pixel by pixel. "
            f"Write one of at most {LARGEST} × {LARGEST}, or leave it out."
        )
    planes = choose_planes(source, at, region)
    if min(planes.shape) < NARROWEST or math.prod(planes.shape) < SMALLEST**2:
        raise ConfigError(
            f"the crop has {planes.shape[0]} × {planes.shape[1]} pixels, too few to compare settings by. "
            f"Take at least {SMALLEST} × {SMALLEST}."
        )
    fixed = {axis: (index, index + 1) for axis, index in planes.at.items()}
    if planes.colour:
        fixed["c"] = (0, planes.samples)
    if region is not None:
        fixed |= {"y": (region.start[0], region.stop[0]), "x": (region.start[1], region.stop[1])}
    candidates = _candidates(source, fixed)
    best = candidates[0]
    if len(candidates) > 1:
        parts = readable_parts(image_of(source, task), candidates)
        if not parts:
            raise InputUnreadable(
                f"{source.path}: none of {len(candidates)} places can be read. Write a region."
            )
        best = max(parts, key=lambda part: _structure(part[1], source.axes))[0]
    return dict(zip(source.axes, zip(best.start, best.stop, strict=True), strict=True))


def image_of(source: Readable, task: DenoiseTask) -> Readable:
    """Return the image with NaN in its holes, and where it is masked."""
    value, roles = task.holes.value if task.holes else None, task.roles
    return measured(source, value, task.sides.get("mask"), roles.spatial, len(roles.axes))


def samples_at(source: Source, task: DenoiseTask, place: Spans) -> Iterator[list[Array]]:
    """Yield samples of the whole plane of each channel of a place, in the units of the file."""
    axes, image = source.axes, image_of(source, task)
    square = axes.index("y"), axes.index("x")
    tiled = {task.roles.axes[i] for i in task.roles.spatial}
    for channel in range(*place.get("c", (0, 1))):
        at = {i: place[a][0] if a != "c" else channel for i, a in enumerate(axes) if a not in tiled}
        regions = plane_regions(source.shape, square, at, SAMPLES)
        yield [as_square(part, square) for _, part in readable_parts(image, regions)]


def _candidates(source: Source, fixed: Spans) -> list[Region]:
    """Return places spread evenly over the axes that are not fixed."""
    square = source.axes.index("y"), source.axes.index("x")
    spread = sample_regions(source.shape, CANDIDATES, square, EDGE)
    ends = [fixed.get(axis) for axis in source.axes]
    moved = [
        Region(
            tuple(end[0] if end else a for a, end in zip(region.start, ends, strict=True)),
            tuple(end[1] if end else b for b, end in zip(region.stop, ends, strict=True)),
        )
        for region in spread
    ]
    return list(dict.fromkeys(moved))


def _structure(pixels: Array, axes: tuple[str, ...]) -> float:
    """Return the mean difference of neighbouring squares; those without measured pixels count as 0."""
    image = np.moveaxis(pixels.astype(np.float64), (axes.index("y"), axes.index("x")), (-2, -1))
    rows, columns = (max(1, n // COARSE) for n in image.shape[-2:])
    edge = min(COARSE, *image.shape[-2:])
    image = image[..., : rows * edge, : columns * edge]
    # Medians, which neither noise nor single bright pixels move much.
    squares = np.median(image.reshape(*image.shape[:-2], rows, edge, columns, edge), (-3, -1))
    steps = [np.abs(np.diff(squares, axis=axis)) for axis in (-2, -1)]
    return float(sum(np.where(np.isfinite(step), step, 0).sum() for step in steps) / squares.size)
