"""Places of an image on which a user's code is tried: a dark, a bright and a varied one, as they lie and side by side.

Code that goes by a property of its whole input, such as its least value or its mean, gives other pixels in tiles only where tiles
differ in it. How an image differs from place to place is known from the image alone. Needs no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Depth, Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import readable_parts
from halotile.tasks.noise.estimate import sample_regions
from halotile.tasks.roles import Roles

CANDIDATES = 16
"""Places that are looked at."""
LARGEST = 1 << 22
"""Most pixels of a sample."""
EDGE = {1: 4096, 2: 128, 3: 32}
"""Least edge of a place, in pixels."""

Sample = NDArray[np.float32]
"""Pixels of shape (channels, *spatial), in the units that the denoiser computes in."""


def choose_samples(
    source: Readable, roles: Roles, values: tuple[float, float] | None, depth: Depth, align: int
) -> list[Sample]:
    """Read samples of twice the edge of a tile with its halo or, on a short axis, of all of it.

    Parameters
    ----------
    source : Readable
        The image.
    roles : Roles
        Its axes.
    values : tuple of float, optional
        Values that are mapped to 0 and 1.
    depth : tuple of (int, int)
        The halo on each tiled axis.
    align : int
        Number of pixels of which tile origins must be multiples.
    """
    dims = len(roles.spatial)
    edge = _multiple(max(EDGE[dims], max(map(max, depth)) + EDGE[dims] // 2), align)
    if (2 * edge) ** dims * (source.shape[roles.channel] if roles.channel is not None else 1) > LARGEST:
        return []

    def read(regions: Iterable[Region]) -> Iterator[tuple[Region, Sample]]:
        for region in regions:
            for _, pixels in readable_parts(source, [_with_channels(region, source, roles)]):
                yield region, _sample(pixels, roles, values)

    candidates = sample_regions(source.shape, CANDIDATES, roles.spatial, edge)
    places = [(float(pixels.mean()), float(pixels.std()), region) for region, pixels in read(candidates)]
    if not places:
        return []
    by_mean = [region for *_, region in sorted(places, key=lambda place: place[0])]
    varied = max(places, key=lambda place: place[1])[2]
    chosen = dict.fromkeys([by_mean[0], by_mean[-1], varied])
    around = [pixels for _, pixels in read(_grown(region, source.shape, roles, edge) for region in chosen)]
    if any(source.shape[axis] < edge for axis in roles.spatial) or len(places) == 1:
        return around
    between = [varied, *[by_mean[len(by_mean) // 2]] * (2**dims - 3)]
    corners = [pixels for _, pixels in read([by_mean[0], *between, by_mean[-1]])]
    return [*around, _side_by_side(corners, dims)] if dims > 1 else around


def quarters(lengths: tuple[int, ...], align: int) -> list[Region]:
    """The halves of a sample on each axis, combined: its tiles.

    Examples
    --------
    >>> [region.shape for region in quarters((256, 100), 16)]
    [(128, 48), (128, 52), (128, 48), (128, 52)]
    """
    cuts = [sorted({0, n // 2 // align * align, n}) for n in lengths]
    return [
        Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        for pairs in itertools.product(*map(itertools.pairwise, cuts))
    ]


def _multiple(edge: int, align: int) -> int:
    unit = math.lcm(16, align)
    return -(-edge // unit) * unit


def _with_channels(region: Region, source: Readable, roles: Roles) -> Region:
    """The region with all channels."""
    if roles.channel is None:
        return region
    start, stop = list(region.start), list(region.stop)
    start[roles.channel], stop[roles.channel] = 0, source.shape[roles.channel]
    return Region(tuple(start), tuple(stop))


def _grown(region: Region, shape: tuple[int, ...], roles: Roles, edge: int) -> Region:
    """The region with as much again of the image around it, on the tiled axes."""
    start, stop = list(region.start), list(region.stop)
    for axis in roles.spatial:
        length = min(2 * edge, shape[axis])
        start[axis] = min(max(0, start[axis] - edge // 2), shape[axis] - length)
        stop[axis] = start[axis] + length
    return Region(tuple(start), tuple(stop))


def _sample(read: Pixels, roles: Roles, values: tuple[float, float] | None) -> Sample:
    """Pixels as a sample, with the mean of the finite pixels in place of the others."""
    low, high = values or (0.0, 1.0)
    arranged = roles.arrange(read).astype(np.float64)
    pixels = ((arranged.reshape(arranged.shape[len(roles.looped) :]) - low) / (high - low)).astype(np.float32)
    finite = np.isfinite(pixels)
    if not finite.all():
        pixels[~finite] = pixels[finite].mean() if finite.any() else 0.0
    return pixels


def _side_by_side(places: list[Sample], dims: int) -> Sample:
    """One sample of places at its corners, the first and the last diagonally opposite."""
    rows = places
    for axis in range(dims, 0, -1):
        rows = [np.concatenate(pair, axis=axis) for pair in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]
