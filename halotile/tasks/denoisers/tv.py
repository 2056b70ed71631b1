"""Total-variation denoising with a fixed number of iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np

from halotile.tasks.denoisers.base import TINY, LeveledFilter, number_like
from halotile.tasks.denoisers.compiled.library import by_plane, kernel_for, one_number
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_whole


@dataclass(frozen=True, kw_only=True)
class TotalVariation(LeveledFilter):
    """``argmin_u  ||u - x||² / 2 + w TV(u)``, approached by ``iterations`` dual steps.

    ``w`` is the strength, times the noise level if it is known; TV is the isotropic total
    variation, of a volume in units of its smallest pixel edge. Every step widens the receptive field by one pixel, so a fixed number of steps has a finite
    one, unlike a stopping rule over the whole image. The scheme is that of
    ``skimage.restoration.denoise_tv_chambolle(weight=w, eps=0, max_num_iter=iterations + 1)``, which
    counts its start as an iteration.

    References
    ----------
    A. Chambolle, An algorithm for total variation minimization and applications, J. Math. Imaging
    Vision 20 (2004) 89-97.

    Examples
    --------
    >>> TotalVariation(strength=1.0, sigma="auto", iterations=30).receptive_field()
    30
    """

    name: ClassVar[str] = "tv"
    dims: ClassVar[tuple[int, ...]] = (3, 2)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = False
    keeps_mean: ClassVar[bool] = True
    accelerates: ClassVar[bool] = False
    """True for projected steps with momentum in place of plain ones."""

    strength: float
    """Weight of the total variation: in noise levels if sigma is given, else in the units of the image (the range of
    integers counts as 1)."""
    iterations: int = 20
    """Number of dual steps: more of them come closer to the minimum, and need a wider halo."""
    sigma: float | Literal["auto"] | None = None
    """Standard deviation of the noise, in the units of the image (the range of integers counts as 1). auto: estimated
    for each channel, time point and other plane by itself. Omitted: the strength itself is in the units of the image."""

    spacing: tuple[float, ...] | None = None
    """Size of a pixel along each tiled axis, in one unit, where they differ. Omitted: in a volume that of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("iterations", self.iterations, 1)

    def receptive_field(self) -> int:
        """One pixel for each step."""
        return self.iterations

    def bytes_per_pixel(self) -> float:
        """The result, and for one tile at a time: dual, its gradient, norm and scratch."""
        return 40.0

    def apply(self, image: torch.Tensor, sigma: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor:
        """Take the dual steps."""
        gradient = _Gradient.from_image(image, self.spacing_along(image.dim() - 2), valid)
        steps = _accelerated if self.accelerates else _minimise
        return steps(image, self.strength_at(self.strength, sigma, image.dtype), self.iterations, gradient)


@dataclass(frozen=True, kw_only=True)
class Proximal(TotalVariation):
    """The same minimum, approached by accelerated steps, for solvers, whose accuracy is limited by that of the prox.

    Of steps that begin at 0 and look one pixel farther each, these come nearest: see docs/design/006.

    References
    ----------
    A. Beck, M. Teboulle, Fast gradient-based algorithms for constrained total variation image denoising and deblurring
    problems, IEEE Trans. Image Process. 18 (2009) 2419-2434.
    """

    name: ClassVar[str] = "accelerated tv"
    accelerates: ClassVar[bool] = True

    def bytes_per_pixel(self) -> float:
        """The result, and for one tile at a time: three duals (present, previous, extrapolated), gradient, norm, scratch."""
        return 60.0


class _Gradient(NamedTuple):
    """Slopes to the next pixel along each axis, by its distance; none between a hole and a measured pixel."""

    weights: Sequence[float]
    """1 over the distance along each axis."""
    links: Sequence[torch.Tensor] | None
    """For each axis, 1 where a pixel and the next are both measured; None without holes."""

    @classmethod
    def from_image(cls, image: torch.Tensor, spacing: Sequence[float], valid: torch.Tensor | None) -> Self:
        weights = [1.0 / size for size in spacing]
        if valid is None:
            return cls(weights, None)
        lengths = [(axis, image.shape[axis] - 1) for axis in range(2, image.dim())]
        return cls(weights, [valid.narrow(axis, 1, n) * valid.narrow(axis, 0, n) for axis, n in lengths])

    @property
    def is_plain(self) -> bool:
        """True where all distances are 1 and all pixels are measured."""
        return self.links is None and all(weight == 1 for weight in self.weights)

    @property
    def square(self) -> float:
        """Sum of the squared weights, which bounds the step."""
        return math.fsum(w * w for w in self.weights)

    def write(self, image: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Write the slopes; ``out`` is not changed at the last pixel."""
        _differences(image, out)
        for axis, link in enumerate(self.links or (), start=2):
            out[axis - 2].narrow(axis, 0, link.shape[axis]).mul_(link)
        self.weigh(out)

    def weigh(self, parts: list[torch.Tensor]) -> None:
        """Multiply each part by the weight of its axis."""
        for part, weight in zip(parts, self.weights, strict=True):
            if weight != 1:
                part.mul_(weight)

    def weighed(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts times the weights of their axes."""
        return [part if w == 1 else part * w for part, w in zip(parts, self.weights, strict=True)]


def _minimise(image: torch.Tensor, weight: float | torch.Tensor, iterations: int, gradient: _Gradient) -> torch.Tensor:
    """``image - step div q`` after the dual steps on ``q``, the dual divided by the step and times its slope."""
    axes = range(2, image.dim())
    step = 1.0 / (2 * gradient.square)
    ratio = number_like(weight, image).clamp_min(TINY).reciprocal() * step
    if gradient.is_plain and (kernel := kernel_for("total_variation", image)) is not None:
        number = one_number(ratio)
        if number is not None:
            return by_plane(kernel, image, number, step, iterations)
    dual = [torch.zeros_like(image) for _ in axes]
    slope = [torch.zeros_like(image) for _ in axes]
    current, damping, scratch = image.clone(), torch.empty_like(image), torch.empty_like(image)
    for _ in range(iterations):
        gradient.write(current, slope)
        _norm(slope, damping, scratch).mul_(ratio).add_(1.0)
        gradient.weigh(slope)
        for q, part in zip(dual, slope, strict=True):
            q.sub_(part).div_(damping)
        torch.sub(image, _outflow(dual, damping).mul_(step), out=current)
    return current


def _accelerated(
    image: torch.Tensor, weight: float | torch.Tensor, iterations: int, gradient: _Gradient
) -> torch.Tensor:
    """``image + w div p`` after the steps on ``p``, whose length is at most 1 everywhere."""
    axes = range(2, image.dim())
    width = number_like(weight, image).clamp_min(TINY)
    rate = (4 * gradient.square * width).reciprocal()
    dual = [torch.zeros_like(image) for _ in axes]
    ahead = dual
    slope = [torch.zeros_like(image) for _ in axes]
    length, scratch = torch.empty_like(image), torch.empty_like(image)
    current, t = image, 1.0
    for number in range(iterations):
        gradient.write(current, slope)
        moved = [q + part.mul_(rate) for q, part in zip(ahead, slope, strict=True)]
        _norm(moved, length, scratch).clamp_min_(1.0)
        for p in moved:
            p.div_(length)
        before, t = t, (1 + math.sqrt(1 + 4 * t * t)) / 2
        momentum = (before - 1) / t if number < iterations - 1 else 0.0  # the last one is the result
        ahead = [p + (p - q).mul_(momentum) for p, q in zip(moved, dual, strict=True)]
        dual = moved
        current = image + _outflow(gradient.weighed(ahead), length).mul_(width)
    return current


def _differences(image: torch.Tensor, out: list[torch.Tensor]) -> None:
    """Differences to the next pixel along each axis; ``out`` is not changed at the last pixel."""
    for axis, gradient in enumerate(out, start=2):
        length = image.shape[axis] - 1
        after, before = image.narrow(axis, 1, length), image.narrow(axis, 0, length)
        torch.sub(after, before, out=gradient.narrow(axis, 0, length))


def _norm(slope: list[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Length of a gradient at every pixel."""
    torch.mul(slope[0], slope[0], out=out)
    for gradient in slope[1:]:
        out += torch.mul(gradient, gradient, out=scratch)
    return exact_root_(out)


def exact_root_(values: torch.Tensor) -> torch.Tensor:
    """The root, rounded to the nearest number, in place: on a CPU that of torch may be the one beside it, and another on another CPU."""
    if values.device.type != "cpu":
        return values.sqrt_()
    np.sqrt(values.numpy(), out=values.numpy())
    return values


def _outflow(dual: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Minus the divergence of the dual: the dual of each pixel, less that of the neighbours before it."""
    out.copy_(dual[0])
    for q in dual[1:]:
        out += q
    for axis, q in enumerate(dual, start=2):
        length = q.shape[axis] - 1
        out.narrow(axis, 1, length).sub_(q.narrow(axis, 0, length))
    return out


DENOISER = TotalVariation
