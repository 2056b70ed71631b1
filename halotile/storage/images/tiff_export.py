"""An image of any size written as a tiled TIFF that every viewer opens.

The values stay as they are. The file is compressed with deflate, which needs no package beside
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
"""Edge of a tile in pixels; TIFF wants a multiple of 16."""
_CLASSIC_BYTES = 4_000_000_000
"""Beyond this, offsets of 32 bits are not enough."""
_BUFFER_BYTES = 16 * 2**20
_THREADS = 2
_CENTIMETERS = {
    "angstrom": 1e-8, "picometer": 1e-10, "nanometer": 1e-7, "micrometer": 1e-4,
    "millimeter": 0.1, "centimeter": 1.0, "meter": 100.0,
}  # fmt: skip
_SYMBOLS = {
    "angstrom": "Å", "picometer": "pm", "nanometer": "nm", "micrometer": "µm",
    "millimeter": "mm", "centimeter": "cm", "meter": "m",
}  # fmt: skip


def write_tiff(path: Path, planes: Planes, *, tick: Tick = lambda _: None) -> int:
    """Write every plane at full resolution; a file that stands at ``path`` is replaced when all is written.

    Parameters
    ----------
    path : Path
        The TIFF, a BigTIFF where more than 4 GB may come.
    planes : Planes
        The image. float16 is written as float32 and bool as 0 and 255, which viewers know.
    tick : callable
        Told of the part that is done, 0 to 1.

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
            # tifffile alone writes this predictor for integers only.
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
            # Told before: tifffile does not ask for what comes after the last tile.
            tick((number + part.stop[0] / planes.shape[0]) / total)
            yield from _cut(pixels * dtype.type(highest) if highest > 1 else pixels)


def _bands(planes: Planes) -> Iterator[Region]:
    """A plane in parts of whole tiles: rows of tiles as high as a chunk, or pieces of one row of tiles."""
    height, width = planes.shape
    tiles = max(1, WINDOW_BYTES // (TILE * TILE * planes.pixel_bytes))
    across = -(-width // TILE)
    rows = TILE * max(1, min(-(-planes.chunk()[0] // TILE), tiles // across))
    columns = TILE * min(across, tiles)
    for top, left in itertools.product(range(0, height, rows), range(0, width, columns)):
        yield Region((top, left), (min(top + rows, height), min(left + columns, width)))


def _cut(pixels: Pixels) -> Iterator[Pixels]:
    """Tiles, row by row; those at the far edges are shorter."""
    height, width = pixels.shape[:2]
    for top, left in itertools.product(range(0, height, TILE), range(0, width, TILE)):
        yield pixels[top : top + TILE, left : left + TILE]


def _known_sizes(planes: Planes) -> dict[str, tuple[float, str]]:
    """Size of a pixel and its unit along the axes of space where both are known."""
    source = planes.source
    entries = zip(source.axes, source.scale, source.units, strict=True)
    return {a: (size, unit) for a, size, unit in entries if a in "zyx" and unit in _CENTIMETERS and size > 0}


def _physical_sizes(planes: Planes) -> dict[str, Any]:
    """Pixel sizes as OME-XML attributes."""
    found: dict[str, Any] = {}
    for axis, (size, unit) in _known_sizes(planes).items():
        found |= {f"PhysicalSize{axis.upper()}": size, f"PhysicalSize{axis.upper()}Unit": _SYMBOLS[unit]}
    return found


def _resolution(planes: Planes) -> dict[str, Any]:
    """Pixels per centimeter along x and y, as TIFF tags."""
    known = _known_sizes(planes)
    if not {"y", "x"} <= set(known):
        return {}
    per = [1 / (size * _CENTIMETERS[unit]) for size, unit in (known["x"], known["y"])]
    return {"resolution": tuple(per), "resolutionunit": "CENTIMETER"}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its name when all went well, and is removed when not."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        DISK.sync(partial)
        os.replace(partial, path)
        DISK.sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
