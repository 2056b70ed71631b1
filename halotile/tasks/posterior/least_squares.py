"""A Gaussian posterior on the whole domain as least squares: the mean and each draw, and the variance from draws on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.views import Constant
from halotile.tasks.operators.base import Derived, OperatorKind, Shape
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.crop import Crop
from halotile.tasks.operators.mask import Mask, Masked
from halotile.tasks.operators.sum import Total
from halotile.tasks.posterior.gaussian import FIELD, MEASURED, Posterior, normals, widened
from halotile.tasks.priors.matern import Matern
from halotile.tasks.terms import Term

DOUBLE = np.dtype(np.float64)


@dataclass(frozen=True)
class White:
    """Standard normal numbers by position, for an image whose first pixel is at ``start``."""

    dtype: ClassVar[np.dtype[Any]] = DOUBLE

    shape: Shape
    start: Shape
    key: tuple[int, int, int, int]  # seed, role, operator, draw

    def read(self, region: Region) -> Pixels:
        return normals(region.shift(self.start), *self.key)


@dataclass(frozen=True)
class Root(Derived):
    """``w^½``."""

    def read(self, region: Region) -> Pixels:
        root: Array = np.sqrt(self.image.read(region))
        return root


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


def frame(of: Posterior) -> Crop:
    """The part of the domain that an image is wanted of."""
    return Crop(origin=(of.padding, of.padding), size=(of.shape[-2], of.shape[-1]))


def terms_of(of: Posterior, draw: int | None) -> tuple[Term, ...]:
    """Terms whose least squares on the domain are the mean less that of the prior (None), or a draw around it."""
    terms = []
    for part in of.measurements:
        root, operator, measured = Root(part.weight), part.operator, part.data.shape
        if draw is None:
            level = operator.forward(Constant(of.shape, DOUBLE, of.prior.level))
            target: Readable = Masked(Total((part.data, level), (1.0, -1.0)), root)
        else:
            target = White(measured, (0,) * len(measured), (of.seed, MEASURED, part.number, draw))
        terms.append(Term(Framed((frame(of), operator, Mask(mask=root))), target))
    around = widened(of.domain, 1)
    white = None if draw is None else White(around.shape, around.start, (of.seed, FIELD, 0, draw))
    return (*terms, Term(Differences(of.prior), white or Constant(around.shape, DOUBLE)))


@dataclass(frozen=True)
class Known:
    """``1 / Q_ii``, the variance of a pixel among known ones, on the domain; 0 where it is not known, or not used."""

    dtype: ClassVar[np.dtype[Any]] = DOUBLE

    posterior: Posterior
    estimator: str

    @property
    def shape(self) -> Shape:
        return self.posterior.domain.shape

    def read(self, region: Region) -> Array:
        parts = self.posterior.measurements
        if self.estimator == "samples" or not all(hasattr(part.operator, "squared") for part in parts):
            return np.zeros(region.shape)
        known: Array = np.nan_to_num(1 / self.posterior.diagonal(region.shift(self.posterior.domain.start)))
        return known


@dataclass(frozen=True)
class SquaredDraw(Derived):
    """Square of the distance of a draw from what the known pixels around each leave."""

    known: Known
    draw: int

    def read(self, region: Region) -> Pixels:
        away, known, of = self.image.read(region), self.known.read(region), self.known.posterior
        if known.any():
            away = away - known * of.random_sides(region.shift(of.domain.start), (self.draw,))[0]
        square: Array = np.square(away)
        return square


@dataclass(frozen=True)
class Deviation(Derived):
    """Standard deviation of each pixel, for the sum of the squares of ``count`` draws."""

    known: Known
    count: int

    def read(self, region: Region) -> Pixels:
        deviation: Array = np.sqrt(self.known.read(region) + np.divide(self.image.read(region), self.count))
        return deviation
