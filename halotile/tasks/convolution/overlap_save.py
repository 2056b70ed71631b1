"""Correlation of images with kernels by Fourier transforms of overlapping cells (overlap-save).

The cells have fixed places in the plane: along each axis their edges are 32 pixels before and after every multiple of
1024, and halfway between. A region is computed from all cells that it touches, each by the same
transform of the same pixels, so any region has the bits of the whole. A core of 1024 or 2048 pixels, on a
multiple of 1024 and with a halo of up to 32, ends on cell edges: compared to cells cut for the region it costs
3 to 27 % more (median of eight cases: 11 %). Other regions compute, and read, up to a cell more on each side.
Where that is too much, the region itself is cut into cells of equal length, and its bits depend on the region.

In single precision the result is within 6e-7 of the exact one, relative to its largest value, for kernels of 3 to 61
rows; the direct sum is within 3e-7 at 5 x 5 and 2e-6 at 31 x 31. A pixel that is not finite spoils whole cells,
not only the neighbourhood of the kernel.
"""

import itertools
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from halotile.storage.rim import Array

# Method of a convolution. `auto`: chosen by engine_for, and `direct` until then.
EngineName = Literal["auto", "direct", "fft"]

PERIOD = 1024
EDGES = (-32, 32, 512)  # edges of cells, relative to each multiple of the period
EVEN = 512  # approximate length of cells of equal length
FFT_FROM = {"float32": 144, "float64": 16}
"""Number of taps of a kernel from which on the transforms are faster than the direct sum.

One thread, ns a pixel of a 1024² core with its halo, direct / fft: 9 x 9 12.9 / 13.9, 13 x 13 16.1 / 13.8, 21 x 21 22.8 / 14.1,
31 x 31 35.9 / 12.4; in double precision 3 x 3 19.6 / 19.8, 4 x 4 28 / 19, 7 x 7 61 / 17.
"""
CACHE_BYTES = 64 * 2**20


def engine_for(kernel: tuple[int, ...], dtype: np.dtype[Any], exact: bool) -> EngineName:
    """``direct`` if the result must be exact or the kernel has fewer taps than :data:`FFT_FROM`, else ``fft``.

    >>> engine_for((15, 15), np.dtype("float32"), exact=False), engine_for((15, 15), np.dtype("float32"), exact=True)
    ('fft', 'direct')
    """
    return "direct" if exact or kernel[-2] * kernel[-1] < FFT_FROM[dtype.name] else "fft"


def cell_edges(start: int, stop: int) -> list[int]:
    """``start``, the edges of cells in between, and ``stop``.

    >>> cell_edges(0, 1100)
    [0, 32, 512, 992, 1056, 1100]
    """
    periods = range(start // PERIOD - 1, stop // PERIOD + 2)
    edges = [period * PERIOD + edge for period in periods for edge in EDGES]
    return [start, *(edge for edge in edges if start < edge < stop), stop]


def snapped(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The span extended to edges of cells, or to ``low`` and ``high``, the ends of the image.

    >>> snapped(1020, 2060, 0, 5000), snapped(5, 20, 0, 25)
    ((992, 2080), (0, 25))
    """
    edges = cell_edges(min(low, start - PERIOD), max(high, stop + PERIOD))
    first = max(edge for edge in edges if edge <= start)
    last = min(edge for edge in edges if edge >= stop)
    return max(low, first), min(high, last)


def even_edges(length: int) -> list[int]:
    """Edges of cells of equal length, from 0 to ``length``.

    >>> even_edges(1030), even_edges(20)
    ([0, 515, 1030], [0, 20])
    """
    edge = -(-length // max(1, round(length / EVEN)))
    return [*range(0, length, edge), length]


def correlate_cells(planes: Array, kernels: Array, origin: tuple[int, int] | None, threads: int = 1) -> Array:
    """``result[p, y, x] = sum_ij kernels[p, i, j] planes[p, y + i, x + j]``, cell by cell.

    ``planes``: float32 or float64; ``kernels``: of the same type; ``origin``: position of the first pixel of the result, with cells at fixed places.
    None: the result is cut into cells of equal length; ``threads``: number of cells computed at once; without effect on the result.

    Returns
    -------
    ndarray, shape (planes, height - rows + 1, width - columns + 1)

    Examples
    --------
    >>> correlate_cells(np.arange(16.0).reshape(1, 4, 4), np.ones((1, 3, 3)), (0, 0)).round(9).tolist()
    [[[45.0, 54.0], [81.0, 90.0]]]
    """
    rows, columns = kernels.shape[1:]
    height, width = planes.shape[1] - rows + 1, planes.shape[2] - columns + 1
    result = np.empty((len(planes), height, width), planes.dtype)
    downs, acrosses = (
        _pairs(even_edges(n), 0) if a is None else _pairs(cell_edges(a, a + n), a)
        for a, n in zip(origin or (None, None), (height, width), strict=True)
    )

    def fill(plane: int, y: slice, x: slice) -> None:
        window = planes[plane, y.start : y.stop + rows - 1, x.start : x.stop + columns - 1]
        result[plane, y, x] = _cell(window, kernels[plane])[: y.stop - y.start, : x.stop - x.start]

    cells = [(plane, y, x) for plane in range(len(planes)) for y in downs for x in acrosses]
    if threads == 1 or len(cells) == 1:
        for cell in cells:
            fill(*cell)
    else:
        with ThreadPoolExecutor(threads, "halotile-cells") as pool:
            list(pool.map(lambda cell: fill(*cell), cells))
    return result


def _pairs(edges: list[int], origin: int) -> list[slice]:
    """The cells between edges, relative to the origin."""
    return [slice(a - origin, b - origin) for a, b in itertools.pairwise(edges)]


def _cell(window: Array, kernel: Array) -> Array:
    """The correlation of one window, valid from its first corner on."""
    from scipy import fft

    lengths = _length(window.shape[0]), _length(window.shape[1])
    spectrum = fft.rfft2(window, s=lengths)
    spectrum *= _SPECTRA.spectrum(kernel, lengths)
    cell: Array = fft.irfft2(spectrum, s=lengths, overwrite_x=True)
    return cell


def _length(least: int) -> int:
    """Length of a fast transform: a multiple of 16 with no other prime factors than 2, 3 and 5."""
    from scipy import fft

    return 16 * int(fft.next_fast_len(-(-least // 16), real=True))


class _Spectra:
    """A cache of the transforms of kernels that were used last, limited in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._cached: OrderedDict[tuple[Any, ...], Array] = OrderedDict()
        self._lock = threading.Lock()

    def spectrum(self, kernel: Array, lengths: tuple[int, int]) -> Array:
        """The conjugate transform of a kernel, computed in double precision, returned in that of the kernel."""
        key = (kernel.tobytes(), kernel.shape, kernel.dtype.str, lengths)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        spectrum = _conjugate_transform(kernel, lengths)
        with self._lock:
            self._cached[key] = spectrum
            while self.cached_bytes > self._limit_bytes and len(self._cached) > 1:
                self._cached.popitem(last=False)
        return spectrum

    @property
    def cached_bytes(self) -> int:
        """Size of the cached transforms."""
        return sum(spectrum.nbytes for spectrum in self._cached.values())


def _conjugate_transform(kernel: Array, lengths: tuple[int, int]) -> Array:
    from scipy import fft

    transform: Array = np.conj(fft.rfft2(kernel.astype(np.float64), s=lengths))
    return transform.astype(np.result_type(kernel.dtype, np.complex64))


_SPECTRA = _Spectra(CACHE_BYTES)
