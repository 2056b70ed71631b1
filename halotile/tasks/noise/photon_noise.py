"""Photon noise of an image: its gain, offset and read noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from halotile.storage.rim import Readable

Values = NDArray[np.float64]


@dataclass(frozen=True)
class PhotonNoise:
    """Noise of an image that counts photons: ``z = gain P(x) + offset + read_sigma n``, P a Poisson count, n standard normal.

    Parameters
    ----------
    gain : ndarray
        Value of one photon, in units of the image: one number, or one for each plane.
    offset : ndarray
        Value without any photon, of the same shape.
    read_sigma : ndarray
        Standard deviation of the noise of the readout, of the same shape.

    Examples
    --------
    >>> float(PhotonNoise(np.array(2.0), np.array(100.0), np.array(3.0)).variance)
    -191.0
    >>> PhotonNoise.of(np.array(2.0), np.array(-191.0)).to_json()
    {'gain': 2.0, 'offset': 95.5, 'read_sigma': 0.0}
    """

    gain: Values
    offset: Values
    read_sigma: Values

    @classmethod
    def of(cls, gain: Values, variance: Values) -> Self:
        """The noise of variance ``gain * z + variance`` at a pixel of mean ``z``: an image does not tell offset and readout apart."""
        return cls(gain, np.maximum(-variance / gain, 0.0) + 0.0, np.sqrt(np.maximum(variance, 0.0)))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """The noise that :meth:`to_json` returned."""
        return cls(**{name: np.asarray(values, np.float64) for name, values in stored.items()})

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        return {name: getattr(self, name).tolist() for name in ("gain", "offset", "read_sigma")}

    @property
    def variance(self) -> Values:
        """Variance of the noise less ``gain`` times the value of the pixel."""
        variance: Values = self.read_sigma**2 - self.gain * self.offset
        return variance


def estimate_photon_noise(
    source: Readable, spatial: Sequence[int], looped: Sequence[int] = ()
) -> PhotonNoise | None:
    return None
