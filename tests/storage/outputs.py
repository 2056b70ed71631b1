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
OME = Layout(
    shape=(2, 3, 20, 13),
    dtype="uint16",
    shard=(1, 1, 8, 8),
    chunk=(1, 1, 4, 4),
    codec="zstd",
    axes=("t", "c", "y", "x"),
    scale=(1.5, 1.0, 0.25, 0.5),
    units=("second", None, "micrometer", "micrometer"),
    ome=True,
)


def noise(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Reproducible pixels."""
    return (np.random.default_rng(7).random(shape) * 100).astype(dtype)


def written(path: OutputPath, layout: Layout) -> NDArray[Any]:
    """Write a complete output and return its pixels."""
    pixels = noise(layout.shape, layout.dtype)
    create_output(path, layout)
    ShardWriter(path, layout).write(Region.whole(layout.shape), pixels)
    return pixels


def image_of(path: Path) -> dict[str, Any]:
    """The multiscale attributes."""
    attributes: dict[str, Any] = zarr.open_group(path, mode="r").attrs.asdict()
    image: dict[str, Any] = attributes.get("ome", attributes)["multiscales"][0]
    return image


def stored_levels(path: Path) -> list[NDArray[Any]]:
    """The pixels of every level."""
    group: Any = zarr.open_group(path, mode="r")
    return [group[entry["path"]][...] for entry in image_of(path)["datasets"]]
