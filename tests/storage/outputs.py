"""Layouts and pixels of outputs for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Region
from halotile.storage.sharded.output import Layout, ShardWriter, create_output

PLAIN = Layout((20, 13), "float32", (8, 8), (4, 4), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
_AXES, _SCALE = ("t", "c", "y", "x"), (1.5, 1.0, 0.25, 0.5)
_UNITS = ("second", None, "micrometer", "micrometer")
OME = Layout((2, 3, 20, 13), "uint16", (1, 1, 8, 8), (1, 1, 4, 4), "zstd", _AXES, _SCALE, _UNITS, True)


def noise(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Reproducible pixels."""
    return (np.random.default_rng(7).random(shape) * 100).astype(dtype)


def written(path: OutputPath, layout: Layout) -> NDArray[Any]:
    """Write a complete output and return its pixels."""
    pixels = noise(layout.shape, layout.dtype)
    create_output(path, layout)
    ShardWriter(path, layout).write(Region.whole(layout.shape), pixels)
    return pixels


def write_blocks(path: str | OutputPath, layout: Layout, pixels: NDArray[Any]) -> Layout:
    """Write an output block by block, and return its layout."""
    create_output(path, layout)
    writer = ShardWriter(path, layout)
    for block in layout.grid:
        writer.write(block.core, pixels[block.core.slices])
    return layout


def means(pixels: NDArray[Any], nodata: float | None = None) -> NDArray[Any]:
    """Means of two by two pixels in double precision, without those that are holes, by the axes y and x at the end."""
    height, width = pixels.shape[-2:]
    values = pixels.astype(float)
    if nodata is not None:
        values[pixels == nodata] = np.nan
    values = np.pad(values, [(0, 0)] * (pixels.ndim - 2) + [(0, height % 2), (0, width % 2)], constant_values=np.nan)
    cells = values.reshape(*pixels.shape[:-2], -(-height // 2), 2, -(-width // 2), 2)
    valid = np.isfinite(cells)
    total, count = np.where(valid, cells, 0).sum((-3, -1)), valid.sum((-3, -1))
    found = np.where(count > 0, total / np.maximum(count, 1), (np.nan if nodata is None else nodata))
    return (np.rint(found) if pixels.dtype.kind in "iu" else found).astype(pixels.dtype)


def image_of(path: Path) -> dict[str, Any]:
    """The multiscale attributes."""
    attributes: dict[str, Any] = zarr.open_group(path, mode="r").attrs.asdict()
    image: dict[str, Any] = attributes.get("ome", attributes)["multiscales"][0]
    return image


def stored_levels(path: Path) -> list[NDArray[Any]]:
    """The pixels of every level."""
    group: Any = zarr.open_group(path, mode="r")
    return [group[entry["path"]][...] for entry in image_of(path)["datasets"]]
