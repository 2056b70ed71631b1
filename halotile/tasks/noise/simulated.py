"""A simulated measurement: the forward of a reference image, with noise by position.

A pixel gets the same random number in whatever tile it is computed. The plane is cut into cells of fixed size. Each cell has its own
stream (Philox, keyed by seed, operator and plane; its counter is the cell's position), and all its pixels are drawn at once.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.tasks.operators.base import Derived

CELL = 64  # edge of a cell in pixels. The numbers of a seed depend on it.


@dataclass(frozen=True)
class RandomImage:
    """Standard normal numbers, the same for the same seed whatever region is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    seed: int
    operator: int | tuple[int, ...] = 0
    start: tuple[int, ...] = ()  # position of the first pixel, where that is not 0

    def read(self, region: Region) -> NDArray[Any]:
        drawn = normals(region.shift(self.start) if self.start else region, self.seed, self.operator)
        return drawn.astype(self.dtype, copy=False)


Sampler = Callable[[np.random.Generator], NDArray[Any]]


def draw_cells(region: Region, seed: int, operator: int | tuple[int, ...], draw: Sampler) -> NDArray[Any]:
    """Draw numbers for the pixels of a region, by their global positions.

    ``region``: cells span the last two axes; a region of one axis is in the first row; ``seed, operator``: image of random numbers: each 0 or
    more, and the second one or several; ``draw``: returns the numbers of one cell, shape (CELL, CELL).

    >>> normal = lambda stream: stream.standard_normal((CELL, CELL))
    >>> whole = draw_cells(Region((0, 0), (100, 100)), 1, 0, normal)
    >>> part = draw_cells(Region((60, 70), (80, 90)), 1, 0, normal)
    >>> bool((part == whole[60:80, 70:90]).all())
    True
    """
    if len(region.start) == 1:
        row = Region((0, *region.start), (1, *region.stop))
        line: NDArray[Any] = draw_cells(row, seed, operator, draw)[0]
        return line
    drawn = np.empty(region.shape, np.float64)
    rows, columns = (range(a // CELL, -(-b // CELL)) for a, b in zip(region.start[-2:], region.stop[-2:], strict=True))
    planes = itertools.product(*(range(a, b) for a, b in zip(region.start[:-2], region.stop[:-2], strict=True)))
    for plane in planes:
        image = (operator,) if isinstance(operator, int) else operator
        key = np.random.SeedSequence([seed, *image, *plane]).generate_state(2, np.uint64)
        inner = tuple(p - a for p, a in zip(plane, region.start, strict=False))
        for y, x in itertools.product(rows, columns):
            stream = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, y % 2**63, x % 2**63]))
            cell = Region((y * CELL, x * CELL), ((y + 1) * CELL, (x + 1) * CELL))
            window = Region(region.start[-2:], region.stop[-2:])
            part = cell.clip(window)
            drawn[inner][part.relative_to(window).slices] = draw(stream)[part.relative_to(cell).slices]
    return drawn


def normals(region: Region, seed: int, operator: int | tuple[int, ...]) -> NDArray[Any]:
    """Standard normal numbers by position, each a function of seed, operator and pixel alone."""
    return draw_cells(region, seed, operator, lambda stream: stream.standard_normal((CELL, CELL)))


def gaussian(clean: NDArray[Any], region: Region, *, sigma: float, seed: int, operator: int) -> NDArray[Any]:
    """``y = x + sigma n``, n standard normal, for the pixels of a region."""
    return (clean + sigma * normals(region, seed, operator)).astype(clean.dtype)


def poisson(clean: NDArray[Any], region: Region, *, gain: float, seed: int, operator: int) -> NDArray[Any]:
    """``y = gain P(x / gain)``, P a Poisson count: shot noise for the pixels of a region.

    The count is the quantile of one uniform number for each pixel, so that it depends on the rate of that
    pixel alone.
    """
    from scipy.special import pdtrik

    uniform = draw_cells(region, seed, operator, lambda stream: stream.random((CELL, CELL)))
    rate = np.maximum(clean.astype(np.float64) / gain, 0)
    with np.errstate(invalid="ignore"):
        count = np.ceil(pdtrik(uniform, np.maximum(rate, 1e-12)))
    return (gain * np.where(np.isnan(count), 0.0, np.maximum(count, 0))).astype(clean.dtype)


ROUNDING = 1e-5  # the fraction of the brightest pixel by which a convolution may round below 0 on an empty background
FAINT = 1e-3  # counts below 0 that are taken for 0

Noise = Literal["gaussian", "poisson", "none"]


@dataclass(frozen=True)
class Simulated(Derived):
    """``A x`` with noise: the same numbers for the same seed, whatever region is read.

    ``image``: ``A x``; ``noise``: ``gaussian``, ``poisson`` or ``none``; ``level``: gaussian: the standard deviation. poisson: the value of one
    count; ``background``: poisson: added to ``A x`` before counting; ``seed, operator``: select the noise: each operator of a stack has its own.

    >>> import numpy as np
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> grey = InMemory(np.full((100, 100), 0.5, "float32"))
    >>> noisy = Simulated(grey, "gaussian", level=0.1, seed=3)
    >>> bool((noisy.read(Region((60, 70), (80, 90))) == read_all(noisy)[60:80, 70:90]).all())
    True
    """

    noise: Noise
    level: float
    background: float = 0.0
    seed: int = 0
    operator: int = 0

    def read(self, region: Region) -> Pixels:
        clean = self.image.read(region).astype(self.dtype, copy=False)
        if self.noise == "gaussian":
            return gaussian(clean, region, sigma=self.level, seed=self.seed, operator=self.operator)
        if self.noise == "poisson":
            lit = clean + self.dtype.type(self.background)
            self._check_light(lit)
            return poisson(lit, region, gain=self.level, seed=self.seed, operator=self.operator)
        return clean

    def _check_light(self, lit: NDArray[Any]) -> None:
        """Refuse pixels for which no count can be drawn; values that rounding leaves below 0 count as 0."""
        finite = np.isfinite(lit)
        brightest = float(np.max(lit, initial=0, where=finite))
        dark = lit < -max(ROUNDING * brightest, FAINT * self.level)
        if bad := int(np.count_nonzero(dark | ~finite)):
            least = float(np.min(lit, initial=0, where=finite))
            raise InputError(
                f"poisson noise counts light, but {bad:,} of {lit.size:,} pixels that operators[{self.operator}] makes of the "
                f"reference here are below 0 or not finite, the least {least:.3g}. Write a reference that is nowhere below 0, "
                "or fidelity: {name: poisson, background: ...} to raise it."
            )
