"""Export of images of any size as tiled TIFF files that common viewers open.

Pixel values are preserved. The file is compressed with deflate, which needs no package besides
tifffile; its metadata are OME-XML, with the resolution in the plain TIFF tags as well.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from halotile.storage.disk.durable import DISK, PARTIAL
from halotile.storage.grid import Region
from halotile.storage.images.planes import WINDOW_BYTES, Planes
from halotile.storage.images.png import Tick
from halotile.storage.rim import Pixels

TILE = 256
"""Edge of a tile in pixels; TIFF requires a multiple of 16."""
_CLASSIC_BYTES = 4_000_000_000
"""Limit for a classic TIFF with 32-bit offsets."""
_BUFFER_BYTES = 16 * 2**20
_THREADS = 2
_UNITS = {
    "angstrom": ("Å", 1e-8), "picometer": ("pm", 1e-10), "nanometer": ("nm", 1e-7), "micrometer": ("µm", 1e-4),
    "millimeter": ("mm", 0.1), "centimeter": ("cm", 1.0), "meter": ("m", 100.0),
}  # fmt: skip
"""Symbol and length in centimeters of each unit."""


def write_tiff(path: Path, planes: Planes, *, tick: Tick = lambda _: None) -> int:
    """Write every plane at full resolution; an existing file at ``path`` is replaced at the end.

    Parameters
    ----------
    path : Path
        The TIFF; a BigTIFF when it may exceed 4 GB.
    planes : Planes
        The image. float16 is written as float32 and bool as 0 and 255, which viewers support.
    tick : callable
        Progress callback, called with the finished fraction, 0 to 1.

    Returns
    -------
    int
        Bytes written.
    """
    import tifffile

    dtype = _viewable(planes.source.dtype)
    shape = (*planes.counts, *planes.shape, *((planes.samples,) if planes.colour else ()))
    letters = "".join(planes.loops) + ("yxs" if planes.colour else "yx")
    with (
        _replacing(path) as partial,
        tifffile.TiffWriter(
            partial,
            bigtiff=math.prod(shape) * dtype.itemsize > _CLASSIC_BYTES,
            ome=set(letters) <= set("tczyxs"),
        ) as file,
    ):
        file.write(
            _tiles(planes, dtype, tick),
            shape=shape,
            dtype=dtype,
            tile=(TILE, TILE),
            photometric="rgb" if planes.colour else "minisblack",
            planarconfig="contig" if planes.colour else None,
            compression="zlib",
            # Without imagecodecs, tifffile supports this predictor for integers only.
            predictor=dtype.kind in "iu",
            maxworkers=_THREADS,
            buffersize=_BUFFER_BYTES,
            metadata={"axes": letters.upper(), **_physical_sizes(planes)},
            **_resolution(planes),
        )
    return path.stat().st_size


def _viewable(dtype: np.dtype[np.generic]) -> np.dtype[Any]:
    return np.dtype({"float16": "float32", "bool": "uint8"}.get(dtype.name, dtype))


def _tiles(planes: Planes, dtype: np.dtype[Any], tick: Tick) -> Iterator[Pixels]:
    """Every tile of every plane, in the order of the file."""
    highest = 255 if planes.source.dtype == np.bool_ else 1
    total = math.prod(planes.counts)
    for number, index in enumerate(itertools.product(*map(range, planes.counts))):
        for part in _bands(planes):
            pixels = planes.read(index, part).astype(dtype, copy=False)
            # Before the yield, because tifffile does not resume the generator after the last tile.
            tick((number + part.stop[0] / planes.shape[0]) / total)
            yield from _cut_tiles(pixels * dtype.type(highest) if highest > 1 else pixels)


def _bands(planes: Planes) -> Iterator[Region]:
    """Divide a plane into parts of whole tiles: rows of tiles as high as a chunk, or segments of one row of tiles."""
    height, width = planes.shape
    tiles = max(1, WINDOW_BYTES // (TILE * TILE * planes.pixel_bytes))
    across = -(-width // TILE)
    rows = TILE * max(1, min(-(-planes.chunk()[0] // TILE), tiles // across))
    columns = TILE * min(across, tiles)
    for top, left in itertools.product(range(0, height, rows), range(0, width, columns)):
        yield Region((top, left), (min(top + rows, height), min(left + columns, width)))


def _cut_tiles(pixels: Pixels) -> Iterator[Pixels]:
    """Tiles, row by row; those at the far edges are smaller."""
    height, width = pixels.shape[:2]
    for top, left in itertools.product(range(0, height, TILE), range(0, width, TILE)):
        yield pixels[top : top + TILE, left : left + TILE]


def _known_sizes(planes: Planes) -> dict[str, tuple[float, str]]:
    """Size of a pixel and its unit along the spatial axes where both are known."""
    source = planes.source
    entries = zip(source.axes, source.scale, source.units, strict=True)
    return {a: (size, unit) for a, size, unit in entries if a in "zyx" and unit in _UNITS and size > 0}


def _physical_sizes(planes: Planes) -> dict[str, Any]:
    """Pixel sizes as OME-XML attributes."""
    attributes: dict[str, Any] = {}
    for axis, (size, unit) in _known_sizes(planes).items():
        name = f"PhysicalSize{axis.upper()}"
        attributes |= {name: size, f"{name}Unit": _UNITS[unit][0]}
    return attributes


def _resolution(planes: Planes) -> dict[str, Any]:
    """Pixels per centimeter along x and y, as TIFF tags."""
    known = _known_sizes(planes)
    if not {"y", "x"} <= set(known):
        return {}
    resolution = tuple(1 / (size * _UNITS[unit][1]) for size, unit in (known["x"], known["y"]))
    return {"resolution": resolution, "resolutionunit": "CENTIMETER"}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; rename the file on success, and remove it on failure."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        DISK.sync(partial)
        os.replace(partial, path)
        DISK.sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
