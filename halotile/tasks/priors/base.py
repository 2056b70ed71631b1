"""Base of all priors, and of those that a denoiser computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.image_task import Denoised, Shared
from halotile.tasks.operators.base import Derived
from halotile.tasks.operators.sum import Total
from halotile.tasks.options import NO_OPTION


@dataclass(frozen=True, kw_only=True)
class Prior(ABC):
    """A prior ``g`` on lazy images. Its fields are options of a job."""

    name: ClassVar[str]
    weighs_prox: ClassVar[bool] = True
    """False where the prox has no weight."""
    is_there: ClassVar[bool] = True
    """False for ``g = 0``."""

    @abstractmethod
    def prox(self, image: Readable, step: float) -> Readable:
        """``argmin_u |u - x|² / 2 + step g(u)``, or its substitute."""

    @abstractmethod
    def slope(self, image: Readable) -> Readable | None:
        """The gradient of ``g`` at ``x``, or its substitute; None for none."""

    def density(self, image: Readable) -> Readable | None:
        """The contribution of each pixel of ``x`` to ``g``; None if ``g`` is unknown."""
        return None

    def steepness(self) -> float:
        """Lipschitz constant of the slope, which limits the step size; 0 where it is constant almost everywhere."""
        return 0.0

    def reach(self) -> int:
        """The larger reach of prox and slope, in pixels."""
        return 0

    def computed_by(self) -> Denoiser | None:
        """The denoiser that computes it in tiles; None for a prior that is computed pixel by pixel."""
        return None

    def with_denoised(self, change: Callable[[Denoised], Denoised]) -> Self:
        """Return the prior with its denoised image changed, where it has one."""
        return self


@dataclass(frozen=True, kw_only=True)
class DenoisingPrior(Prior):
    """A prior that a denoiser computes: the planner adds the denoised image, whose source is replaced."""

    denoised: Denoised | None = field(default=None, metadata=NO_OPTION)

    def reach(self) -> int:
        """The depth of the denoiser."""
        return max(max(pair) for pair in self.planned.grid.depth)

    @property
    def planned(self) -> Denoised:
        """The denoised image, once it is planned."""
        assert self.denoised is not None
        return self.denoised

    def with_denoised(self, change: Callable[[Denoised], Denoised]) -> Self:
        """Return the prior with its denoised image changed."""
        return replace(self, denoised=change(self.planned))


def denoised_of(prior: Prior) -> Denoised | None:
    """The denoised image of a prior, if it has one."""
    return prior.denoised if isinstance(prior, DenoisingPrior) else None


@dataclass(frozen=True)
class Density(Derived):
    """The contribution of each pixel to a prior, in double precision."""

    scale: float

    @property
    def dtype(self) -> np.dtype[Any]:
        """Double precision."""
        return np.dtype(np.float64)


@dataclass(frozen=True)
class Within(Derived):
    """An image inside bounds: the projection onto them, pixel by pixel.

    ``low, high``: least and greatest value; None for none; ``before``: the image before a step; at least half of it remains.

    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> read_all(Within(InMemory(np.array([-2.0, 1.0, 9.0])), 0.0, 5.0, InMemory(np.array([1.0, 4.0, 0.0])))).tolist()
    [0.5, 2.0, 5.0]
    """

    low: float | None
    high: float | None
    before: Readable | None = None

    def read(self, region: Region) -> Pixels:
        pixels: Pixels = self.image.read(region).astype(self.dtype, copy=False)
        if self.before is not None:
            pixels = np.maximum(pixels, self.before.read(region) * self.dtype.type(0.5))
        return pixels if self.low is self.high is None else np.clip(pixels, self.low, self.high)


def denoised_in(image: Readable) -> Iterator[Denoised]:
    """Yield every denoised image in the expression of an image, each once."""
    waiting, seen = [image], set[int]()
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, Denoised):
            yield at
        if isinstance(at, Denoised | Shared):
            waiting.append(at.source)
        elif isinstance(at, Within):
            waiting.append(at.image)
        elif isinstance(at, Total):
            waiting.extend(at.parts)
