"""The part of each pattern of a scan that is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.scans.scan import Scan


@dataclass(frozen=True)
class Framing:
    """The part of each pattern that is kept."""

    crop: int | None = None  # edge of a square around the centre
    center: tuple[int, int] | None = None  # pixel of the beam without a sample; None: the middle
    binning: int = 1  # pixels along each axis whose counts are added
    # true where the beam is at the first pixel, as a Fourier transform leaves it: it is moved to the middle
    corner: bool = False

    def windows(self, rows: int, columns: int) -> tuple[slice, slice]:
        """The rows and columns that are kept."""
        if self.binning < 1:
            raise ConfigError(f"--bin is {self.binning}. Write 1 or more.")
        if self.corner and self.center:
            raise ConfigError("--corner and --center both say where the beam is. Leave one of them out.")
        center = self.center or (rows // 2, columns // 2)
        kept = []
        for length, middle in zip((rows, columns), center, strict=True):
            around = 2 * min(middle, length - middle) if self.center else length
            edge = self.crop or around or length
            start = middle - edge // 2
            if not (edge > 0 and start >= 0 and start + edge <= length):
                raise ConfigError(
                    f"a crop of {edge} around pixel {middle} leaves the pattern of {length}. Write a smaller --crop."
                )
            if edge % self.binning:
                raise ConfigError(
                    f"--bin is {self.binning}, which does not divide the {edge} pixels that are kept. Write --crop {edge // self.binning * self.binning}."
                )
            kept.append(slice(start, start + edge))
        return kept[0], kept[1]

    def in_file(self, places: NDArray[np.int64], rows: int, columns: int) -> NDArray[np.int64]:
        """Rows and columns, (places, 2), in the patterns of the file, of places in what is kept before it is binned.

        >>> Framing(corner=True).in_file(np.array([[4, 4], [0, 0]]), 8, 8).tolist()
        [[0, 0], [4, 4]]
        """
        shape = np.array([rows, columns])
        whole = places + [window.start for window in self.windows(rows, columns)]
        return np.asarray((whole - shape // 2) % shape if self.corner else whole)

    def binned(self, images: NDArray[Any]) -> NDArray[Any]:
        """Images, (..., rows, columns), with the pixels of each bin added."""
        if self.binning == 1:
            return images
        *leading, rows, columns = images.shape
        size = self.binning
        bins = images.reshape(*leading, rows // size, size, columns // size, size)
        wide = np.float32 if images.dtype.kind == "f" else np.uint64
        return np.asarray(bins.sum((-3, -1)), wide)


class ShiftedPatterns:
    """Patterns, (positions, rows, columns), whose first pixel is moved to the middle."""

    def __init__(self, patterns: Any) -> None:
        self.patterns = patterns
        self.shape: tuple[int, ...] = patterns.shape

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """Parts of some patterns."""
        chosen, rows, columns = index
        return _shifted(np.asarray(self.patterns[chosen, :, :]))[:, rows, columns]


def shifted_scan(scan: Scan) -> Scan:
    """The scan with the first pixel of its images moved to the middle."""
    mask, dark = (None if image is None else _shifted(image) for image in (scan.mask, scan.background))
    return replace(scan, mask=mask, background=dark)


def _shifted(images: NDArray[Any]) -> NDArray[Any]:
    return np.fft.fftshift(images, (-2, -1))


def framed(scan: Scan, framing: Framing, shape: tuple[int, ...]) -> Scan:
    """The scan with its images as they are kept, and pixels of the detector as large as a bin."""
    rows, columns = framing.windows(*shape[1:])
    height, width = scan.pixel
    bins = framing.binning
    good = None if scan.mask is None else framing.binned(~scan.mask[rows, columns]) == 0
    dark = None if scan.background is None else framing.binned(scan.background[rows, columns])
    if scan.probe is not None and framing != Framing():
        raise ConfigError(
            "--probe has the pixels that all of the patterns give it. Leave --crop, --center, --bin and --corner out, or the probe: a guess is made."
        )
    return replace(scan, pixel=(bins * height, bins * width), mask=good, background=dark)
