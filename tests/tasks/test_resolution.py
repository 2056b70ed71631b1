"""Fourier ring correlation: of images whose noise is known, and whatever no pattern tells of an object."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from halotile.storage.scans.lengths import AT_BEST, AT_WORST, shown_resolution
from halotile.tasks.ptychography.result import FIRST, aligned, ring_correlation

PIXEL = (2e-8, 2e-8)


def truth(shape: tuple[int, int] = (150, 180)) -> NDArray[np.complex128]:
    """An object with details of all sizes."""
    noise = np.random.default_rng(0).standard_normal((2, *shape))
    return np.asarray((1 - 0.1 * noise[0]) * np.exp(1j * gaussian_filter(noise[1], 1)))


def with_noise(image: NDArray[np.complex128], seed: int, widths: NDArray[np.float64]) -> NDArray[np.complex128]:
    """The image with noise whose amplitude is that of each frequency."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal(image.shape) + 1j * random.standard_normal(image.shape)
    return np.asarray(image + np.fft.ifft2(np.fft.fft2(noise) * widths))


def test_the_resolution_is_where_the_noise_begins() -> None:
    for edge in (0.1, 0.25):
        image = truth()
        radius = np.hypot(*np.meshgrid(*map(np.fft.fftfreq, image.shape), indexing="ij"))
        widths = np.where(radius < edge, 1e-3, 1.0)
        rings = ring_correlation(with_noise(image, 1, widths), with_noise(image, 2, widths), PIXEL)
        assert rings.resolution == pytest.approx(0.5 * PIXEL[0] / edge, rel=0.05)
        assert not rings.bound
        below = rings.frequency < 0.9 * edge / PIXEL[0]
        assert (rings.correlation[below][FIRST:] > 0.96).all()
        assert abs(rings.correlation[rings.frequency > 1.1 * edge / PIXEL[0]].mean()) < 0.1


def test_noise_alone_has_no_resolution_and_equal_images_that_of_a_pixel() -> None:
    flat, ones = np.ones((150, 180), complex), np.ones((150, 180))
    rings = ring_correlation(with_noise(flat, 1, ones), with_noise(flat, 2, ones), PIXEL)
    assert rings.resolution > 10 * PIXEL[0]
    equal = ring_correlation(truth(), truth(), PIXEL)
    assert equal.resolution == pytest.approx(PIXEL[0], rel=0.03)
    assert (rings.bound, equal.bound) == (AT_BEST, AT_WORST)
    assert shown_resolution(rings.resolution, rings.bound).startswith("worse than")


def test_what_no_pattern_tells_does_not_count() -> None:
    """A shift, a gradient of the phase and a factor change neither image nor resolution; the border, where the shift wraps, apart."""
    for gradient, shift in itertools.product(((0.0, 0.0), (0.011, -0.027)), ((0.0, 0.0), (2.3, -1.6))):
        image = gaussian_filter(truth().real, 1.5) + 1j * gaussian_filter(truth().imag, 1.5)
        row, column = np.indices(image.shape)
        frequency = np.meshgrid(*map(np.fft.fftfreq, image.shape), indexing="ij")
        turn = frequency[0] * shift[0] + frequency[1] * shift[1]
        other = np.fft.ifft2(np.fft.fft2(image) * np.exp(-2j * np.pi * turn))
        other = 1.7j * other * np.exp(2j * np.pi * (gradient[0] * row + gradient[1] * column))
        window = np.outer(*map(np.hanning, image.shape))
        found = aligned(image, other, window)
        inside = (slice(15, -15),) * 2
        assert np.linalg.norm((found - image)[inside]) < 0.02 * np.linalg.norm(image[inside] - image.mean())
        rings = ring_correlation(image, other, PIXEL)
        assert (rings.correlation[FIRST : len(rings.correlation) // 3] > 0.99).all()
