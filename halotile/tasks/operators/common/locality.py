"""How far a linear map looks, found by trying it on small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.tasks.operators.base import Shape
from halotile.tasks.operators.common.physics import REFUSALS

SIDES = (48, 160)
"""Edges of the images that are tried; a map has to look less far than a fourth of them."""
FAINT = 1e-6
"""What is less than this part of the largest is not seen: the rounding of a Fourier transform."""
SAME = 1e-5
"""How near, relative to the largest value, a window has to come to the whole."""

Array = NDArray[Any]
Map = Callable[[Array], Array]
"""An image to a measurement of the same shape."""


def find_reach(forward: Map, adjoint: Map, channels: int) -> int | None:
    """How far forward and adjoint look; None for a map that sees all of the image, or that differs from place to place.

    Impulses in the middle, at edges and in corners say how far; then windows are computed by themselves and held
    against the whole. A map that wraps around, changes the shape or works on one size only is none that
    can run on windows.

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


def agrees(forward: Map, adjoint: Map, reach: int, shape: Shape) -> bool:
    """Whether windows that are this much wider than they have to be give the values of the whole."""
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


def _spread(operation: Map, shape: Shape) -> int:
    """The largest distance at which an impulse is seen, or one that is too large."""
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
    """The middle, an odd place, edges, corners."""
    yield from ((side // 2, side // 2), (side // 3, side // 2 + 3))
    ends = (0, 1, side - 1)
    yield from ((y, x) for y in ends for x in ends)
    yield from ((0, side // 2), (side // 2, side - 1))


def _regions(shape: Shape) -> Iterator[Region]:
    """Regions inside and at the rim."""
    n = shape[-1]
    spans = ((0, n // 4), (n // 3, n // 2 + 1), (n - 5, n))
    for top, bottom in spans:
        for left, right in spans:
            yield Region((0, top, left), (shape[0], bottom, right))
