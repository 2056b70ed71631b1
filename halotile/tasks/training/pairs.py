"""Two images of the same as samples show them: how much of their structure they share, and how they are shifted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import fourier_gaussian

from halotile.tasks.noise.quiet_windows import Values

PART = 128
"""Edge of the parts that are compared, in pixels: what fills an image is no structure of theirs."""
BINNED = 4
"""Edge of the bins whose means show fine structure: of 16 pixels, with a quarter of the noise."""
FINE = 0.15
"""Share of structure in these means, without slow illumination, from which it can be compared."""
MEASURED = 0.5
"""Share of the pixels of a part that has to be finite in both."""
CLEAR, APART = 10.0, 5.0
"""Peak of the phase correlation over its deviation above which it tells a shift, of noise or different images it is 4 to 8; and its height above the
value without a shift: in noise a broad peak moves by a pixel."""
NOISY = 1.0
"""Deviation in pixels of the blur of the phase correlation: finer structure is mostly noise."""
ROUNDING = 1e-9
"""Correlation of copies, below 1."""


@dataclass(frozen=True)
class Pair:
    """Statistics of two images.

    >>> rng = np.random.default_rng(0)
    >>> image = np.cumsum(np.cumsum(rng.standard_normal((256, 256)), 0), 1)
    >>> first, second = (image + rng.standard_normal(image.shape) for _ in range(2))
    >>> found = Pair.of([(first, 2 * np.roll(second, 3, 1))])
    >>> found.shift, round(found.contrast, 1)
    ((0, 3), 2.0)
    """

    # share of structure in the variance of the pixels, by the correlation of neighbours: about 0 for white noise
    structure: float
    # correlation of both, relative to that share: about 1 for the same with noise that differs from pixel to pixel,
    # about 0 for others
    shared: float
    shift: tuple[int, int]  # rows and columns by which the second is shifted; 0 where that is not clear
    contrast: float  # contrast of the structure of the second, relative to that of the first
    offset: float  # difference of the means, in standard deviations of the first
    # correlation as `shared` of means of 4 x 4 pixels, without slow illumination; NaN where there is too little
    # structure in them
    shared_finely: float = math.nan
    is_copy: bool = False  # true where the second is the first, but for brightness and contrast

    @classmethod
    def of(cls, squares: Iterable[tuple[Values, Values]]) -> Pair | None:
        """Compare squares of the same places, NaN in holes; None where nothing can be compared.

        References
        ----------
        C. D. Kuglin, D. C. Hines, The phase correlation image alignment method, IEEE Conf. Cybernetics and Society (1975) 163-165.
        """
        parts = [part for square in squares for part in _parts(*square)]
        if not parts:
            return None
        smallest = [min(lengths) for lengths in zip(*(part[0].shape for part in parts), strict=True)]
        first, second = (np.stack([part[which][: smallest[0], : smallest[1]] for part in parts]) for which in (0, 1))
        means = first.mean((1, 2), keepdims=True), second.mean((1, 2), keepdims=True)
        offset = float(np.mean(means[1] - means[0]))
        deviation = float(first.std())
        first, second = first - means[0], second - means[1]
        if not (first.any() and second.any()):
            return None
        structure, correlation = _alike(first, second)
        alike = [max(_neighbours(image), 0.0) for image in (first, second)]
        finely, correlated_finely = _alike(_fine(first), _fine(second))
        return cls(
            structure,
            correlation / structure if structure else 0.0,
            _shift(first, second),
            math.sqrt(alike[1] / alike[0]) if all(alike) else 1.0,
            offset / deviation,
            correlated_finely / finely if finely >= FINE else math.nan,
            is_copy=correlation > 1 - ROUNDING,
        )


def _parts(first: Values, second: Values) -> Iterator[tuple[Values, Values]]:
    """Yield the parts of a square, with the mean of each in place of what is not finite in both."""
    finite = np.isfinite(first) & np.isfinite(second)
    edges = [min(PART, n) for n in first.shape]
    for row in range(0, first.shape[0] - edges[0] + 1, edges[0]):
        for column in range(0, first.shape[1] - edges[1] + 1, edges[1]):
            at = slice(row, row + edges[0]), slice(column, column + edges[1])
            known = finite[at]
            if known.mean() >= MEASURED:
                one, other = (np.where(known, image[at], image[at][known].mean()) for image in (first, second))
                yield one, other


def _alike(first: Values, second: Values) -> tuple[float, float]:
    """Share of structure in the pixels of both, by that of each, and their correlation; 0 where one is empty."""
    power = math.sqrt(float(np.square(first).mean()) * float(np.square(second).mean()))
    alike = math.sqrt(max(_neighbours(first), 0.0) * max(_neighbours(second), 0.0))
    return (alike / power, float((first * second).mean()) / power) if power else (0.0, 0.0)


def _fine(parts: Values) -> Values:
    """Means of bins of the parts, less the quadratic polynomial of rows and columns that fits them best."""
    count, rows, columns = (n if axis == 0 else n // BINNED for axis, n in enumerate(parts.shape))
    if min(rows, columns) < BINNED:
        return np.zeros((count, 2, 2))
    inside = parts[:, : rows * BINNED, : columns * BINNED]
    means = inside.reshape(count, rows, BINNED, columns, BINNED).mean((2, 4))
    y, x = (axis.ravel() for axis in np.meshgrid(*map(_centred, (rows, columns)), indexing="ij"))
    slow, _ = np.linalg.qr(np.stack([np.ones_like(y), y, x, y * y, x * x, x * y], 1))
    flat = means.reshape(count, -1)
    return np.asarray(flat - flat @ slow @ slow.T).reshape(means.shape)


def _centred(length: int) -> Values:
    return np.linspace(-1, 1, length)


def _neighbours(parts: Values) -> float:
    """Covariance of neighbouring pixels, the mean of both directions; parts have a mean of 0."""
    rows, columns = parts[:, 1:] * parts[:, :-1], parts[:, :, 1:] * parts[:, :, :-1]
    return float((rows.mean() + columns.mean()) / 2)


def _shift(first: Values, second: Values) -> tuple[int, int]:
    """Place of the peak of the phase correlation, where it is clear."""
    rows, columns = first.shape[1:]
    window = np.hanning(rows)[:, None] * np.hanning(columns)
    spectra = np.conj(np.fft.rfft2(first * window)) * np.fft.rfft2(second * window)
    phases = spectra / np.maximum(np.abs(spectra), np.finfo(float).tiny)
    correlation = np.fft.irfft2(fourier_gaussian(phases.mean(0), NOISY, columns), (rows, columns))
    deviation = correlation.std()
    if correlation.max() < max(CLEAR * deviation, correlation[0, 0] + APART * deviation):
        return 0, 0
    row, column = divmod(int(correlation.argmax()), columns)
    return (row + rows // 2) % rows - rows // 2, (column + columns // 2) % columns - columns // 2
