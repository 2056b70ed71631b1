"""The noise of simulated measurements, as it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from halotile.errors import ConfigError
from halotile.graphs.rules.words import nearest
from halotile.tasks.noise.simulated import Noise


@dataclass(frozen=True, kw_only=True)
class NoiseChoice:
    """The noise of simulated measurements."""

    name: Noise = "gaussian"
    """gaussian: of the operator's noise_sigma; poisson: counts; none."""
    gain: float = 1.0
    """poisson: what one count is worth, in units of the image."""
    seed: int = 0
    """Which noise: 0 or more."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Noise):
            near = nearest(str(self.name), get_args(Noise), likeness=0.5)
            hint = f"did you mean {near}?" if near else f"write one of {', '.join(get_args(Noise))}."
            raise ConfigError(f"noise is {self.name!r}: there is none of that name; {hint}")
        if not (math.isfinite(self.gain) and self.gain > 0):
            raise ConfigError(f"gain is {self.gain:g}: a count has to be worth something. Write more than 0.")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}: seeds count from 0. Write 0 or more.")

    def describe(self, sigma: float) -> str:
        """The noise of a measurement.

        Examples
        --------
        >>> NoiseChoice().in_words(0.01), NoiseChoice(name="poisson", gain=0.5).in_words(0.01)
        ('gaussian noise of 0.01', 'poisson noise, 0.5 for each count')
        """
        if self.name == "gaussian":
            return f"gaussian noise of {sigma:g}"
        return "no noise" if self.name == "none" else f"poisson noise, {self.gain:g} for each count"
