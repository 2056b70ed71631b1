"""The job ``denoise`` as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from halotile.graphs.kinds.sections import DenoiserChoice, Input, TiledJob
from halotile.tasks.options import Auto


@dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """The noise of the image, for a denoiser with ``sigma: auto``."""

    model: Literal["auto", "gaussian", "poisson-gaussian"] = "gaussian"
    """gaussian: the same everywhere in a plane. poisson-gaussian: that of counted photons and of the readout, which grows with brightness.
    auto: poisson-gaussian where samples of every plane clearly show it."""
    gain: float | Auto = "auto"
    """poisson-gaussian: value of one photon, in the units of the file. auto: estimated with the rest for each channel, time point and other plane."""
    offset: float = 0.0
    """poisson-gaussian with a gain: value without any photon, in the units of the file."""
    read_sigma: float = 0.0
    """poisson-gaussian with a gain: standard deviation of the noise of the readout, in the units of the file."""


@dataclass(frozen=True, kw_only=True)
class Denoising(TiledJob):
    """A denoising job."""

    kind: ClassVar[str] = "denoise"

    input: Input
    denoiser: DenoiserChoice | Any
    """A :class:`DenoiserChoice`, or the denoiser itself where a script passes one."""
    noise: NoiseModel = field(default_factory=NoiseModel)
