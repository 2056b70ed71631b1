"""The error of a denoised image, estimated without a clean one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.noise.details import Values

Denoise = Callable[[Values], Values]
"""Denoises an image of shape (..., rows, columns)."""

STEP = 0.1
"""Standard deviation of the probe, relative to that of the noise."""
STRIDE, OFFSETS = 4, ((1, 1), (3, 2))
"""Distance of the pixels that are left out at once, and their places."""


def unbiased_risk(noisy: Values, denoised: Values, sigma: Values, denoise: Denoise, seed: int = 0) -> float:
    """Stein's unbiased estimate of the squared error, relative to that of the noisy image; for Gaussian noise.

    ``mean((f(y) - y)² / s²) - 1 + 2 mean(b (f(y + d b) - f(y)) / d)``, with signs ``b`` drawn at random, noise ``s`` and a step ``d``.

    Parameters
    ----------
    noisy, denoised : ndarray
        ``y`` and ``f(y)``, of shape (..., rows, columns); NaN in holes, which do not count.
    sigma : ndarray
        Standard deviation of the noise of each pixel; NaN where there is none, which does not count.
    denoise : callable
        ``f``.
    seed : int
        Which signs are drawn.

    References
    ----------
    S. Ramani, T. Blu, M. Unser, Monte-Carlo SURE: a black-box optimization of regularization parameters for
    general denoising algorithms, IEEE Trans. Image Process. 17 (2008) 1540-1554.

    Examples
    --------
    >>> noisy = np.random.default_rng(0).standard_normal((256, 256))
    >>> round(unbiased_risk(noisy, noisy / 2, np.ones_like(noisy), lambda image: image / 2), 1)
    0.2
    """
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], noisy.shape)
    step = STEP * np.nan_to_num(sigma, nan=float(np.nanmean(sigma)))
    slopes = signs * (denoise(noisy + step * signs) - denoised) / step
    errors = np.square(denoised - noisy) + np.square(sigma) * (2 * slopes - 1)
    return _relative(errors, sigma)


def blind_loss(noisy: Values, sigma: Values, denoise: Denoise) -> float:
    """Squared error of pixels denoised without their own value, relative to that of the noisy image, from the loss of Noise2Self.

    Some pixels are replaced by the mean of their neighbours, and the result is compared with their values there. The
    variance of their noise, which that adds, is taken off.

    Parameters
    ----------
    noisy, sigma, denoise
        As of :func:`unbiased_risk`.

    References
    ----------
    J. Batson, L. Royer, Noise2Self: blind denoising by self-supervision, ICML 2019.

    Examples
    --------
    >>> noisy = np.random.default_rng(0).standard_normal((256, 256))
    >>> abs(blind_loss(noisy, np.ones_like(noisy), lambda image: 0 * image)) < 0.05
    True
    """
    around, errors = _mean_of_neighbours(noisy), np.full(noisy.shape, np.nan)
    for row, column in OFFSETS:
        left_out = np.zeros(noisy.shape, bool)
        left_out[..., row::STRIDE, column::STRIDE] = True
        blind = denoise(np.where(left_out & np.isfinite(around), around, noisy))
        errors[left_out] = (np.square(blind - noisy) - np.square(sigma))[left_out]
    return _relative(errors, sigma)


def _relative(errors: Values, sigma: Values) -> float:
    """Mean of the squared errors that are known, each relative to the variance of the noise."""
    return float(np.nanmean(errors / np.square(sigma)))


def _mean_of_neighbours(image: Values) -> Values:
    """Mean of the four nearest pixels, and of the diagonal ones with half their weight; NaN in holes left out."""
    edges = [(0, 0)] * (image.ndim - 2) + [(1, 1), (1, 1)]
    values = np.pad(image, edges, mode="reflect" if min(image.shape[-2:]) > 1 else "edge")
    rows, columns = image.shape[-2:]
    total, weights = np.zeros(image.shape), np.zeros(image.shape)
    for down, right in itertools.product(range(3), repeat=2):
        weight = (0.5, 1.0, 0.0)[(down == 1) + (right == 1)]
        part: NDArray[np.float64] = values[..., down : down + rows, right : right + columns]
        total += weight * np.nan_to_num(part)
        weights += weight * np.isfinite(part)
    with np.errstate(invalid="ignore"):
        mean: Values = total / weights
    return mean
