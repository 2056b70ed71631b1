"""Reach of a linear map, found by trials on small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Array
from halotile.tasks.operators.base import Shape
from halotile.tasks.operators.common.physics import REFUSALS

SIDES = (48, 160)
"""Edges of the trial images; the reach must be less than a quarter of them."""
FAINT = 1e-6
"""Values below this fraction of the largest are ignored: the rounding of a Fourier transform."""
SAME = 1e-5
"""Allowed difference between a window and the whole, relative to the largest value."""

ArrayMap = Callable[[Array], Array]
"""Takes an image and returns a measurement of the same shape."""


def find_reach(forward: ArrayMap, adjoint: ArrayMap, channels: int) -> int | None:
    """The reach of forward and adjoint; None for a map that needs the whole image, or varies over the image.

    Impulses in the middle, at edges and in corners give the reach; then windows computed by themselves are compared with
    the whole. A map that wraps around, changes the shape or works on one size only cannot
    run on windows.

    Examples
    --------
    >>> smooth = lambda image: image + np.pad(image, ((0, 0), (0, 0), (2, 0)))[..., :-2]
    >>> back = lambda image: image + np.pad(image, ((0, 0), (0, 0), (0, 2)))[..., 2:]
    >>> find_reach(smooth, back, channels=1), find_reach(lambda x: x * x.mean(), back, channels=1)
    (2, None)
    """
    for side in SIDES:
        shape = (channels, side, side)
        try:
            reach = max(_spread(operation, shape) for operation in (forward, adjoint))
            if 4 * reach < side:
                return reach if agrees(forward, adjoint, reach, shape) else None
        except REFUSALS:
            return None
    return None


def agrees(forward: ArrayMap, adjoint: ArrayMap, reach: int, shape: Shape) -> bool:
    """Return whether windows with a margin of the reach have the values of the whole image."""
    image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for operation, margin in ((forward, reach), (adjoint, 2 * reach)):
        whole = operation(image)
        for region in _regions(shape):
            window = widened(region, margin, shape)
            part = operation(image[window.slices])[region.relative_to(window).slices]
            if np.abs(part - whole[region.slices]).max() > SAME * np.abs(whole).max():
                return False
    return True


def widened(region: Region, margin: int, shape: Shape) -> Region:
    """The region with a margin along y and x and all of its channels, within the image."""
    grown = region.grow(((0, 0),) * (len(shape) - 2) + ((margin, margin),) * 2).clip(Region.whole(shape))
    if len(shape) < 3:
        return grown
    return Region((*grown.start[:-3], 0, *grown.start[-2:]), (*grown.stop[:-3], shape[-3], *grown.stop[-2:]))


def _spread(operation: ArrayMap, shape: Shape) -> int:
    """The largest distance to which an impulse spreads; the search ends at one that is too large."""
    far = 0
    for place in _places(shape[-1]):
        impulse = np.zeros(shape, np.float32)
        impulse[(slice(None), *place)] = 1
        answer = np.abs(operation(impulse))
        if answer.shape != shape:
            raise ValueError(f"{answer.shape} of {shape}")
        seen = np.argwhere(answer > FAINT * answer.max())[:, -2:]
        far = max(far, int(np.abs(seen - np.array(place)).max(initial=0)))
        if 4 * far >= shape[-1]:
            break
    return far


def _places(side: int) -> Iterator[tuple[int, int]]:
    """Yield the middle, an odd place, edges and corners."""
    yield from ((side // 2, side // 2), (side // 3, side // 2 + 3))
    ends = (0, 1, side - 1)
    yield from ((y, x) for y in ends for x in ends)
    yield from ((0, side // 2), (side // 2, side - 1))


def _regions(shape: Shape) -> Iterator[Region]:
    """Yield regions inside the image and at its rim."""
    n = shape[-1]
    spans = ((0, n // 4), (n // 3, n // 2 + 1), (n - 5, n))
    for top, bottom in spans:
        for left, right in spans:
            yield Region((0, top, left), (shape[0], bottom, right))
