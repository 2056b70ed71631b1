"""A Zarr of any size made viewable: a small PNG of the whole, or a TIFF at full resolution.

::

    python examples/tiff/preview.py clean.zarr preview.png
    python examples/tiff/preview.py clean.zarr clean.tif

The PNG is averaged down to ``--edge`` pixels and stretched to the darkest and brightest 0.1 %. The TIFF keeps
values and type. Both read one band of rows at a time. Of more than two axes the first plane is taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

import halotile
from halotile.storage.grid import Region

Pixels = NDArray[Any]


def bands(source: Any, rows: int) -> Iterator[Pixels]:
    """The first plane of a source, ``rows`` rows at a time."""
    *others, height, width = source.shape
    for start in range(0, height, rows):
        stop = min(start + rows, height)
        region = Region((0,) * len(others) + (start, 0), (1,) * len(others) + (stop, width))
        yield source.read(region).reshape(stop - start, width)


def small(source: Any, edge: int) -> Pixels:
    """The first plane averaged down until neither side is longer than ``edge``, as float64."""
    height, width = source.shape[-2:]
    step = -(-max(height, width) // edge)
    rows = step * max(1, 1024 // step)
    return np.concatenate([_averaged(band, step) for band in bands(source, rows)])


def _averaged(band: Pixels, step: int) -> Pixels:
    """The means of ``step`` x ``step`` pixels; those at the far edges are of what there is."""
    down = np.add.reduceat(band.astype(np.float64), np.arange(0, band.shape[0], step), axis=0)
    both = np.add.reduceat(down, np.arange(0, band.shape[1], step), axis=1)
    counts = [np.diff(np.append(np.arange(0, n, step), n)) for n in band.shape]
    means: Pixels = both / (counts[0][:, None] * counts[1])
    return means


def write_png(source: Any, path: Path, edge: int) -> None:
    """Write the whole plane, small and stretched in contrast, as an 8-bit PNG."""
    from PIL import Image

    picture = np.nan_to_num(small(source, edge))
    low, high = np.percentile(picture, (0.1, 99.9))
    grey = np.clip((picture - low) / max(high - low, 1e-12), 0, 1) * 255
    Image.fromarray(grey.round().astype(np.uint8)).save(path)


def write_tiff(source: Any, path: Path) -> None:
    """Write the plane at full resolution as a BigTIFF, through a memory map."""
    target = tifffile.memmap(path, shape=source.shape[-2:], dtype=source.dtype, bigtiff=True)
    start = 0
    for band in bands(source, 1024):
        target[start : start + len(band)] = band
        start += len(band)
    target.flush()


def main() -> None:
    """Write the kind of file that the name asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="Zarr, or anything else that halotile reads")
    parser.add_argument("picture", type=Path, help="file to write: .png, .tif or .tiff")
    parser.add_argument("--edge", type=int, default=1600, help="longest side of a PNG in pixels")
    wish = parser.parse_args()
    source = halotile.open_source(wish.source)
    if wish.picture.suffix == ".png":
        write_png(source, wish.picture, wish.edge)
    elif wish.picture.suffix in (".tif", ".tiff"):
        write_tiff(source, wish.picture)
    else:
        parser.error(f"{wish.picture}: write a name that ends in .png, .tif or .tiff")
    print(f"{wish.picture}: {wish.picture.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
