"""Non-local means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from halotile.tasks.convolution.shifted_sums import box_sum
from halotile.tasks.denoisers.base import TINY, LeveledFilter, number_like
from halotile.tasks.denoisers.compiled.library import by_plane, kernel_for, one_number
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_odd, check_whole

COMPILED_PATCH = 15  # largest patch that compiled code compares
SERIES = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
"""Of (exp(x) - 1 - x) / x² for small x, beginning with the fifth power."""


@dataclass(frozen=True, kw_only=True)
class NonLocalMeans(LeveledFilter):
    """``y_i = sum_j w_ij x_j / sum_j w_ij,  w_ij = exp(-max(d_ij - 2 sigma², 0) / h²)``.

    ``d_ij`` is the mean squared difference of the patches around pixels i and j, every pixel of
    the patch counting the same; j runs over the pixels within ``distance`` on every axis, i itself with
    weight 1. ``h`` is the strength, times the noise level sigma if it is known; if not, sigma
    is 0 in the formula. No weight is cut off (skimage's fast mode drops those below exp(-5)). Where a
    window ends without a halo (boundary: cut), there are no candidates beyond its edge, and pixels of
    a patch beyond it count as equal. Holes are no candidates, and patches are compared where both were measured.

    References
    ----------
    A. Buades, B. Coll, J.-M. Morel, A non-local algorithm for image denoising, CVPR 2005.

    Examples
    --------
    >>> NonLocalMeans(strength=0.8, sigma="auto", patch=5, distance=6).receptive_field()
    8
    """

    name: ClassVar[str] = "nlm"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = False

    strength: float
    """The h of the formula: in noise levels if sigma is given (0.8 is a good start then), else in the units of
    the image (the range of integers counts as 1)."""
    patch: int = 5
    """Edge of the patches that are compared, in pixels: an odd number. In a volume fewer along an axis of larger pixels."""
    distance: int = 6
    """Distance in pixels within which similar patches are searched. In a volume fewer along an axis of larger pixels."""
    sigma: float | Literal["auto"] | None = None
    """Standard deviation of the noise, in the units of the image (the range of integers counts as 1). auto: estimated
    for each channel, time point and other plane by itself. Omitted: the strength itself is in the units of the image."""

    spacing: tuple[float, ...] | None = None
    """Size of a pixel along each tiled axis, in one unit, where they differ. Omitted: in a volume that of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd("patch", self.patch)
        check_whole("distance", self.distance, 1)

    def receptive_field(self) -> int:
        """Distance to the farthest pixel of the farthest patch."""
        return self.distance + self.patch // 2

    def bytes_per_pixel(self) -> float:
        """Two sums, and differences, patch sums, weights and scratch of one tile."""
        return 40.0

    def apply(self, image: torch.Tensor, sigma: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor:
        """Average similar patches; each pair of pixels is compared once, its weight used both ways."""
        spacing = self.spacing_along(image.dim() - 2)
        shifts, patch = [int(self.distance / size) for size in spacing], self._patch(spacing)
        allowance, steepness = self._terms(image, sigma, math.prod(patch))
        if valid is None and (averaged := _compiled(image, shifts, patch, allowance, steepness)) is not None:
            return averaged
        total, weights = image.clone(memory_format=torch.contiguous_format), torch.ones_like(image)
        for shift in half_of_shifts(shifts):
            here, there = overlap(tuple(image.shape), shift)
            both = None if valid is None else valid[here] * valid[there]
            difference = _compared(image[here] - image[there], patch, both)
            weight = _weight(difference, _at(allowance, here), _at(steepness, here), both)
            total[here] += weight * image[there]
            weights[here] += weight
            if sigma is not None:
                weight = _weight(difference, _at(allowance, there), _at(steepness, there), both)
            total[there] += weight * image[here]
            weights[there] += weight
        return total.div_(weights)

    def _terms(self, image: torch.Tensor, sigma: torch.Tensor | None, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The contribution of noise to the sum over a patch of so many pixels, and the factor from this sum to the exponent."""
        strength = self.strength_at(self.strength, sigma, image.dtype)
        h = number_like(strength, image)
        noise = sigma if sigma is not None else self.sigma or 0.0
        level = number_like(noise, image)
        return level * level * (2.0 * pixels), (h * h).clamp_min(TINY).reciprocal() * (-1.0 / pixels)

    def _patch(self, spacing: Sequence[float]) -> list[int]:
        """The edges of a patch, in pixels."""
        return [2 * int(self.patch // 2 / size) + 1 for size in spacing]


def _compiled(
    image: torch.Tensor, shifts: Sequence[int], patch: Sequence[int], allowance: torch.Tensor, steepness: torch.Tensor
) -> torch.Tensor | None:
    """The same bits by compiled code; None where the image, its patches or a noise level that differs within it are not for that."""
    kernel = kernel_for("nonlocal_means", image)
    if kernel is None or max(patch) > COMPILED_PATCH:
        return None
    terms = [one_number(allowance), one_number(steepness)]
    return None if None in terms else by_plane(kernel, image, *patch, *shifts, *terms)


def half_of_shifts(distances: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield one of every pair of opposite shifts."""
    shifts = itertools.product(*(range(-distance, distance + 1) for distance in distances))
    return (shift for shift in shifts if shift > (0,) * len(distances))


def overlap(shape: tuple[int, ...], shift: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Slices of the pixels with a partner ``shift`` away inside the image, and of these partners."""
    lengths = tuple(max(0, n - abs(s)) for n, s in zip(shape[2:], shift, strict=True))
    here = tuple(slice(max(0, -s), max(0, -s) + n) for s, n in zip(shift, lengths, strict=True))
    there = tuple(slice(max(0, s), max(0, s) + n) for s, n in zip(shift, lengths, strict=True))
    every = (slice(None), slice(None))
    return every + here, every + there


def patch_difference(difference: torch.Tensor, patch: Sequence[int]) -> torch.Tensor:
    """Sum of the squares over the patch around every pixel."""
    around = [edge // 2 for edge in reversed(patch) for _ in range(2)]
    total = torch.nn.functional.pad(difference.square(), around)
    for axis, edge in enumerate(patch, start=2):
        total = box_sum(total, axis, edge)
    return total


def _at(value: torch.Tensor, place: tuple[slice, ...]) -> torch.Tensor:
    """A single number itself, or the part of a map."""
    return value[place] if value.dim() else value


def _compared(difference: torch.Tensor, patch: Sequence[int], both: torch.Tensor | None) -> torch.Tensor:
    """Sum of the squares over the patch around every pixel; of those pairs that are both measured, in proportion, where there are holes."""
    if both is None:
        return patch_difference(difference, patch)
    pixels = math.prod(patch)
    # The number of pairs that are not: a square of 0 or 1 is itself. Beyond the edge pixels count as equal.
    missing = patch_difference(1 - both, patch)
    share = ((pixels - missing) / pixels).clamp_min_(1.0 / pixels)
    return patch_difference(difference.mul_(both), patch).div_(share)


def _weight(
    difference: torch.Tensor, allowance: torch.Tensor, steepness: torch.Tensor, both: torch.Tensor | None
) -> torch.Tensor:
    """Weights of pairs of pixels, 0 where one is in a hole."""
    weight = exponential_((difference - allowance).clamp_min_(0.0).mul_(steepness))
    return weight if both is None else weight * both


def exponential_(values: torch.Tensor) -> torch.Tensor:
    """The exponential of numbers that are not positive, in place, to 1e-7 of itself; 0 below that of -87.

    That of torch on a CPU rounds as the vectors of the CPU have it. This one is the same sequence of single operations for each number;
    where gradients go through, and on a GPU, it is torch's.

    References
    ----------
    S. L. Moshier, Methods and Programs for Mathematical Functions, Ellis Horwood 1989 (Cephes, expf).
    """
    if values.device.type != "cpu" or values.dtype != torch.float32 or values.requires_grad:
        return values.exp_()
    if values.is_contiguous() and (kernel := kernel_for("exponential", values.view(1, 1, 1, -1))) is not None:
        kernel(values, values.numel())
        return values
    shifted = (values * 1.44269504).add_(12582912.0)  # which leaves a whole number, in the last bits
    power = shifted - 12582912.0
    rest = (values - power * 0.693359375).sub_(power * -2.12194440e-4)
    series = torch.full_like(rest, SERIES[0])
    for term in SERIES[1:]:
        series.mul_(rest).add_(term)
    scale = (shifted.view(torch.int32) - (0x4B400000 - 127)).bitwise_left_shift_(23).view(torch.float32)
    result = series.mul_(rest * rest).add_(rest).add_(1.0).mul_(scale)
    return values.copy_(result.masked_fill_(values < -87.0, 0.0))


DENOISER = NonLocalMeans
