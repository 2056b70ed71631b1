"""Photon noise of an image: its gain, offset and read noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PhotonNoise:
    """Noise of an image that counts photons: ``z = gain P(x) + offset + read_sigma n``, P a Poisson count, n standard normal.

    Parameters
    ----------
    gain : float
        Value of one photon, in units of the image.
    offset : float
        Value without any photon.
    read_sigma : float
        Standard deviation of the noise of the readout.

    Examples
    --------
    >>> PhotonNoise(2.0, 100.0, 3.0).variance
    -191.0
    >>> PhotonNoise.of(2.0, -191.0)
    PhotonNoise(gain=2.0, offset=95.5, read_sigma=0.0)
    """

    gain: float
    offset: float = 0.0
    read_sigma: float = 0.0

    @classmethod
    def of(cls, gain: float, variance: float) -> Self:
        """The noise of variance ``gain * z + variance`` at a pixel of mean ``z``: an image does not tell offset and readout apart."""
        return cls(gain, max(0.0, -variance / gain), math.sqrt(max(0.0, variance)))

    @property
    def variance(self) -> float:
        """Variance of the noise less ``gain`` times the value of the pixel."""
        return self.read_sigma**2 - self.gain * self.offset
