"""Overlapping tiles of an image: cutting it, and assembling it again."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import ConfigError, WrongKind
from halotile.storage.rim import source_positions

BLENDINGS = ("linear", "hann")
Span = tuple[int, int]
Empty = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AxisTile:
    """One tile along one axis: its core, and the window that it is computed from.

    Cores fill the axis and do not overlap; windows may extend past its ends, where the image is mirrored.
    """

    core: Span
    window: Span
    inner: Span  # the window without its halo


def cut_axis(length: int, patch: int, overlap: int, stride: int = 1) -> tuple[AxisTile, ...]:
    """Cut an axis into tiles: windows of equal length, the last one moved back to end with the axis.

    With a stride, every window begins on a multiple of it: sizes are rounded up, and the last one ends past
    the axis.

    An axis no longer than a patch is one tile, without padding.

    >>> [(tile.core, tile.window) for tile in cut_axis(10, 4, 1)]
    [((0, 4), (-1, 5)), ((4, 8), (3, 9)), ((8, 10), (5, 11))]
    >>> cut_axis(4, 4, 1)
    (AxisTile(core=(0, 4), window=(0, 4), inner=(0, 4)),)
    >>> [tile.window for tile in cut_axis(15, 6, 3, 4)]
    [(-4, 12), (4, 20)]
    """
    patch, overlap = (-(-size // stride) * stride for size in (patch, overlap))
    if length <= patch:
        return (AxisTile((0, length), (0, length), (0, length)),)
    starts = [*range(0, length - patch, patch), -((patch - length) // stride) * stride]
    ends = [0, *(start + patch for start in starts)]
    return tuple(
        AxisTile((end, min(length, stop)), (start - overlap, stop + overlap), (start, stop))
        for start, end, stop in zip(starts, ends[:-1], ends[1:], strict=True)
    )


def blend_axis(tiles: Sequence[AxisTile], length: int, overlap: int, kind: str, scale: int = 1) -> list[NDArray[Any]]:
    """Weights of each tile on the part of its window inside the axis; they add up to 1 everywhere.

    ``length``: length of the axis; ``overlap``: halo width: weights rise from `overlap` pixels before the start of the inner part to as many after
    it; ``kind``: `linear` or `hann`; ``scale``: upscaling factor of the result.

    >>> [weights.round(2).tolist() for weights in blend_axis(cut_axis(6, 3, 1), 6, 1, "linear")]
    [[1.0, 1.0, 0.75, 0.25], [0.25, 0.75, 1.0, 1.0]]
    """
    at = (np.arange(length * scale) + 0.5) / scale
    ramps = []
    for start, stop in (tile.inner for tile in tiles):
        rise = np.ones_like(at) if start == 0 else _ramp(at - start, overlap)
        fall = np.ones_like(at) if stop >= length else _ramp(stop - at, overlap)
        ramps.append(np.minimum(rise, fall))
    shaped = [np.sin(ramp * np.pi / 2) ** 2 if kind == "hann" else ramp for ramp in ramps]
    total = np.sum(shaped, axis=0)
    return [
        (weights / total)[max(0, tile.window[0]) * scale : min(length, tile.window[1]) * scale]
        for weights, tile in zip(shaped, tiles, strict=True)
    ]


def _ramp(inside: NDArray[Any], overlap: int) -> NDArray[Any]:
    """Rise from 0 at ``overlap`` pixels outside to 1 at as many inside; a jump without overlap."""
    if overlap == 0:
        return (inside > 0).astype(float)
    return np.clip((inside + overlap) / (2 * overlap), 0, 1)


@dataclass(frozen=True)
class Tiles:
    """The tiles of images of one shape.

    >>> tiles = Tiles((1, 1, 10, 12), (2, 3), (4, 6), (2, 2), "hann")
    >>> image = torch.arange(120.0).reshape(1, 1, 10, 12)
    >>> parts = [tiles.trim(tiles.window(image, number)) for number in range(len(tiles))]
    >>> bool(torch.allclose(tiles.join(parts), image))
    True
    """

    shape: tuple[int, ...]  # shape of the image
    axes: tuple[int, ...]  # axes that are cut
    patch: tuple[int, ...]  # patch, overlap: size of a tile and width of its halo along each of them
    overlap: tuple[int, ...]
    # `linear` or `hann` blends neighbours where they overlap. Otherwise each pixel comes from one tile
    blending: str | None = None
    stride: int = 1  # windows begin on multiples of it

    def __post_init__(self) -> None:
        if self.blending not in (None, *BLENDINGS):
            raise ConfigError(f"blending is {self.blending!r}. Write 'linear', 'hann', or leave it out.")
        if min(self.patch) < 1 or min(self.overlap) < 0:
            raise ConfigError(
                f"patch_size is {self.patch} and overlap {self.overlap}. Write sizes of at least 1 and overlaps of at least 0."
            )

    @cached_property
    def axis_tiles(self) -> tuple[tuple[AxisTile, ...], ...]:
        """The tiles along each axis that is cut."""
        return tuple(
            cut_axis(self.shape[axis], p, r, self.stride)
            for axis, p, r in zip(self.axes, self.patch, self.overlap, strict=True)
        )

    @cached_property
    def _indices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(itertools.product(*(range(len(tiles)) for tiles in self.axis_tiles)))

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def window_pixels(self) -> int:
        """Size of one window, over all axes."""
        windows = math.prod(tile.window[1] - tile.window[0] for tile, *_ in self.axis_tiles)
        return windows * math.prod(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    def _tile(self, number: int) -> list[AxisTile]:
        return [tiles[i] for tiles, i in zip(self.axis_tiles, self._indices[number], strict=True)]

    def window(self, image: Any, number: int) -> Any:
        """Return the window of a tile, mirrored about the edge pixels where it extends past them."""
        for axis, tile in zip(self.axes, self._tile(number), strict=True):
            image = _read_span(image, axis, tile.window)
        return image

    def check_result(self, result: torch.Tensor, batch: torch.Tensor) -> None:
        """Refuse a result that does not have an image for each window of a batch."""
        if result.dim() != batch.dim() or (0 not in self.axes and len(result) != len(batch)):
            raise ConfigError(
                f"the processor returned a tensor of shape {tuple(result.shape)} for tiles of shape {tuple(batch.shape)}: an image "
                "for each tile is needed. Keep the number of axes, and the length of the first."
            )

    def trim(self, result: torch.Tensor) -> torch.Tensor:
        """Cut the halo off a computed window; blending needs all of it."""
        if self.blending is not None:
            return result
        for axis, (tile, *_) in zip(self.axes, self.axis_tiles, strict=True):
            scale = self._scale(result, axis, tile.window)
            start, stop = ((edge - tile.window[0]) * scale for edge in tile.inner)
            result = narrow(result, axis, start, stop)
        return result

    def join(self, results: Sequence[torch.Tensor], empty: Empty | None = None) -> torch.Tensor:
        """Assemble the image from trimmed tiles, upscaled as they are; ``empty`` allocates it."""
        spans = [tile.window if self.blending else tile.inner for tile, *_ in self.axis_tiles]
        scales = [self._scale(results[0], axis, span) for axis, span in zip(self.axes, spans, strict=True)]
        shape = list(results[0].shape)
        for axis, scale in zip(self.axes, scales, strict=True):
            shape[axis] = self.shape[axis] * scale
        whole = empty(tuple(shape), results[0]) if empty else results[0].new_empty(shape)
        weights = []
        if self.blending is not None:
            whole = whole.zero_()
            parts = zip(self.axis_tiles, self.axes, self.overlap, scales, strict=True)
            weights = [blend_axis(t, self.shape[a], r, self.blending, scale) for t, a, r, scale in parts]
        for number, result in enumerate(results):
            place, part = self._place(result, number, scales)
            if self.blending is None:
                whole[place] = part
                continue
            for axis, lines, index in zip(self.axes, weights, self._indices[number], strict=True):
                line = torch.from_numpy(lines[index]).to(part)
                part = part * line.reshape([-1 if i == axis else 1 for i in range(part.dim())])
            whole[place] += part
        return whole

    def join_lazily(self, results: Sequence[Any]) -> Any:
        """Assemble the image from trimmed tiles that are lazy arrays."""
        if self.blending is not None:
            raise ConfigError(
                f"blending is {self.blending!r}, which dask arrays do not support. compute() them first, or leave it out."
            )
        spans = [tile.inner for tile, *_ in self.axis_tiles]
        scales = [self._scale(results[0], axis, span) for axis, span in zip(self.axes, spans, strict=True)]
        parts = [self._place(result, number, scales)[1] for number, result in enumerate(results)]
        return concatenate_grid(parts, self.axes, [len(tiles) for tiles in self.axis_tiles])

    def _place(self, result: Any, number: int, scales: Sequence[int]) -> tuple[tuple[slice, ...], Any]:
        """Return the place of a tile in the image, and the part of its result that goes there."""
        place = [slice(None)] * len(result.shape)
        for axis, tile, scale in zip(self.axes, self._tile(number), scales, strict=True):
            if self.blending is None:
                (start, stop), origin = tile.core, tile.inner[0]
            else:
                start, stop = max(0, tile.window[0]), min(self.shape[axis], tile.window[1])
                origin = tile.window[0]
            result = narrow(result, axis, (start - origin) * scale, (stop - origin) * scale)
            place[axis] = slice(start * scale, stop * scale)
        return tuple(place), result

    @staticmethod
    def _scale(result: Any, axis: int, span: Span) -> int:
        """Upscaling factor of a result for a span of the image along an axis."""
        length = span[1] - span[0]
        scale, rest = divmod(int(result.shape[axis]), length)
        if rest or scale < 1:
            raise ConfigError(
                f"the processor returned {result.shape[axis]} pixels for {length} along axis {axis}: such tiles do not fit "
                "together. It has to keep the size, or to multiply it by a whole number."
            )
        return scale


def narrow(array: Any, axis: int, start: int, stop: int) -> Any:
    """Return some pixels along one axis, of a tensor or another array."""
    return array[(slice(None),) * axis + (slice(start, stop),)]


def concatenate_grid(parts: Sequence[Any], axes: Sequence[int], counts: Sequence[int]) -> Any:
    """Join arrays that are not tensors into one: ``counts`` of them along each of the axes, the last one first.

    >>> concatenate_grid([np.full((1, 2), n) for n in range(4)], (0, 1), (2, 2)).tolist()
    [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    for axis, count in reversed(list(zip(axes, counts, strict=True))):
        rows = (parts[start : start + count] for start in range(0, len(parts), count))
        parts = [np.concatenate(row, axis) for row in rows]
    return parts[0]


def _read_span(image: Any, axis: int, span: Span) -> Any:
    """Return a run of pixels along one axis, mirrored past its ends."""
    length = image.shape[axis]
    start, stop = max(0, span[0]), min(length, span[1])
    if (start, stop) == span:
        return narrow(image, axis, start, stop)
    at = source_positions(*span, length, "mirror")
    low, high = int(at.min()), int(at.max()) + 1
    part = narrow(image, axis, low, high)
    if isinstance(part, torch.Tensor):
        return part.index_select(axis, torch.from_numpy(at - low).to(image.device))
    return np.take(part, at - low, axis)


def make_tiles(
    shape: Sequence[int],
    patch_size: int | Sequence[int],
    overlap: int | Sequence[int],
    tiling_dims: int | Sequence[int] | None,
    blending: str | None,
) -> Tiles:
    """Make the tiles of an image from options in deepinv's terms.

    >>> make_tiles((1, 3, 64, 64), 32, 8, None, None).axes
    (2, 3)
    """
    if 0 in shape:
        raise ConfigError(
            f"the image has the shape {tuple(shape)}: there are no pixels. Leave the call out where a batch is empty."
        )
    if tiling_dims is None:
        axes = tuple(range(2, len(shape))) if isinstance(patch_size, int) else tuple(range(-len(patch_size), 0))
    else:
        axes = (tiling_dims,) if isinstance(tiling_dims, int) else tuple(tiling_dims)
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ConfigError(
            f"tiling_dims is {tiling_dims!r}, but the image has the shape {tuple(shape)}. Write axes that it has; left out, "
            "all but the first two are tiled."
        )
    axes = tuple(axis % len(shape) for axis in axes)
    sizes, halos = _per_axis("patch_size", patch_size, axes), _per_axis("overlap", overlap, axes)
    return Tiles(tuple(shape), axes, sizes, halos, blending)


def _per_axis(name: str, value: int | Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = (value,) * len(axes) if isinstance(value, int) else tuple(map(operator.index, value))
    except TypeError:
        raise WrongKind(f"{name} is {value!r}. Write an integer, or one for each axis.") from None
    if len(sizes) != len(axes):
        raise ConfigError(f"{name} is {value!r}, but {len(axes)} axes are tiled. Write one, or one per axis.")
    return sizes
