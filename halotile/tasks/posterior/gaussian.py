"""Gaussian posteriors of an image: the precision, random right-hand sides by position, and their solution on a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.views import Constant
from halotile.tasks.image_task import cells_of
from halotile.tasks.noise.simulated import CELL, draw_cells
from halotile.tasks.operators.base import Derived, Operator, Shape
from halotile.tasks.priors.matern import Matern
from halotile.tasks.shared import Scope

MEASURED, FIELD = 2**31, 2**31 + 1
"""Roles of random numbers: noise of a measurement, and white noise of the prior. No number of an operator in a simulation is as large."""


@dataclass(frozen=True)
class Measurement:
    """``y = A x + n`` with noise of variance ``1 / weight`` in each pixel; a weight of 0 stands for no measurement."""

    operator: Operator
    data: Readable  # 0 where the weight is 0
    weight: Readable
    number: int = 0


@dataclass(frozen=True)
class Weights(Derived):
    """``1 / σ²`` in each pixel of a measurement; 0 where it, or σ, is no number, or σ is 0."""

    sigma: Readable

    def read(self, region: Region) -> Pixels:
        sigma = self.sigma.read(region).astype(np.float64)
        if (sigma < 0).any():
            raise InputError(
                f"the map of the noise has {float(np.nanmin(sigma)):.4g} among its pixels, and a standard deviation is not below 0. Write 0 or NaN where nothing "
                "was measured."
            )
        is_known = np.isfinite(self.image.read(region)) & np.isfinite(sigma) & (sigma > 0)
        weights: Array = np.divide(1, np.square(sigma), where=is_known, out=np.zeros(sigma.shape))
        return weights.astype(self.dtype)


@dataclass(frozen=True)
class Filled(Derived):
    """A measurement with 0 where it is no number."""

    def read(self, region: Region) -> Pixels:
        filled: Array = np.nan_to_num(self.image.read(region).astype(self.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        return filled


@dataclass(frozen=True)
class Placed:
    """Several images that are 0 outside a region of their last axes, of shape (number, *shape)."""

    pixels: Array
    region: Region
    whole: Shape

    @property
    def shape(self) -> Shape:
        return (len(self.pixels), *self.whole)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        wanted = Region(region.start[1:], region.stop[1:])
        part = wanted.clip(self.region)
        of = slice(region.start[0], region.stop[0])
        if part == wanted:
            return self.pixels[of, *wanted.relative_to(self.region).slices]
        placed = np.zeros(region.shape, self.dtype)
        if part.size:
            inner = part.relative_to(self.region).slices
            placed[:, *part.relative_to(wanted).slices] = self.pixels[of, *inner]
        return placed


@dataclass(frozen=True)
class Weighted(Derived):
    """Images of shape (number, *shape), each multiplied by the same weights."""

    weight: Readable

    def read(self, region: Region) -> Pixels:
        weights = self.weight.read(Region(region.start[1:], region.stop[1:]))
        weighted: Array = self.image.read(region) * weights.astype(self.dtype, copy=False)
        return weighted


@dataclass(frozen=True)
class Unexplained(Derived):
    """``w (y - A μ)``, of shape (1, *shape), for the image ``A μ``."""

    measurement: Measurement

    def read(self, region: Region) -> Pixels:
        of = Region(region.start[1:], region.stop[1:])
        reads = ((self.measurement.data, of), (self.measurement.weight, of), (self.image, region))
        measured, weights, seen = (np.asarray(image.read(at), np.float64) for image, at in reads)
        weighted: Array = weights * (measured - seen)
        return weighted.astype(self.dtype, copy=False)


@dataclass(frozen=True)
class RandomMeasurements:
    """``w^½ ε`` of each draw, of shape (draws, *shape)."""

    measurement: Measurement
    draws: Sequence[int]
    seed: int
    dtype: np.dtype[Any]

    @property
    def shape(self) -> Shape:
        return (len(self.draws), *self.measurement.data.shape)

    def read(self, region: Region) -> Pixels:
        of = Region(region.start[1:], region.stop[1:])
        root = np.sqrt(self.measurement.weight.read(of))
        drawn = (normals(of, self.seed, MEASURED, self.measurement.number, k) for k in self._chosen(region))
        return np.stack([(root * each).astype(self.dtype) for each in drawn])

    def _chosen(self, region: Region) -> Sequence[int]:
        return self.draws[region.start[0] : region.stop[0]]


def normals(region: Region, seed: int, role: int, operator: int, draw: int) -> Array:
    """Standard normal numbers by position, each a function of seed, role, operator, draw and pixel alone."""
    return draw_cells(region, seed, (role, operator, draw), lambda stream: stream.standard_normal((CELL, CELL)))


@dataclass(frozen=True)
class Posterior:
    """``N(m, Q⁻¹)`` with ``Q = Σ Aᵢᵀ Wᵢ Aᵢ + DᵀD``, for an image that goes on around its frame, where nothing is measured."""

    measurements: tuple[Measurement, ...]
    prior: Matern
    shape: Shape
    dtype: np.dtype[Any]
    seed: int = 0

    @property
    def padding(self) -> int:
        """Pixels by which the field goes on beyond the frame: it has its own deviation there up to the edge."""
        return math.ceil(self.prior.length)

    @property
    def domain(self) -> Region:
        """The frame with the padding, on the last two axes."""
        return widened(Region.whole(self.shape), self.padding)

    def window(self, core: Region, halo: int) -> Region:
        return widened(core, halo).clip(self.domain)

    def precision(self, window: Region) -> Callable[[Array], Array]:
        """``Q`` of images that are 0 outside a window, there."""
        inner = window.clip(Region.whole(self.shape))
        at: tuple[Any, ...] = (..., *inner.relative_to(window).slices[-2:])

        def apply(images: Array) -> Array:
            result = self.prior.apply(self.prior.apply(_padded(images, 2)))
            if inner.size:
                result[at] += self._measured(Placed(images[at], inner, self.shape), inner)
            return result

        return apply

    def _measured(self, images: Readable, inner: Region) -> Array:
        """``Σ Aᵢᵀ Wᵢ Aᵢ x`` on a region, for images of shape (number, *shape)."""
        return self._adjoints(
            [Weighted(part.operator.forward(images), part.weight) for part in self.measurements], inner
        )

    def _adjoints(self, measured: Sequence[Readable], inner: Region) -> Array:
        """``Σ Aᵢᵀ yᵢ`` on a region, for measurements of shape (number, *shape)."""
        count = measured[0].shape[0]
        region = Region((0, *inner.start), (count, *inner.stop))
        total = np.zeros(region.shape, self.dtype)
        for part, image in zip(self.measurements, measured, strict=True):
            total += part.operator.adjoint(image, (count, *self.shape)).read(region)
        return total

    def _embedded(self, window: Region, inner: Region, pixels: Array) -> Array:
        """Images of a region of the frame on a window around it, with zeros elsewhere."""
        images = np.zeros((len(pixels), *window.shape), self.dtype)
        images[:, *inner.relative_to(window).slices] = pixels
        return images

    def sides(self, window: Region) -> Array:
        """Right-hand sides on a window: of the mean, and of the image that has one deviation of the prior everywhere."""
        inner = window.clip(Region.whole(self.shape))
        field = np.zeros((2, *window.shape), self.dtype)
        field[1] = self.prior.apply(self.prior.apply(self._inside(widened(window, 2))))
        if inner.size:
            level, everywhere = (
                Constant((1, *self.shape), self.dtype, value) for value in (self.prior.level, self.prior.deviation)
            )
            seen = [Unexplained(part.operator.forward(level), part) for part in self.measurements]
            field[:1] += self._embedded(window, inner, self._adjoints(seen, inner))
            field[1:] += self._embedded(window, inner, self._measured(everywhere, inner))
        return field

    def random_sides(self, window: Region, draws: Sequence[int]) -> Array:
        """Right-hand sides of draws on a window."""
        inner, wide = window.clip(Region.whole(self.shape)), widened(window, 1)
        white = np.stack([normals(wide, self.seed, FIELD, 0, k) for k in draws])
        field: Array = self.prior.apply(white).astype(self.dtype)
        if inner.size:
            noise = [RandomMeasurements(part, draws, self.seed, self.dtype) for part in self.measurements]
            field += self._embedded(window, inner, self._adjoints(noise, inner))
        return field

    def _inside(self, region: Region) -> Array:
        """The deviation of the prior within the domain, 0 beyond it."""
        inside = np.zeros(region.shape, np.float64)
        part = region.clip(self.domain)
        inside[part.relative_to(region).slices] = self.prior.deviation
        return inside

    def diagonal(self, window: Region) -> Array:
        """Diagonal of the precision on a window; NaN where an operator does not tell it."""
        diagonal = np.full(window.shape, self.prior.diagonal)
        inner = window.clip(Region.whole(self.shape))
        part = diagonal[inner.relative_to(window).slices]
        for each in self.measurements if inner.size else ():
            part += _squared(each, self.shape, inner)
        return diagonal

    def scale(self, window: Region, diagonal: Array) -> Array:
        """The diagonal; where it is not known, sums of the rows, which are no less where operators have no negative entries."""
        hidden = np.isnan(diagonal)
        if not hidden.any():
            return diagonal
        inner = window.clip(Region.whole(self.shape))
        ones = self._measured(Constant((1, *self.shape), self.dtype, 1.0), inner)
        sums = self.prior.diagonal + np.abs(self._embedded(window, inner, ones)[0])
        scale: Array = np.where(hidden, sums, diagonal)
        return scale


def _squared(part: Measurement, shape: Shape, inner: Region) -> Array:
    """Diagonal of ``AᵀWA``; NaN where it is not known."""
    squared = getattr(part.operator, "squared", None)
    if squared is None:
        return np.full(inner.shape, np.nan)
    operator, exact = squared(shape)
    diagonal: Array = operator.adjoint(part.weight, shape).read(inner).astype(np.float64)
    known = inner.clip(exact)
    hidden = np.ones(inner.shape, bool)
    if known.size:
        hidden[known.relative_to(inner).slices] = False
    diagonal[hidden] = np.nan
    return diagonal


def widened(region: Region, pixels: int) -> Region:
    """A region with more pixels on each side of its last two axes."""
    return region.grow(((0, 0),) * (len(region.start) - 2) + ((pixels, pixels),) * 2)


def _padded(images: Array, pixels: int) -> Array:
    return np.pad(images, [(0, 0)] * (images.ndim - 2) + [(pixels, pixels)] * 2)


@dataclass(frozen=True)
class Solution:
    """Solutions of shape (number, *window), with the residual of each."""

    images: Array
    residuals: Array
    iterations: int


def solve(apply: Callable[[Array], Array], sides: Array, scale: Array, tol: float, most: int = 2000) -> Solution:
    """Conjugate gradients for several right-hand sides at once, each with its own steps.

    ``apply``: the precision; ``sides``: of shape (number, *window); ``scale``: about the diagonal of the precision; ``tol``: largest
    residual, relative to the side of a draw.

    >>> found = solve(lambda x: 2 * x, np.ones((1, 2, 2)), np.ones((2, 2)), 1e-6)
    >>> found.images.tolist(), found.iterations
    ([[[0.5, 0.5], [0.5, 0.5]]], 1)
    """
    images, residual = np.zeros_like(sides), sides.copy()
    inverse = (1 / scale).astype(sides.dtype)
    first = _dots(residual, residual * inverse)
    if not np.isfinite(first).all():
        raise InputError("the data, or the noise level, are not finite here. Look at what noise_sigma and data name.")
    search = residual * inverse
    length, left, most_left = first, first, tol**2 * residual[0].size
    done = 0
    while done < most and (active := left > most_left).any():
        done += 1
        seen = apply(search)
        steps = _ratio(length, _dots(search, seen), active)
        images += _spread(steps, search)
        residual -= _spread(steps, seen)
        scaled = residual * inverse
        left = _dots(residual, scaled)
        search *= _spread(_ratio(left, length, active), search, ones=True)
        search += scaled
        length = left
    return Solution(images, np.sqrt(left / residual[0].size), done)


def _dots(left: Array, right: Array) -> Array:
    return np.array([np.sum(np.multiply(a, b, dtype=np.float64)) for a, b in zip(left, right, strict=True)])


def _ratio(above: Array, below: Array, active: Array) -> Array:
    """The ratio where there is something to gain, else 0."""
    return np.divide(above, below, where=active & (below > 0), out=np.zeros(len(above)))


def _spread(factors: Array, images: Array, ones: bool = False) -> Array:
    """One factor for each image, multiplied with it."""
    shaped: Array = factors.astype(images.dtype).reshape(-1, *[1] * (images.ndim - 1))
    return shaped if ones else shaped * images


SINGLE = 1e-6
"""Least residual that is reached in single precision."""
ORDINARY = 5
"""Brightness of an image, in deviations of the prior, that this holds for."""
BATCH = 8
"""Draws that are solved together: memory, and the bits of a draw, do not depend on their number."""
SOLVED = 0.03
"""Share of the tolerance for the solver: its error is not spread evenly."""


@dataclass(frozen=True)
class Solved:
    """Mean, standard deviation, and draws if they are kept, of shape (images, *shape): each cell on itself with a halo."""

    posterior: Posterior
    halo: int
    draws: tuple[int, ...]
    tol: float
    """Largest error of mean and draws, in standard deviations."""
    estimator: str = "rao-blackwell"
    cell: Shape = ()
    """Edges of the parts that are solved each by itself: the bits depend on no other region."""
    keeps_draws: bool = False

    @property
    def shape(self) -> Shape:
        return (2 + len(self.draws) * self.keeps_draws, *self.posterior.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.posterior.dtype

    def read(self, region: Region) -> Pixels:
        images = np.empty(region.shape, self.dtype)
        core = Region(region.start[1:], region.stop[1:])
        for cell in cells_of(core, self.cell or core.shape):
            found, error = self.solved(cell)
            if not (worst := float(np.abs(error).max())) <= self.tol:
                raise InputError(
                    f"the halo of {self.halo} pixels leaves errors of {worst:.2g} standard deviations from {list(cell.start)} on, where little is measured, "
                    f"and posterior.tol is {self.tol:g}. Write posterior.halo: {2 * self.halo}, or more than the width of a hole; a larger posterior.tol; or "
                    "posterior.method: cg, which needs no halo."
                )
            images[:, *cell.relative_to(core).slices] = found[region.start[0] : region.stop[0]]
        return images

    def solved(self, core: Region) -> tuple[Array, Array]:
        """Mean, deviation and draws on a core; and the effect of a likely image beyond the window, in standard deviations."""
        posterior, window = self.posterior, self.posterior.window(core, self.halo)
        at: tuple[Any, ...] = (slice(None), *core.relative_to(window).slices)
        outer = Scope.current()
        with Scope() as scope:
            diagonal = posterior.diagonal(window)
            scale = posterior.scale(window, diagonal)
            sides = posterior.sides(window)
            bright = _brightness(sides, scale)
            if self.residual(scale) < SINGLE * max(1, bright / ORDINARY):
                posterior = replace(posterior, dtype=np.dtype(np.float64))
                sides = posterior.sides(window)
            # As bright as the mean, so that the solver's error is not multiplied below.
            sides[1] *= bright
            mean, one = self._solutions(posterior, window, scale, sides)
            squares, kept = Squares(diagonal[at[1:]]), list[Array]()
            for first in range(0, len(self.draws), BATCH):
                sides = posterior.random_sides(window, self.draws[first : first + BATCH])
                images = self._solutions(posterior, window, scale, sides)[at].astype(np.float64)
                squares.add(images, sides[at].astype(np.float64))
                kept.extend(images if self.keeps_draws else ())
        if outer is not None:
            outer.read_bytes += scope.read_bytes
        deviation = posterior.prior.deviation
        outside = max(1.0, float(np.abs(mean).max()) / deviation)
        error = (one[at[1:]] / bright - deviation) * outside / np.sqrt(squares.at_least(1 / scale[at[1:]]))
        inner = posterior.prior.level + mean[at[1:]].astype(np.float64)
        maps = (inner, np.sqrt(squares.variance(self.estimator)), *(inner + image for image in kept))
        return np.stack(maps).astype(self.dtype), error

    def _solutions(self, posterior: Posterior, window: Region, scale: Array, sides: Array) -> Array:
        least = self.residual(scale)
        found = solve(posterior.precision(window), sides, scale, least)
        if not found.residuals.max() <= least:
            raise InputError(
                f"the equations of a block are not solved after {found.iterations} steps in the window from {list(window.start)} to {list(window.stop)}. "
                f"Write a larger posterior.tol than {self.tol:g}, or a smaller prior.range than {posterior.prior.length:.4g}."
            )
        return found.images

    def residual(self, scale: Array) -> float:
        """Residual, relative to that of a draw, that keeps the error well below the tolerance in every pixel."""
        least = self.posterior.prior.least
        return SOLVED * self.tol * math.sqrt(least / float(scale.max()))


def _brightness(sides: Array, scale: Array) -> float:
    """Largest side of the mean relative to that of one deviation of the prior; 1 or more."""
    mean, one = (float(np.abs(side / np.sqrt(scale)).max()) for side in sides)
    return max(1.0, mean / one)


class Squares:
    """Variance of each pixel from draws around 0 and their right-hand sides, added batch by batch.

    ``1/Q_ii`` is the variance of a pixel where all others are known; that of its mean given the others is left to the draws (Rao-Blackwell). Where the
    diagonal is not known (NaN), the squares of the draws are used.

    References
    ----------
    P. Sidén, F. Lindgren, D. Bolin, M. Villani, Efficient covariance approximations for large sparse precision matrices, J. Comput. Graph. Stat. 27
    (2018).
    """

    def __init__(self, diagonal: Array) -> None:
        self.diagonal, self.count = diagonal, 0
        self.plain, self.given = np.zeros(diagonal.shape), np.zeros(diagonal.shape)

    def add(self, draws: Array, sides: Array) -> None:
        self.count += len(draws)
        self.plain += np.sum(np.square(draws), 0)
        self.given += np.sum(np.square(draws - sides / self.diagonal), 0)

    def variance(self, estimator: str) -> Array:
        if not self.count:
            return np.full(self.diagonal.shape, np.nan)
        if estimator == "samples":
            return self.plain / self.count
        is_known = np.isfinite(self.diagonal)
        variance: Array = np.where(is_known, 1 / self.diagonal + self.given / self.count, self.plain / self.count)
        return variance

    def at_least(self, bound: Array) -> Array:
        """The variance by Rao-Blackwell; where squares of draws would scatter more, or there are none, a lower bound of it."""
        known = np.where(np.isfinite(self.diagonal), self.variance("rao-blackwell"), np.nan)
        least: Array = np.fmax(known, bound)
        return least
