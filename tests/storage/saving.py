"""Pictures in files of every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

Picture = NDArray[np.generic]
Save = Callable[[Path, Picture], Path]


def save_npy(folder: Path, picture: Picture) -> Path:
    np.save(folder / "a.npy", picture)
    return folder / "a.npy"


def save_hdf5(folder: Path, picture: Picture) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("picture", data=picture, chunks=tuple(min(n, 16) for n in picture.shape))
    return folder / "a.h5"


def save_zarr(folder: Path, picture: Picture) -> Path:
    array = zarr.create_array(
        folder / "a.zarr",
        shape=picture.shape,
        chunks=tuple(min(n, 16) for n in picture.shape),
        dtype=picture.dtype,
    )
    array[...] = picture
    return folder / "a.zarr"


def save_ome(folder: Path, picture: Picture) -> Path:
    group = zarr.open_group(folder / "a.ome.zarr", mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    group.create_array("0", data=picture, chunks=tuple(min(n, 16) for n in picture.shape))
    return folder / "a.ome.zarr"


def save_tiff(folder: Path, picture: Picture) -> Path:
    tifffile.imwrite(folder / "a.tif", picture, photometric="minisblack")
    return folder / "a.tif"


def save_tiled_tiff(folder: Path, picture: Picture) -> Path:
    tifffile.imwrite(folder / "t.tif", picture, photometric="minisblack", tile=(16, 16), compression="zlib")
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


def made_picture(shape: tuple[int, ...], dtype: str) -> Picture:
    return (np.random.default_rng(3).random(shape) * 120).astype(dtype)
