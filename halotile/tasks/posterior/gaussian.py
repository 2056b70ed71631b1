"""Gaussian posteriors of an image: the precision, random right-hand sides by position, and their solution on a window."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.views import Constant
from halotile.tasks.image_task import Scope, cells_of
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.operators.base import Derived, InMemory, OperatorKind, Shape
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.crop import Crop, Pasted
from halotile.tasks.operators.mask import Mask, Masked
from halotile.tasks.operators.sum import Total
from halotile.tasks.priors.matern import Matern
from halotile.tasks.terms import Gradient, Measurement, NormalImage, Root, Term

DOUBLE = np.dtype(np.float64)

# Roles of random numbers: noise of a measurement, and white noise of the prior. No number of an operator in a
# simulation is as large.
MEASURED, FIELD = 2**31, 2**31 + 1


@dataclass(frozen=True)
class Framed(Composition):
    """A composition that cuts the frame out of an image first; ``whole`` where one of its operators is."""

    @property
    def kind(self) -> OperatorKind:
        return "whole" if any(operator.kind == "whole" for operator in self.operators) else "windowed"


@dataclass(frozen=True)
class Differences:
    """``D`` of a prior: of an image that is 0 outside, one with a pixel more on each side."""

    name: ClassVar[str] = "matern"
    kind: ClassVar[OperatorKind] = "local"
    reach: ClassVar[int] = 2

    prior: Matern

    @property
    def _stencil(self) -> Blur:
        kernel = self.prior.tau * np.array([[0, -1, 0], [-1, self.prior.kappa2 + 4, -1], [0, -1, 0]])
        return Blur(kernel=kernel, boundary="valid", engine="direct")

    def measured(self, image: Shape) -> Shape:
        return (*image[:-2], image[-2] + 2, image[-1] + 2)

    def forward(self, image: Readable) -> Readable:
        return self._stencil.adjoint(image, self.measured(image.shape))

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        return self._stencil.forward(measurement)


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
        return math.ceil(float(self.prior.range))

    @property
    def domain(self) -> Region:
        """The frame with the padding, on the last two axes."""
        return Region.whole(self.shape).widen(self.padding)

    def window(self, core: Region, halo: int) -> Region:
        return core.widen(halo).clip(self.domain)

    @property
    def frame(self) -> Crop:
        """The part of the domain that the image is wanted of."""
        return Crop(origin=(self.padding, self.padding), size=(self.shape[-2], self.shape[-1]))

    def terms(self, draw: int | None) -> tuple[Term, ...]:
        """Terms whose least squares on the domain are the mean less that of the prior (None), or a draw around it."""
        terms, around = [], self.domain.widen(1)
        white: Readable = Constant(around.shape, DOUBLE)
        if draw is not None:
            white = RandomImage(around.shape, DOUBLE, self.seed, (FIELD, 0, draw), around.start)
        for part in self.measurements:
            root, operator, shape = Root(part.weight), part.operator, part.data.shape
            if draw is None:
                level = operator.forward(Constant(self.shape, DOUBLE, float(self.prior.mean)))
                target: Readable = Masked(Total((part.data, level), (1.0, -1.0)), root)
            else:
                target = RandomImage(shape, DOUBLE, self.seed, (MEASURED, part.number, draw))
            terms.append(Term(Framed((self.frame, operator, Mask(mask=root))), target))
        return (*terms, Term(Differences(self.prior), white))

    def precision(self, window: Region) -> Callable[[Array], Array]:
        """``Q`` of images that are 0 outside a window, there."""
        terms, inner = self.terms(None)[:-1], window.relative_to(self.domain)

        def apply(images: Array) -> Array:
            whole, region = (len(images), *self.domain.shape), Region((0, *inner.start), (len(images), *inner.stop))
            applied = self.prior.apply(self.prior.apply(np.pad(images, ((0, 0),) * (images.ndim - 2) + ((2, 2),) * 2)))
            applied += NormalImage(Pasted(InMemory(images), region, whole), terms).read(region)
            return applied

        return apply

    def sides(self, window: Region) -> Array:
        """Right-hand sides on a window: of the mean, and of the image that has one deviation of the prior everywhere."""
        everywhere = Constant(self.domain.shape, DOUBLE, float(self.prior.std))
        image = NormalImage(everywhere, self.terms(None)).read(window.relative_to(self.domain))
        return np.stack([*self.random_sides(window, (None,)), image.astype(self.dtype)])

    def brightest_around(self, window: Region, width: int) -> float:
        """Largest brightness that the data show around a window, in deviations of the prior: a local mean, where a window has no pixel."""
        *others, height, length = (slice(a, b) for a, b in zip(window.start, window.stop, strict=True))
        wide = window.widen(width).clip(self.domain)
        (top, left), (bottom, right) = wide.start[-2:], wide.stop[-2:]
        across = slice(left, right)
        strips = [
            (slice(top, height.start), across), (slice(height.stop, bottom), across),
            (height, slice(left, length.start)), (height, slice(length.stop, right)),
        ]  # fmt: skip
        found = 0.0
        for strip in strips:
            spans = (*others, *strip)
            if (region := Region(tuple(s.start for s in spans), tuple(s.stop for s in spans))).size:
                mean, one = np.abs(self.sides(region))
                found = max(found, float(np.max(np.divide(mean, one, where=one > 0, out=np.zeros_like(mean)))))
        return found

    def random_sides(self, window: Region, draws: Sequence[int | None]) -> Array:
        """Right-hand sides of draws on a window; None: of the mean."""
        zeros, region = Constant(self.domain.shape, DOUBLE), window.relative_to(self.domain)
        gradients = (Gradient(zeros, self.terms(draw), records_misfit=False) for draw in draws)
        return -np.stack([gradient.read(region) for gradient in gradients]).astype(self.dtype)

    def diagonal(self, window: Region) -> Array:
        """Diagonal of the precision on a window; NaN where an operator does not tell it."""
        diagonal = np.full(window.shape, self.prior.diagonal)
        inner = window.clip(Region.whole(self.shape))
        part = diagonal[inner.relative_to(window).slices]
        for each in self.measurements if inner.size else ():
            part += _squared(each, self.shape, inner)
        return diagonal

    def known(self, window: Region, estimator: str) -> Array:
        """``1 / Q_ii``, the variance of a pixel among known ones; 0 where it is not known, or not used."""
        known: Array = np.nan_to_num(1 / self.diagonal(window)) * (estimator != "samples")
        return known

    def scale(self, window: Region, diagonal: Array) -> Array:
        """The diagonal; where it is not known, sums of the rows, which are no less where operators have no negative entries."""
        hidden = np.isnan(diagonal)
        if not hidden.any():
            return diagonal
        ones, region = Constant(self.domain.shape, DOUBLE, 1.0), window.relative_to(self.domain)
        sums = self.prior.diagonal + np.abs(NormalImage(ones, self.terms(None)[:-1]).read(region))
        scale: Array = np.where(hidden, sums, diagonal)
        return scale


def _squared(part: Measurement, shape: Shape, inner: Region) -> Array:
    """Diagonal of ``AᵀWA``; NaN where it is not known."""
    diagonal, squared = np.full(inner.shape, np.nan), getattr(part.operator, "squared", None)
    if squared is not None:
        operator, exact = squared(shape)
        if (known := inner.clip(exact)).size:
            diagonal[known.relative_to(inner).slices] = operator.adjoint(part.weight, shape).read(known)
    return diagonal


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
    inverse, scaled = (1 / scale).astype(sides.dtype), np.empty_like(sides)
    first = _dots(residual, np.multiply(residual, inverse, out=scaled))
    if not np.isfinite(first).all():
        raise InputError("the data, or the noise level, are not finite here. Look at what noise_sigma and data name.")
    search = scaled.copy()
    length, left, most_left = first, first, tol**2 * residual[0].size
    done = 0
    while done < most and (active := left > most_left).any():
        done += 1
        seen = apply(search)
        steps = _ratio(length, _dots(search, seen), active).astype(sides.dtype)
        _add(images, steps, search, scaled)
        _add(residual, -steps, seen, scaled)
        left = _dots(residual, np.multiply(residual, inverse, out=scaled))
        for image, each, factor in zip(search, scaled, _ratio(left, length, active).astype(sides.dtype), strict=True):
            image *= factor
            image += each
        length = left
    return Solution(images, np.sqrt(left / residual[0].size), done)


def _dots(left: Array, right: Array) -> Array:
    return np.array([np.sum(np.multiply(a, b, dtype=np.float64)) for a, b in zip(left, right, strict=True)])


def _ratio(above: Array, below: Array, active: Array) -> Array:
    """The ratio where there is something to gain, else 0."""
    return np.divide(above, below, where=active & (below > 0), out=np.zeros(len(above)))


def _add(images: Array, factors: Array, others: Array, at_hand: Array) -> None:
    """Add multiples of other images to each, in place; ``at_hand`` is overwritten."""
    for image, factor, other, product in zip(images, factors, others, at_hand, strict=True):
        image += np.multiply(other, factor, out=product)


SINGLE = 1e-6  # least residual that is reached in single precision
ORDINARY = 5  # brightness of an image, in deviations of the prior, that this holds for
BATCH = 2  # draws that are solved together: neither time nor bits depend on it, and memory grows with it
# Brightness of the image around a window, in deviations of the prior, that is looked up where it matters.
BRIGHTER = 100
SOLVED = 0.03  # share of the tolerance for the solver: its error is not spread evenly


class NotSolved(InputError):
    """Too many iterations for a block."""


@dataclass(frozen=True)
class Solved:
    """Mean, standard deviation, and draws if they are kept, of shape (images, *shape): each cell on itself with a halo."""

    posterior: Posterior
    halo: int
    draws: tuple[int, ...]
    tol: float  # largest error of mean and draws, in standard deviations
    estimator: str = "rao-blackwell"
    cell: Shape = ()  # edges of the parts that are solved each by itself: the bits depend on no other region
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
            # The sides see farthest: what they have read of the measurements serves all the rest.
            sides = posterior.sides(window)
            scale = posterior.scale(window, posterior.diagonal(window))
            bright = _brightness(sides, scale)
            if self.residual(scale) < SINGLE * max(1, bright / ORDINARY):
                posterior = replace(posterior, dtype=np.dtype(np.float64))
                sides = posterior.sides(window)
            # As bright as the mean, so that the solver's error is not multiplied below.
            sides[1] *= bright
            mean, one = self._solutions(posterior, window, scale, sides)
            known, squares, kept = posterior.known(core, self.estimator), np.zeros(core.shape), list[Array]()
            for first in range(0, len(self.draws), BATCH):
                sides = posterior.random_sides(window, self.draws[first : first + BATCH])
                images = self._solutions(posterior, window, scale, sides)[at].astype(np.float64)
                squares += np.sum(np.square(images - known * sides[at]), 0)
                kept.extend(images if self.keeps_draws else ())
        if outer is not None:
            outer.read_bytes += scope.read_bytes
        variance = known + squares / (len(self.draws) or math.nan)
        # Where squares of draws alone would scatter, or there are none, the least that the variance may be.
        least = np.fmax(np.where(known > 0, variance, math.nan), 1 / scale[at[1:]])
        deviation, level = float(posterior.prior.std), float(posterior.prior.mean)
        error, outside = (one[at[1:]] / bright - deviation) / np.sqrt(least), float(np.abs(mean).max()) / deviation
        if max(BRIGHTER, outside) * float(np.abs(error).max()) > self.tol:
            outside = max(outside, posterior.brightest_around(window, self.halo))
        error *= max(1.0, outside)
        inner = level + mean[at[1:]].astype(np.float64)
        maps = (inner, np.sqrt(variance), *(inner + image for image in kept))
        return np.stack(maps).astype(self.dtype), error

    def _solutions(self, posterior: Posterior, window: Region, scale: Array, sides: Array) -> Array:
        least = self.residual(scale)
        found = solve(posterior.precision(window), sides, scale, least)
        if not found.residuals.max() <= least:
            raise NotSolved(
                f"the equations of a block are not solved after {found.iterations} steps in the window from {list(window.start)} to {list(window.stop)}. "
                f"Write a larger posterior.tol than {self.tol:g}, or a smaller prior.range than {posterior.prior.range:.4g}."
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


@dataclass(frozen=True)
class SquaredDraw(Derived):
    """Square of the distance of a draw from what the known pixels around each leave."""

    posterior: Posterior
    estimator: str
    draw: int

    def read(self, region: Region) -> Pixels:
        away, at = self.image.read(region), region.shift(self.posterior.domain.start)
        known = self.posterior.known(at, self.estimator)
        if known.any():
            away = away - known * self.posterior.random_sides(at, (self.draw,))[0]
        square: Array = np.square(away)
        return square


@dataclass(frozen=True)
class Deviation(Derived):
    """Standard deviation of each pixel, for the sum of the squares of ``count`` draws."""

    posterior: Posterior
    estimator: str
    count: int

    def read(self, region: Region) -> Pixels:
        known = self.posterior.known(region.shift(self.posterior.domain.start), self.estimator)
        deviation: Array = np.sqrt(known + np.divide(self.image.read(region), self.count))
        return deviation
