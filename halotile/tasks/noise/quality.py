"""Quality of a denoised image without the true one: an unbiased estimate of its squared error, and the faint detail that it keeps."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.storage.rim import Array
from halotile.tasks.noise.defects import outliers, replacements
from halotile.tasks.noise.estimate import NORMAL_MAD
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quiet_windows import Values

Denoise = Callable[[Values], Values]  # denoises an image of shape (channels, rows, columns)

STEP = 0.1  # standard deviation of the probe, relative to that of the noise
FEW = 100  # photons in a pixel, on the average, from which the count may be taken for continuous
PITCH = 8  # distance of the pixels that lose a photon at once: beyond it, few denoisers mix them
PLACES = ((1, 1), (3, 2), (0, 6), (2, 5), (4, 4), (5, 0), (6, 7), (7, 3))  # their positions, in turn


class Risk(NamedTuple):
    """Estimate of a mean squared error, relative to that of the noisy image."""

    error: float
    spread: float  # standard deviation that it has by the choice of the probe, about
    results: int = 2  # results of the denoiser that it took


NO_RISK = Risk(math.nan, math.nan)


def unbiased_risk(noisy: Values, noise: PhotonNoise, denoise: Denoise, seed: int = 0) -> Risk:
    """Unbiased estimate of the mean squared error, relative to that of the noisy image; no change has 1.

    With ``y`` the image, ``f`` the denoiser and ``v`` the variance at the value of each pixel, it is
    ``mean((f(y) - y)² - v + 2 c) / mean(v)``. For Gaussian noise ``c`` is ``v`` times the slope of ``f``, by one random probe (SURE). Few
    photons take whole steps: ``c`` is the signal times the change of ``f`` when its pixel loses one photon (PURE); read noise adds its slope there.

    ``noisy``: image of shape (channels, rows, columns); NaN in holes, which do not count; ``noise``: its parts broadcast to the image; NaN where there
    is none, which does not count; ``denoise``: `f`; ``seed``: which signs are drawn, and which pixels are probed.

    References
    ----------
    S. Ramani, T. Blu, M. Unser, Monte-Carlo SURE: a black-box optimization of regularization parameters for general denoising algorithms, IEEE
    Trans. Image Process. 17 (2008) 1540-1554. F. Luisier, T. Blu, M. Unser, Image denoising in mixed Poisson-Gaussian noise, IEEE Trans. Image
    Process. 20 (2011) 696-708.

    Examples
    --------
    >>> counts = np.random.default_rng(0).poisson(3.0, (1, 256, 256)).astype(float)
    >>> round(unbiased_risk(counts, PhotonNoise.from_values(np.array(1.0), np.array(0.0)), lambda image: (image + 3) / 2).error, 1)
    0.2
    """
    denoised = denoise(noisy)
    gain, offset, read = (np.broadcast_to(part, noisy.shape) for part in noise)
    own = np.where(np.isfinite(noisy), gain * (noisy - offset) + np.square(read), np.nan)
    errors, signs = np.square(denoised - noisy) - own, np.random.default_rng(seed).choice([-1.0, 1.0], noisy.shape)
    if np.nanmean(own) < FEW * np.nanmean(np.square(gain)):
        changes, read = np.full(noisy.shape, np.nan), np.nan_to_num(read)  # no NaN may reach the denoiser
        results, alike = 2 * len(PLACES) * (2 if read.any() else 1), 1.0
        for probed in _lattices(noisy.shape, seed):
            # Half of them lose it, then the other half: what a pixel sees of the others has the same mean both times.
            halves = probed & (signs > 0), probed & (signs < 0)
            first, second = (denoise(noisy - lost * gain) for lost in halves)
            change = (noisy - offset) * (second - first)
            if read.any():
                once, again = (denoise(noisy - lost * (gain + STEP * read)) for lost in halves)
                change += read * (first - once - second + again) / STEP
            changes[probed] = (signs * change)[probed]
    else:
        step = STEP * noise_sigma(noisy, noise)
        step = np.nan_to_num(step, nan=float(np.nanmean(step)))
        changes = own * signs * (denoise(noisy + step * signs) - denoised) / step
        results, alike = 2, 2.0  # two pixels that see each other have the same product of signs
    level, count = np.nanmean(own), np.isfinite(changes).sum()
    spread = 2 * np.nanstd(changes) * math.sqrt(alike / max(1, count)) / level
    return Risk(float((np.nanmean(errors) + 2 * np.nanmean(changes)) / level), float(spread), results)


def without_outliers(noisy: Values, noise: PhotonNoise) -> tuple[Values, NDArray[np.bool_]]:
    """The image with the median of its neighbours for each outlier of the noise, such as a hot or dead pixel; and the outliers.

    >>> image = np.random.default_rng(0).standard_normal((1, 64, 64))
    >>> image[0, 3, 5] = 40
    >>> np.argwhere(without_outliers(image, PhotonNoise.from_values(np.array(0.0), np.array(1.0)))[1])
    array([[0, 3, 5]])
    """
    repaired, found = noisy.copy(), np.zeros(noisy.shape, bool)
    for number, image in enumerate(noisy):
        gain, variance = (np.broadcast_to(part, noisy.shape)[number] for part in (noise.gain, noise.variance))
        one = float(gain[0, 0])  # else the noise may be another one in each pixel
        at = outliers(image, one, float(variance[0, 0])) if one > 0 else outliers(image / np.sqrt(variance), 0.0, 1.0)
        repaired[number][tuple(at.T)] = replacements(image, at, np.isfinite(image))[0]
        found[number][tuple(at.T)] = True
    return repaired, found


def noise_sigma(noisy: Values, noise: PhotonNoise) -> Values:
    """Standard deviation of the noise of each pixel, by the mean brightness around it."""
    around = np.array([_local_mean(channel) for channel in noisy])
    # No less than that of one photon: the brightness is not exact.
    variance = np.maximum(noise.gain * around + noise.variance, np.square(noise.gain))
    return np.broadcast_to(np.sqrt(variance), noisy.shape)


def _local_mean(pixels: Values) -> Values:
    """Mean of the finite pixels of the 5 x 5 around each; NaN without any."""
    (rows, columns), sums = pixels.shape, []
    for part in (np.nan_to_num(pixels), np.isfinite(pixels).astype(np.float64)):
        padded = np.pad(part, 2)
        across = np.sum([padded[:, n : n + columns] for n in range(5)], 0)
        sums.append(np.sum([across[n : n + rows] for n in range(5)], 0))
    with np.errstate(invalid="ignore"):
        mean: Values = sums[0] / sums[1]
    return mean


def _lattices(shape: tuple[int, ...], seed: int) -> Iterator[Array]:
    """Yield masks of the pixels that are probed at once: far from each other, and at other places in each channel and for each seed."""
    for row, column in PLACES:
        probed = np.zeros(shape, bool)
        for number, channel in enumerate(probed):
            channel[(row + 3 * number) % PITCH :: PITCH, (column + 5 * number + seed) % PITCH :: PITCH] = True
        yield probed


HEIGHTS = (1, 2, 5)  # heights of the faint detail, in noise levels
# Pixels around the centre of a detail; standard deviation of a spot and across a line, and length of a line, in pixels.
REACH, WIDTH, LENGTH = 7, 1.5, 10
APART, MOST = 32, 64  # distance of the details in a crop, and their number, at most
DETECTED = 3.0  # standard deviations of the same contrast elsewhere above which a detail is detected
# Least standard deviation of that contrast, in noise levels: in a flat result the smallest speck would stand out.
FLAT = 0.02


class FaintDetail(NamedTuple):
    """Spots and lines of one height after denoising."""

    height: float  # in noise levels
    kept: float  # share of the height that is left, on the average
    # Share that stands out: what is left is more than three standard deviations of the noise that is left.
    detected: float


def faint_detail(noisy: Values, sigma: Values, denoise: Denoise, denoised: Values) -> tuple[FaintDetail, ...]:
    """The faint detail that a denoiser keeps: spots and lines are added to copies of an image, and looked for in the results.

    ``noisy, denoised``: image of shape (channels, rows, columns) and its result; NaN in holes; ``sigma``: standard deviation of the noise of each
    pixel; ``denoise``: denoises an image of this shape. Empty where the image has no room.

    >>> image, one = np.random.default_rng(0).standard_normal((1, 256, 256)), np.ones((1, 256, 256))
    >>> [round(found.kept, 2) for found in faint_detail(image, one, lambda image: image / 2, image / 2)]
    [0.5, 0.5, 0.5]
    """
    details = list(_details(noisy))
    if not details:
        return ()
    added, level = np.zeros(noisy.shape), np.nan_to_num(sigma)
    for place, shape in details:
        added[place] += shape * level[place]
    # Other noise changes the result by about as much as the noise of the image has.
    other = level * np.random.default_rng(0).standard_normal(noisy.shape)
    noise = _contrasts(denoise(noisy + other) - denoised, sigma, details)
    spread = max(FLAT, float(np.nanmedian(np.abs(noise))) / NORMAL_MAD)
    found = []
    for height in HEIGHTS:
        left = _contrasts(denoise(noisy + height * added) - denoised, sigma, details)
        left = left[np.isfinite(left)]
        found.append(FaintDetail(height, float(left.mean()) / height, float(np.mean(left > DETECTED * spread))))
    return tuple(found)


def _details(noisy: Values) -> Iterator[tuple[tuple[slice | int, ...], Array]]:
    """Yield the place of each detail and its shape, of height 1: spots and lines in turn, where nothing is missing."""
    across = np.exp(-np.square(np.arange(-REACH, REACH + 1) / WIDTH) / 2)
    along = (np.abs(np.arange(-REACH, REACH + 1)) <= LENGTH / 2).astype(float)
    shapes = (np.outer(across, across), np.outer(across, along), np.outer(across, across), np.outer(along, across))
    channels, rows, columns = noisy.shape
    edge = 2 * REACH + 1
    lines = (range(REACH, length - 2 * edge, APART) for length in (rows, columns))
    starts = [*itertools.product(range(channels), *lines)]
    for number, (channel, row, column) in enumerate(starts[:: -(-len(starts) // MOST) or 1]):
        place = channel, slice(row, row + edge), slice(column, column + edge)
        if np.isfinite(noisy[place]).all():
            yield place, shapes[number % len(shapes)]


def _contrasts(image: Values, sigma: Values, details: list[tuple[tuple[slice | int, ...], Array]]) -> Values:
    """Height of each detail in an image by its matched filter, in noise levels; brightness around it does not count."""
    heights = []
    for place, shape in details:
        weights = shape - shape.mean()
        heights.append((weights * (image[place] / sigma[place])).sum() / (weights * shape).sum())
    return np.array(heights)
