"""Images to which levels are added in the tests, and a disk on which that is interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from halotile.storage.disk.durable import Buffers, Disk
from halotile.storage.images import added_levels
from halotile.storage.images.added_levels import WORK
from halotile.storage.sharded import levels
from tests.support import noisy_image

SHAPE = (150, 213)
FORMATS: dict[str, Mapping[str, Any]] = {
    "v2": {"zarr_format": 2, "chunks": 32},
    "v3": {"zarr_format": 3, "chunks": 32},
    "shards": {"zarr_format": 3, "chunks": 16, "shards": 64},
}
TYPES = {"t": "time", "c": "channel"}


def save_image(
    path: Path,
    pixels: NDArray[Any],
    form: str = "v3",
    *,
    axes: str = "yx",
    scale: Sequence[float] | None = None,
    name: str = "0",
    attributes: Mapping[str, Any] | None = None,
) -> Path:
    """An OME-Zarr image with its finest level, as other programs write it."""
    options = dict(FORMATS[form])
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("zarr_format"))
    edges = {key: tuple(edge if axis in "yx" else 1 for axis in axes) for key, edge in options.items()}
    array = group.create_array(
        name, shape=pixels.shape, dtype=pixels.dtype, attributes=dict(attributes or {}), **edges
    )
    array[...] = pixels
    steps = [{"type": "scale", "scale": list(scale or [0.5] * len(axes))}]
    image: dict[str, Any] = {
        "axes": [
            {"name": a, "type": TYPES.get(a, "space"), **({} if a in TYPES else {"unit": "micrometer"})}
            for a in axes
        ],
        "datasets": [{"path": name, "coordinateTransformations": steps}],
        "name": "cells",
        "metadata": {"method": "mine"},
    }
    if form == "v2":
        group.attrs.update({"multiscales": [{"version": "0.4", **image}], "mine": [1, 2.5]})
    else:
        group.attrs.update({"ome": {"version": "0.5", "multiscales": [image]}, "mine": [1, 2.5]})
    return path


def image_of(path: Path) -> dict[str, Any]:
    """The multiscale attributes."""
    attributes: dict[str, Any] = zarr.open_group(path, mode="r").attrs.asdict()
    image: dict[str, Any] = attributes.get("ome", attributes)["multiscales"][0]
    return image


def stored_levels(path: Path) -> list[NDArray[Any]]:
    group = zarr.open_group(path, mode="r")
    return [group[entry["path"]][...] for entry in image_of(path)["datasets"]]


def tree(path: Path) -> dict[str, bytes]:
    """Every file, with its contents."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def check_equal(path: Path, expected: Sequence[NDArray[Any]]) -> None:
    found = stored_levels(path)
    assert len(found) == len(expected)
    for level, wanted in zip(found, expected, strict=True):
        assert level.dtype == wanted.dtype
        np.testing.assert_array_equal(level, wanted)


def with_holes(dtype: str) -> NDArray[Any]:
    pixels = noisy_image(SHAPE, dtype)
    hole = np.nan if pixels.dtype.kind == "f" else 7
    pixels[20:61, 30:77] = hole
    pixels[100, ::3] = hole
    return pixels


def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels, shards and parts of small images."""
    monkeypatch.setattr(levels, "LARGEST_TOP", 20)
    monkeypatch.setattr(levels, "SMALLEST_SHARD", 4)
    monkeypatch.setattr(added_levels, "PART_BYTES", 4096)
    monkeypatch.setattr(added_levels, "SHARD_BYTES", 4096)


class Killed(Exception):
    """End of the program."""


class MortalDisk(Disk):
    """A disk on which the program is killed before a write operation, or in the middle of a write."""

    def __init__(self, last: int) -> None:
        self.left = last

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def _write(self, fd: int, buffers: Buffers) -> int:
        if self.left == 0:
            super()._write(fd, [memoryview(buffers[0])[:3]])
        self._count()
        return super()._write(fd, buffers)

    def _replace(self, old: Path, new: Path) -> None:
        self._count()
        super()._replace(old, new)

    def _mkdir(self, path: Path, mode: int) -> None:
        self._count()
        super()._mkdir(path, mode)

    def _unlink(self, path: Path) -> None:
        if self.left > 0 or (WORK in path.parts and not path.name.endswith(".partial")):
            self._count()
            super()._unlink(path)  # a killed program removes nothing

    def _rmdir(self, path: Path) -> None:
        self._count()
        super()._rmdir(path)
