"""The normal operator of a stack of blurs, combined in one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeGuard

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.convolution.overlap_save import EngineName, engine_for
from halotile.tasks.operators.base import Derived, Operator, OperatorKind, Shape
from halotile.tasks.operators.blur import RULES, Blur
from halotile.tasks.operators.common.kernel import Frame, Seen
from halotile.tasks.operators.sum import Total


@dataclass(frozen=True, kw_only=True, eq=False)
class Normal:
    """``N x = sum_i weights[i] A_i^T A_i x`` for blurs A_i: one correlation, however many blurs there are.

    Away from the rim N is a correlation with the weighted sum of the kernels' autocorrelations (the folded kernel), computed in
    double precision. Within half a kernel of the rim (a whole kernel if boundaries differ or are ``valid``) the sum is computed
    term by term; a stack whose boundaries are all ``circular`` has no rim. The form for a pixel depends only
    on its position, so any region has the bits of the whole if the cells of transforms have fixed places. In single precision
    the two forms differ by less than 1e-6 (root mean square).

    Parameters
    ----------
    operators : tuple of Blur
        With ``factor: 1``.
    weights : tuple of float
        One for each.
    engine : str
        Method of the convolution with the folded kernel: as for :class:`~halotile.tasks.operators.blur.Blur`.
    still : bool
        Whether the cells of the transforms have fixed places, whatever region is read.

    Raises
    ------
    ConfigError
        When an operator cannot be folded, or the number of weights is wrong.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> normal = Normal(operators=(Blur(kernel=np.ones((1, 2))),), weights=(0.5,))
    >>> normal.kernel.round(9).tolist()
    [[[0.5, 1.0, 0.5]]]
    >>> read_all(normal(InMemory(np.array([[0.0, 2.0, 0.0, 0.0]])))).round(9).tolist()
    [[1.0, 2.0, 1.0, 0.0]]
    """

    name: ClassVar[str] = "normal"
    kind: ClassVar[OperatorKind] = "local"

    operators: tuple[Blur, ...]
    weights: tuple[float, ...]
    engine: EngineName = "auto"
    still: bool = True

    def __post_init__(self) -> None:
        for number, operator in enumerate(self.operators):
            if not can_fold(operator):
                raise ConfigError(
                    f"operator {number} ({operator.name}) cannot be folded into a kernel: only blurs with factor 1 can. "
                    "Write exact: true, or omit the operator."
                )
        if not self.operators or len(self.operators) != len(self.weights):
            raise ConfigError(
                f"there are {len(self.operators)} operators and {len(self.weights)} weights: write one weight for each "
                "operator, and at least one operator."
            )

    @cached_property
    def kernel(self) -> NDArray[Any]:
        """The folded kernel in double precision: shape (1 or planes, 2 rows - 1, 2 columns - 1)."""
        from scipy import fft

        lengths = [2 * n - 1 for n in self._taps]
        power = sum(
            weight * np.abs(fft.rfft2(operator.kernel.astype(np.float64), s=lengths)) ** 2
            for operator, weight in zip(self.operators, self.weights, strict=True)
        )
        folded: NDArray[Any] = fft.fftshift(fft.irfft2(power, s=lengths), axes=(-2, -1))
        return folded.reshape(-1, *lengths)

    @property
    def _taps(self) -> tuple[int, int]:
        """Largest numbers of rows and columns of the kernels."""
        rows, columns = zip(*(operator.kernel.shape[-2:] for operator in self.operators), strict=True)
        return max(rows), max(columns)

    @property
    def reach(self) -> int:
        """The reach of a forward and an adjoint."""
        return max(self._taps) - 1

    @property
    def _rule(self) -> str | None:
        """The rim rule of the folded kernel, if all blurs share one."""
        boundaries = {operator.boundary for operator in self.operators}
        return RULES[boundaries.pop()] if len(boundaries) == 1 and "valid" not in boundaries else None

    def with_engine(self, dtype: np.dtype[Any], exact: bool) -> Normal:
        """The operator with ``engine: auto`` decided, for computations in this dtype."""
        engine = engine_for(self.kernel.shape, dtype, exact) if self.engine == "auto" else self.engine
        return replace(self, engine=engine)

    def measured(self, image: Shape) -> Shape:
        for operator in self.operators:
            operator.measured(image)
        return image

    def interior(self, image: Shape) -> Region:
        """The region in which the folded kernel is valid; it may be empty."""
        if self._rule == "periodic":
            return Region.whole(image)
        margins = (n - 1 if self._rule is None else n // 2 + 1 for n in self._taps)
        grown = ((0, 0),) * (len(image) - 2) + tuple((-n, -n) for n in margins)
        return Region.whole(image).grow(grown)

    def plain(self, image: Readable) -> Total:
        """``N x`` term by term."""
        seen = [operator.forward(image) for operator in self.operators]
        return weighted_adjoint(self.operators, seen, self.weights, image.shape)

    def folded(self, image: Readable) -> Seen:
        """``N x`` with the folded kernel: valid in the interior."""
        y, x = (
            Frame(length, length, 2 * taps - 1, 1, taps - 1, self._rule or "constant")
            for length, taps in zip(image.shape[-2:], self._taps, strict=True)
        )
        return Seen(image, self.kernel, (y, x), self.engine, self.still)

    def forward(self, image: Readable) -> Folded:
        """``N x``."""
        self.measured(image.shape)
        return Folded(image, self)

    __call__ = forward

    def adjoint(self, measurement: Readable, image: Shape) -> Folded:
        """``N y``: N is self-adjoint."""
        return self.forward(measurement)


@dataclass(frozen=True)
class Folded(Derived):
    """``N x``, each pixel in the form for its position."""

    normal: Normal

    def read(self, region: Region) -> Pixels:
        interior = self.normal.interior(self.shape)
        centre = region.clip(interior)
        if centre == region:
            return self.normal.folded(self.image).read(region)
        if centre.size == 0:
            return self.normal.plain(self.image).read(region)
        pixels = np.empty(region.shape, self.dtype)
        pixels[centre.relative_to(region).slices] = self.normal.folded(self.image).read(centre)
        for part in around(region, centre):
            pixels[part.relative_to(region).slices] = self.normal.plain(self.image).read(part)
        return pixels


def can_fold(operator: Operator) -> TypeGuard[Blur]:
    """Return whether :class:`Normal` takes this operator.

    >>> can_fold(Blur(kernel=np.ones((3, 3)))), can_fold(Blur(kernel=np.ones((3, 3)), factor=2))
    (True, False)
    """
    return isinstance(operator, Blur) and operator.factor == 1


def weighted_adjoint(
    operators: Sequence[Operator], measurements: Sequence[Readable], weights: Sequence[float], image: Shape
) -> Total:
    """``b = sum_i weights[i] A_i^T y_i``, of the shape ``image``, added in order.

    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> y = InMemory(np.array([[1.0, 2.0]]))
    >>> read_all(weighted_adjoint([Blur(kernel=np.ones((1, 1)))], [y], [3.0], (1, 2))).tolist()
    [[3.0, 6.0]]
    """
    pairs = zip(operators, measurements, strict=True)
    return Total(tuple(operator.adjoint(y, image) for operator, y in pairs), tuple(weights))


def around(region: Region, centre: Region) -> Iterator[Region]:
    """Yield the parts of a region outside its centre, cut along the last two axes.

    >>> [part.shape for part in around(Region((0, 0), (10, 9)), Region((2, 0), (10, 6)))]
    [(2, 9), (8, 3)]
    """
    rest = region
    for axis in (len(region.start) - 2, len(region.start) - 1):
        start, stop = centre.start[axis], centre.stop[axis]
        for part in (_span(rest, axis, rest.start[axis], start), _span(rest, axis, stop, rest.stop[axis])):
            if part.size:
                yield part
        rest = _span(rest, axis, start, stop)


def _span(region: Region, axis: int, start: int, stop: int) -> Region:
    """The region with another span on one axis."""
    return Region(
        (*region.start[:axis], start, *region.start[axis + 1 :]), (*region.stop[:axis], stop, *region.stop[axis + 1 :])
    )


OPERATOR = Normal
