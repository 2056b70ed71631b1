"""Test images saved in every file format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

Image = NDArray[np.generic]
Save = Callable[[Path, Image], Path]


def save_npy(folder: Path, image: Image) -> Path:
    np.save(folder / "a.npy", image)
    return folder / "a.npy"


def save_hdf5(folder: Path, image: Image) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=tuple(min(n, 16) for n in image.shape))
    return folder / "a.h5"


def save_zarr(folder: Path, image: Image) -> Path:
    zarr.create_array(folder / "a.zarr", data=image, chunks=tuple(min(n, 16) for n in image.shape))
    return folder / "a.zarr"


def save_ome(folder: Path, image: Image) -> Path:
    group = zarr.open_group(folder / "a.ome.zarr", mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    group.create_array("0", data=image, chunks=tuple(min(n, 16) for n in image.shape))
    return folder / "a.ome.zarr"


def save_tiff(folder: Path, image: Image) -> Path:
    tifffile.imwrite(folder / "a.tif", image, photometric="minisblack")
    return folder / "a.tif"


def save_tiled_tiff(folder: Path, image: Image) -> Path:
    tifffile.imwrite(folder / "t.tif", image, photometric="minisblack", tile=(16, 16), compression="zlib")
    return folder / "t.tif"


SAVERS: dict[str, Save] = {
    "npy": save_npy,
    "hdf5": save_hdf5,
    "zarr": save_zarr,
    "ome": save_ome,
    "tiff": save_tiff,
    "tiled tiff": save_tiled_tiff,
}
every_format = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


def make_image(shape: tuple[int, ...], dtype: str) -> Image:
    return (np.random.default_rng(3).random(shape) * 120).astype(dtype)
