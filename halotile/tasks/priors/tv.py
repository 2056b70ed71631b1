"""Total variation."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.denoisers.tv import Proximal, TotalVariation
from halotile.tasks.operators.sum import Total
from halotile.tasks.options import check_above_zero, check_whole
from halotile.tasks.priors.base import DenoisingPrior, Density


@dataclass(frozen=True, kw_only=True)
class Variation(DenoisingPrior):
    """``g(x) = weight TV(x)``, its prox approached by a fixed number of dual steps.

    ``weight``: weight of the prior, against 1 / noise_sigma² for a measurement; ``iterations``: dual steps of one prox.
    """

    name: ClassVar[str] = "tv"

    weight: float = 1.0
    iterations: int = 40

    def __post_init__(self) -> None:
        check_above_zero("weight", self.weight)
        check_whole("iterations", self.iterations, 1)

    def computed_by(self) -> Proximal:
        """Total-variation denoising; each prox sets its strength."""
        return Proximal(strength=self.weight, iterations=self.iterations)

    def prox(self, image: Readable, step: float) -> Readable:
        """Total-variation denoising with the strength ``weight step``."""
        kind = self.planned.denoiser
        assert isinstance(kind, TotalVariation)
        return replace(self.planned, source=image, denoiser=replace(kind, strength=self.weight * step, sigma=None))

    def slope(self, image: Readable) -> Readable:
        """``x - prox(x)``: the slope of the envelope of ``g``."""
        return Total((image, self.prox(image, 1.0)), (1.0, -1.0))

    def density(self, image: Readable) -> Readable:
        """``weight`` times the length of the gradient."""
        return Gradients(image, self.weight, self.planned.roles.spatial)

    def steepness(self) -> float:
        """1: a prox is nonexpansive."""
        return 1.0


@dataclass(frozen=True)
class Gradients(Density):
    """``scale |∇x|`` with differences to the next pixel, 0 at the last one."""

    axes: tuple[int, ...]

    def read(self, region: Region) -> Pixels:
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


PRIOR = Variation
