"""Priors of an image, with the two functions that solvers use: a prox and a slope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.operators.base import Derived
from halotile.tasks.operators.sum import Total
from halotile.tasks.shared import Shared


class Prior(Protocol):
    """A prior ``g`` on lazy images."""

    def prox(self, image: Readable, step: float) -> Readable:
        """``argmin_u |u - x|² / 2 + step g(u)``, or its substitute."""

    def slope(self, image: Readable) -> Readable | None:
        """The gradient of ``g`` at ``x``, or its substitute; None for none."""

    def density(self, image: Readable) -> Readable | None:
        """The contribution of each pixel of ``x`` to ``g``; None if ``g`` is unknown."""

    def steepness(self) -> float:
        """Lipschitz constant of the slope, which limits the step size."""

    def reach(self) -> int:
        """The larger reach of the two, in pixels."""


@dataclass(frozen=True)
class NoPrior:
    """``g = 0``."""

    def prox(self, image: Readable, step: float) -> Readable:
        """``x`` itself."""
        return image

    def slope(self, image: Readable) -> None:
        """None: there is no slope."""
        return None

    def density(self, image: Readable) -> None:
        """None: there is no prior."""
        return None

    def steepness(self) -> float:
        """0: there is no slope."""
        return 0.0

    def reach(self) -> int:
        """0: no pixel depends on another."""
        return 0


@dataclass(frozen=True)
class Sparse:
    """``g(x) = weight |x|_1``."""

    weight: float

    def prox(self, image: Readable, step: float) -> Readable:
        """Soft thresholding by ``weight step``."""
        return Shrunk(image, self.weight * step)

    def slope(self, image: Readable) -> Readable:
        """``weight sign(x)``."""
        return Signs(image, self.weight)

    def density(self, image: Readable) -> Readable:
        """``weight |x|``."""
        return Magnitudes(image, self.weight)

    def steepness(self) -> float:
        """0: the slope is constant except at 0."""
        return 0.0

    def reach(self) -> int:
        """0: each pixel by itself."""
        return 0


@dataclass(frozen=True)
class Variation:
    """``g(x) = weight TV(x)``, its prox approached by a fixed number of dual steps."""

    denoised: Denoised
    """Total-variation denoising; source and strength are replaced."""
    weight: float

    def prox(self, image: Readable, step: float) -> Readable:
        """Total-variation denoising with the strength ``weight step``."""
        kind = self.denoised.denoiser
        assert isinstance(kind, TotalVariation)
        return replace(
            self.denoised, source=image, denoiser=replace(kind, strength=self.weight * step, sigma=None)
        )

    def slope(self, image: Readable) -> Readable:
        """``x - prox(x)``: the slope of the envelope of ``g``."""
        return Total((image, self.prox(image, 1.0)), (1.0, -1.0))

    def density(self, image: Readable) -> Readable:
        """``weight`` times the length of the gradient."""
        return Gradients(image, self.weight, self.denoised.roles.spatial)

    def steepness(self) -> float:
        """1: a prox is nonexpansive."""
        return 1.0

    def reach(self) -> int:
        """The depth of the denoiser."""
        return reach_of(self.denoised)


@dataclass(frozen=True)
class Plugged:
    """A denoiser in place of a prox (plug and play), or ``weight (x - D(x))`` in place of a slope (RED).

    References
    ----------
    S. Venkatakrishnan et al., Plug-and-play priors for model based reconstruction, GlobalSIP 2013.
    Y. Romano et al., The little engine that could: regularization by denoising, SIAM J. Imaging Sci. 10 (2017).
    """

    denoised: Denoised
    """The denoiser; its source is replaced."""
    weight: float = 1.0

    def prox(self, image: Readable, step: float) -> Readable:
        """``D(x)``, whatever the step."""
        return replace(self.denoised, source=image)

    def slope(self, image: Readable) -> Readable:
        """``weight (x - D(x))``."""
        return Total((image, replace(self.denoised, source=image)), (self.weight, -self.weight))

    def density(self, image: Readable) -> None:
        """None: the ``g`` of a denoiser is unknown."""
        return None

    def steepness(self) -> float:
        """Twice the weight: a nonexpansive denoiser may reverse the difference of two images."""
        return 2 * self.weight

    def reach(self) -> int:
        """The depth of the denoiser."""
        return reach_of(self.denoised)


@dataclass(frozen=True)
class Shrunk(Derived):
    """``sign(x) max(|x| - by, 0)``."""

    by: float

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        pixels = self.image.read(region).astype(self.dtype, copy=False)
        by = self.dtype.type(self.by)
        shrunk: Pixels = pixels - np.clip(pixels, -by, by)
        return shrunk


@dataclass(frozen=True)
class Signs(Derived):
    """``scale sign(x)``."""

    scale: float

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        signs: Pixels = np.sign(self.image.read(region)).astype(self.dtype) * self.dtype.type(self.scale)
        return signs


@dataclass(frozen=True)
class Density(Derived):
    """The contribution of each pixel to a prior, in double precision."""

    scale: float

    @property
    def dtype(self) -> np.dtype[Any]:
        """Double precision."""
        return np.dtype(np.float64)


@dataclass(frozen=True)
class Magnitudes(Density):
    """``scale |x|``."""

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        magnitudes: Pixels = np.abs(self.image.read(region).astype(np.float64)) * self.scale
        return magnitudes


@dataclass(frozen=True)
class Gradients(Density):
    """``scale |∇x|`` with differences to the next pixel, 0 at the last one."""

    axes: tuple[int, ...]

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        whole = Region.whole(self.shape)
        continuation = [stop + (axis in self.axes) for axis, stop in enumerate(region.stop)]
        window = Region(region.start, tuple(continuation)).clip(whole)
        pixels = self.image.read(window).astype(np.float64)
        squares = np.zeros(region.shape)
        for axis in self.axes:
            differences = np.diff(pixels, axis=axis)
            core = tuple(map(slice, np.minimum(region.shape, differences.shape)))
            squares[core] += np.square(differences[core])
        return np.sqrt(squares) * self.scale


def reach_of(denoised: Denoised) -> int:
    """The deepest halo of a denoised image, in pixels."""
    return max(max(pair) for pair in denoised.grid.depth)


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
        elif isinstance(at, Total):
            waiting.extend(at.parts)
