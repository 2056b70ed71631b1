"""Photon counts of a blurred log-normal field, for NIFTy and for us; NumPy alone, as NIFTy has another environment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

OFFSET = math.log(20.0)


def transfer(n: int, sigma: float = 1.0) -> Any:
    """Gaussian blur of periodic images, for real Fourier transforms."""
    ky, kx = np.fft.fftfreq(n)[:, None], np.fft.rfftfreq(n)[None]
    return np.exp(-2 * (np.pi * sigma) ** 2 * (ky**2 + kx**2))


def counts(n: int, seed: int = 7) -> Any:
    """Counts of a blurred log-normal field."""
    rng = np.random.default_rng(seed)
    k = np.hypot(*np.meshgrid(*2 * [np.minimum(np.arange(n), n - np.arange(n))]))
    k[0, 0] = np.inf
    waves = np.fft.fft2((0.9 * k**-2 / math.sqrt((k**-4.0).sum())) * rng.standard_normal((n, n)))
    blurred = np.fft.irfft2(np.fft.rfft2(np.exp(OFFSET + waves.real + waves.imag)) * transfer(n), s=(n, n))
    return rng.poisson(blurred.clip(1e-6))
