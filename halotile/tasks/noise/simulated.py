"""A simulated measurement: the forward of a reference image, with noise by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.tasks.noise.draws import gaussian, poisson
from halotile.tasks.operators.base import Derived

ROUNDING = 1e-5
"""The fraction of the brightest pixel by which a convolution may round below 0 on an empty background."""
FAINT = 1e-3
"""Counts below 0 that are taken for 0."""

Noise = Literal["gaussian", "poisson", "none"]


@dataclass(frozen=True)
class Simulated(Derived):
    """``A x`` with noise: the same numbers for the same seed, whatever region is read.

    Parameters
    ----------
    image : Readable
        ``A x``.
    noise : str
        ``gaussian``, ``poisson`` or ``none``.
    level : float
        gaussian: the standard deviation. poisson: the value of one count.
    background : float
        poisson: added to ``A x`` before counting.
    seed, operator : int
        Select the noise: each operator of a stack has its own.

    Examples
    --------
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
        """The pixels of ``region``."""
        clean = self.image.read(region).astype(self.dtype, copy=False)
        if self.noise == "gaussian":
            return gaussian(clean, region, sigma=self.level, seed=self.seed, operator=self.operator)
        if self.noise == "poisson":
            lit = clean + self.dtype.type(self.background)
            self._check_light(lit)
            return poisson(lit, region, gain=self.level, seed=self.seed, operator=self.operator)
        return clean

    def _check_light(self, lit: NDArray[Any]) -> None:
        """Refuse pixels for which no count can be drawn; values that rounding leaves below 0 count as 0.

        Raises
        ------
        InputError
            With the number of such pixels in the region.
        """
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
