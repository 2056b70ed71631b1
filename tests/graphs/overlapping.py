"""Stores that record their reads, and functions of windows."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import dask
import dask.array as da
import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter

from halotile.storage.grid import Region

Pixels = NDArray[Any]


@dataclass
class Stored:
    """Pixels that can only be read region by region; it records the regions."""

    pixels: Pixels
    chunks: tuple[int, ...]
    regions: list[Region] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        assert region.inside(Region.whole(self.shape))
        with self.lock:
            self.regions.append(region)
        pixels: Pixels = self.pixels[region.slices].copy()
        return pixels

    def fingerprint(self) -> dict[str, Any]:
        return {"pixels": dask.base.tokenize(self.pixels)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.pixels, self.chunks)


def noise(shape: tuple[int, ...], dtype: str = "float32") -> Pixels:
    values = np.random.default_rng(7).normal(40, 20, shape).clip(0, 250)
    return values.astype(dtype)


def stored(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str = "float32") -> Stored:
    return Stored(noise(shape, dtype), chunks)


def neighbours(window: Pixels) -> Pixels:
    """Weighted shifted sums: the left neighbours have other weights than the right ones."""
    result = window.astype("float64")
    for axis in range(window.ndim):
        result = result + 0.5 * np.roll(result, 1, axis) - 0.25 * np.roll(result, -2, axis)
    return result


def running_sum(window: Pixels) -> Pixels:
    """A sum that depends on the position in the window, and on everything before it."""
    for axis in range(window.ndim):
        window = np.cumsum(window, axis=axis)
    return window


def box(window: Pixels) -> Pixels:
    result: Pixels = uniform_filter(window, 3, mode="nearest")
    return result


def compute(array: da.Array) -> Pixels:
    pixels: Pixels = array.compute(scheduler="synchronous")
    assert pixels.shape == array.shape
    assert pixels.dtype == array.dtype
    return pixels


def same(ours: da.Array, stock: da.Array) -> None:
    assert ours.chunks == stock.chunks
    assert ours.dtype == stock.dtype
    np.testing.assert_array_equal(compute(ours), compute(stock), strict=True)
