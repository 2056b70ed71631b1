"""How an image is cut into tiles that overlap, and put together again."""

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


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = like.new_empty(shape)
    return made


@dataclass(frozen=True, slots=True)
class Cut:
    """One tile along one axis: its core, and the window that it is computed from.

    Cores fill the axis and do not overlap; windows may reach past its ends, where the image is mirrored.
    """

    core: Span
    window: Span
    inner: Span
    """The window without its halo."""


def cut_axis(length: int, patch: int, overlap: int, stride: int = 1) -> tuple[Cut, ...]:
    """The tiles of an axis: windows of equal length, the last one moved back to end with the axis.

    With a stride, all of them begin on multiples of it: sizes are rounded up, and the last one ends behind the axis.

    An axis that is no longer than a patch is one tile, and is not padded.

    Examples
    --------
    >>> [(cut.core, cut.window) for cut in cut_axis(10, 4, 1)]
    [((0, 4), (-1, 5)), ((4, 8), (3, 9)), ((8, 10), (5, 11))]
    >>> cut_axis(4, 4, 1)
    (Cut(core=(0, 4), window=(0, 4), inner=(0, 4)),)
    >>> [cut.window for cut in cut_axis(15, 6, 3, 4)]
    [(-4, 12), (4, 20)]
    """
    patch, overlap = (-(-size // stride) * stride for size in (patch, overlap))
    if length <= patch:
        return (Cut((0, length), (0, length), (0, length)),)
    starts = [*range(0, length - patch, patch), -((patch - length) // stride) * stride]
    ends = [0, *(start + patch for start in starts)]
    return tuple(
        Cut(
            (end, min(length, start + patch)),
            (start - overlap, start + patch + overlap),
            (start, start + patch),
        )
        for start, end in zip(starts, ends, strict=False)
    )


def blend_axis(
    cuts: Sequence[Cut], length: int, overlap: int, kind: str, scale: int = 1
) -> list[NDArray[Any]]:
    """The weight of each tile on its window, as far as it lies inside the axis: they add up to 1 everywhere.

    Parameters
    ----------
    cuts : sequence of Cut
        The tiles.
    length, overlap : int
        Of the axis, and of the halo: weights rise from ``overlap`` before the inner part to ``overlap`` behind its start.
    kind : str
        ``linear`` or ``hann``.
    scale : int
        Pixels of the result for each of the image.

    Examples
    --------
    >>> [weights.round(2).tolist() for weights in blend_axis(cut_axis(6, 3, 1), 6, 1, "linear")]
    [[1.0, 1.0, 0.75, 0.25], [0.25, 0.75, 1.0, 1.0]]
    """
    at = (np.arange(length * scale) + 0.5) / scale
    ramps = []
    for cut in cuts:
        rise = np.ones_like(at) if cut.inner[0] == 0 else _ramp(at - cut.inner[0], overlap)
        fall = np.ones_like(at) if cut.inner[1] >= length else _ramp(cut.inner[1] - at, overlap)
        ramps.append(np.minimum(rise, fall))
    shaped = [np.sin(ramp * np.pi / 2) ** 2 if kind == "hann" else ramp for ramp in ramps]
    total = np.sum(shaped, axis=0)
    return [
        (weights / total)[max(0, cut.window[0]) * scale : min(length, cut.window[1]) * scale]
        for weights, cut in zip(shaped, cuts, strict=True)
    ]


def _ramp(inside: NDArray[Any], overlap: int) -> NDArray[Any]:
    """From 0 at ``overlap`` pixels outside to 1 at as many inside; a step where there is no overlap."""
    if overlap == 0:
        return (inside > 0).astype(float)
    return np.clip((inside + overlap) / (2 * overlap), 0, 1)


@dataclass(frozen=True)
class Tiles:
    """The tiles of images of one shape.

    Parameters
    ----------
    shape : tuple of int
        Of the image.
    axes : tuple of int
        Which axes are cut.
    patch, overlap : tuple of int
        For each of them.
    blending : str, optional
        ``linear`` or ``hann``: neighbours are mixed where they overlap. Otherwise each pixel is that of one tile.
    stride : int
        Windows begin on multiples of it.

    Examples
    --------
    >>> tiles = Tiles((1, 1, 10, 12), (2, 3), (4, 6), (2, 2), "hann")
    >>> image = torch.arange(120.0).reshape(1, 1, 10, 12)
    >>> made = [tiles.trimmed(tiles.window(image, number)) for number in range(len(tiles))]
    >>> bool(torch.allclose(tiles.joined(made), image))
    True
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    patch: tuple[int, ...]
    overlap: tuple[int, ...]
    blending: str | None = None
    stride: int = 1

    def __post_init__(self) -> None:
        if self.blending not in (None, *BLENDINGS):
            raise ConfigError(f"blending is {self.blending!r}. Write 'linear', 'hann', or leave it out.")
        if min(self.patch) < 1 or min(self.overlap) < 0:
            raise ConfigError(
                f"patch_size is {self.patch} and overlap {self.overlap}. Write sizes of 1 and overlaps of 0 at least."
            )

    @cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """The tiles of each axis that is cut."""
        return tuple(
            cut_axis(self.shape[axis], p, r, self.stride)
            for axis, p, r in zip(self.axes, self.patch, self.overlap, strict=True)
        )

    @cached_property
    def _numbered(self) -> tuple[tuple[int, ...], ...]:
        return tuple(itertools.product(*(range(len(cuts)) for cuts in self.cuts)))

    def __len__(self) -> int:
        return len(self._numbered)

    @property
    def window_pixels(self) -> int:
        """Numbers in one window."""
        windows = math.prod(cuts[0].window[1] - cuts[0].window[0] for cuts in self.cuts)
        return windows * math.prod(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    def _of(self, number: int) -> list[Cut]:
        return [cuts[i] for cuts, i in zip(self.cuts, self._numbered[number], strict=True)]

    def window(self, image: torch.Tensor, number: int) -> torch.Tensor:
        """The window of a tile, mirrored about the edge pixels where it reaches past them."""
        for axis, cut in zip(self.axes, self._of(number), strict=True):
            image = _span(image, axis, cut.window)
        return image

    def check_made(self, result: torch.Tensor, batch: torch.Tensor) -> None:
        """Refuse what is no image for each window of a batch."""
        if result.dim() != batch.dim() or (0 not in self.axes and len(result) != len(batch)):
            raise ConfigError(
                f"the processor made a tensor of shape {tuple(result.shape)} of tiles of shape {tuple(batch.shape)}: there has "
                "to be an image for each of them. Have it keep the axes, and the length of the first."
            )

    def trimmed(self, result: torch.Tensor) -> torch.Tensor:
        """What is kept of a computed window: all of it for blending, else what lies inside the halo."""
        if self.blending is not None:
            return result
        for axis, cuts in zip(self.axes, self.cuts, strict=True):
            cut = cuts[0]
            scale = self._scale(result, axis, cut.window)
            start, stop = ((edge - cut.window[0]) * scale for edge in cut.inner)
            result = result.narrow(axis, start, stop - start)
        return result

    def joined(self, results: Sequence[torch.Tensor], empty: Empty = _empty) -> torch.Tensor:
        """The image that the trimmed tiles make; as many times larger as they are. ``empty`` makes room for it."""
        given = [(cuts[0].window if self.blending else cuts[0].inner) for cuts in self.cuts]
        scales = [self._scale(results[0], axis, span) for axis, span in zip(self.axes, given, strict=True)]
        shape = list(results[0].shape)
        for axis, scale in zip(self.axes, scales, strict=True):
            shape[axis] = self.shape[axis] * scale
        whole = empty(tuple(shape), results[0])
        if self.blending is None:
            for number, result in enumerate(results):
                whole[self._places(number, scales, shape)] = self._core(result, number, scales)
            return whole
        weights = [
            blend_axis(cuts, self.shape[axis], overlap, self.blending, scale)
            for axis, cuts, overlap, scale in zip(self.axes, self.cuts, self.overlap, scales, strict=True)
        ]
        whole = whole.zero_()
        for number, result in enumerate(results):
            self._blend(whole, result, number, scales, weights)
        return whole

    def _core(self, result: torch.Tensor, number: int, scales: Sequence[int]) -> torch.Tensor:
        for axis, cut, scale in zip(self.axes, self._of(number), scales, strict=True):
            start, stop = ((edge - cut.inner[0]) * scale for edge in cut.core)
            result = result.narrow(axis, start, stop - start)
        return result

    def _places(self, number: int, scales: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
        places = [slice(0, n) for n in shape]
        for axis, cut, scale in zip(self.axes, self._of(number), scales, strict=True):
            places[axis] = slice(cut.core[0] * scale, cut.core[1] * scale)
        return tuple(places)

    def _blend(
        self,
        whole: torch.Tensor,
        result: torch.Tensor,
        number: int,
        scales: Sequence[int],
        weights: Sequence[Sequence[NDArray[Any]]],
    ) -> None:
        places = [slice(None)] * whole.dim()
        for place, (axis, cut) in enumerate(zip(self.axes, self._of(number), strict=True)):
            start, stop = max(0, cut.window[0]), min(self.shape[axis], cut.window[1])
            scale = scales[place]
            result = result.narrow(axis, (start - cut.window[0]) * scale, (stop - start) * scale)
            line = torch.from_numpy(weights[place][self._numbered[number][place]]).to(result)
            result = result * line.reshape([-1 if i == axis else 1 for i in range(result.dim())])
            places[axis] = slice(start * scale, stop * scale)
        whole[tuple(places)] += result

    def _scale(self, result: torch.Tensor, axis: int, span: Span) -> int:
        """How many pixels of the result stand for one of the image."""
        scale, rest = divmod(int(result.shape[axis]), span[1] - span[0])
        if rest or scale < 1:
            raise ConfigError(
                f"the processor makes {result.shape[axis]} pixels of {span[1] - span[0]} along axis {axis}: tiles of that "
                "do not fit together. It has to keep the size, or to multiply it by a whole number."
            )
        return scale


def _span(image: torch.Tensor, axis: int, span: Span) -> torch.Tensor:
    """A run of pixels along one axis, mirrored past its ends."""
    length = image.shape[axis]
    start, stop = max(0, span[0]), min(length, span[1])
    if (start, stop) == span:
        return image.narrow(axis, start, stop - start)
    at = source_positions(*span, length, "mirror")
    low, high = int(at.min()), int(at.max()) + 1
    part = image.narrow(axis, low, high - low)
    return part.index_select(axis, torch.from_numpy(at - low).to(image.device))


def tiles_of(
    shape: Sequence[int],
    patch_size: int | Sequence[int],
    overlap: int | Sequence[int],
    tiling_dims: int | Sequence[int] | None,
    blending: str | None,
) -> Tiles:
    """The tiles that options in deepinv's words mean.

    Raises
    ------
    ConfigError
        When they do not fit the image.

    Examples
    --------
    >>> tiles_of((1, 3, 64, 64), 32, 8, None, None).axes
    (2, 3)
    """
    if 0 in shape:
        raise ConfigError(
            f"the image has the shape {tuple(shape)}: there are no pixels to work on. Leave the call out where a batch is empty."
        )
    if tiling_dims is None:
        axes = (
            tuple(range(2, len(shape))) if isinstance(patch_size, int) else tuple(range(-len(patch_size), 0))
        )
    else:
        axes = (tiling_dims,) if isinstance(tiling_dims, int) else tuple(tiling_dims)
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ConfigError(
            f"tiling_dims is {tiling_dims!r}, but the image has the shape {tuple(shape)}. Write axes that it has; left out, "
            "all but the first two are tiled."
        )
    axes = tuple(axis % len(shape) for axis in axes)
    return Tiles(
        tuple(shape), axes, _each("patch_size", patch_size, axes), _each("overlap", overlap, axes), blending
    )


def _each(name: str, value: int | Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = (value,) * len(axes) if isinstance(value, int) else tuple(map(operator.index, value))
    except TypeError:
        raise WrongKind(
            f"{name} is {value!r}. Write a whole number of pixels, or one for each axis."
        ) from None
    if len(sizes) != len(axes):
        raise ConfigError(
            f"{name} is {value!r}, but {len(axes)} axes are tiled. Write one number, or one for each."
        )
    return sizes
