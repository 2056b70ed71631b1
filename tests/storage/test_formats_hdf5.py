"""HDF5 datasets: the named one, or the only image in the file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from halotile.errors import DamagedData, InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region

PICTURE = np.arange(30 * 40, dtype="uint16").reshape(30, 40)


def _write(path: Path, **datasets: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name.replace("__", "/"), data=values)
    return path


def test_the_only_image_is_found_among_tables(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.h5", entry__data=PICTURE, entry__times=np.zeros(9), version=np.array(1.0))
    source = open_source(path)
    assert source.fingerprint()["dataset"] == "/entry/data"
    assert np.array_equal(source.read(Region((2, 3), (9, 9))), PICTURE[2:9, 3:9])


@pytest.mark.parametrize("dataset", [None, "entry/nothing", "entry", "../a", ""])
def test_datasets_are_listed_when_none_was_chosen(tmp_path: Path, dataset: str | None) -> None:
    path = _write(tmp_path / "a.h5", entry__data=PICTURE, entry__dark=PICTURE)
    with pytest.raises(InputError, match=r"entry/dark uint16 \(30, 40\); entry/data uint16"):
        open_source(path, dataset=dataset)
    assert open_source(path, dataset="/entry/dark").shape == (30, 40)


def test_a_file_without_datasets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no datasets at all"):
        open_source(_write(tmp_path / "a.h5"))


def test_chunks_and_dimension_labels_are_taken_over(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("a", data=np.zeros((3, 30, 40), "f4"), chunks=(1, 10, 20))
        for axis, label in enumerate(("time", "y", "x")):
            dataset.dims[axis].label = label
    source = open_source(tmp_path / "a.h5")
    assert (source.chunks, source.axes) == ((1, 10, 20), ("t", "y", "x"))


@pytest.mark.parametrize("dims", list(itertools.permutations(("lat", "lon", "time"))))
def test_axes_are_called_as_the_dimensions_of_netcdf(tmp_path: Path, dims: tuple[str, ...]) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        dataset = file.create_dataset("group/a", data=np.zeros((8, 9, 10), "f4"))
        for axis, name in enumerate(dims):
            scale = file.create_dataset(name, data=np.arange(8.0 + axis))
            # netCDF-4 writes this name for dimensions without a variable.
            scale.make_scale("This is a netCDF dimension but not a netCDF variable.")
            dataset.dims[axis].attach_scale(scale)
    letters = {"lat": "y", "lon": "x", "time": "t"}
    source = open_source(tmp_path / "a.nc")
    assert (source.axes, source.remarks) == (tuple(letters[name] for name in dims), ())


def test_coordinates_of_netcdf_have_a_note(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        dataset = file.create_dataset("t", data=np.zeros((8, 9, 10), "f4"))
        dataset.attrs["coordinates"] = "height lon"
        no_variable = "This is a netCDF dimension but not a netCDF variable.        10"
        for axis, (name, title) in enumerate({"time": "time", "lat": no_variable, "lon": "lon"}.items()):
            scale = file.create_dataset(name, data=np.arange(8.0 + axis))
            scale.make_scale(title)
            dataset.dims[axis].attach_scale(scale)
    (remark,) = open_source(tmp_path / "a.nc").remarks
    assert remark.startswith("its coordinates time, lon, height are not written to the output")


def test_a_user_block_in_front_is_no_obstacle(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file.create_dataset("a", data=PICTURE)
    assert open_source(tmp_path / "a.h5").format == "hdf5"


def test_a_truncated_file_is_damage(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.h5", a=PICTURE)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedData, match=r"a\.h5"):
        open_source(path)


def test_a_chunk_that_fails_its_checksum_is_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=PICTURE, chunks=(10, 10), fletcher32=True)
        place = file["a"].id.get_chunk_info(0).byte_offset
    whole = bytearray((tmp_path / "a.h5").read_bytes())
    whole[place + 5] ^= 1
    (tmp_path / "a.h5").write_bytes(whole)
    source = open_source(tmp_path / "a.h5")
    with pytest.raises(DamagedData, match=r"from \(0, 0\) to \(5, 5\)"):
        source.read(Region((0, 0), (5, 5)))
    assert np.array_equal(source.read(Region((10, 10), (30, 40))), PICTURE[10:, 10:])


@pytest.mark.parametrize("kind", ["virtual", "external"])
def test_a_change_of_another_file_with_pixels_is_detected(tmp_path: Path, kind: str) -> None:
    parts = _write(tmp_path / "part.h5", data=PICTURE)
    raw = tmp_path / "part.raw"
    PICTURE.tofile(raw)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "virtual":
            layout = h5py.VirtualLayout(PICTURE.shape, PICTURE.dtype)
            layout[...] = h5py.VirtualSource("part.h5", "data", PICTURE.shape)
            file.create_virtual_dataset("data", layout)
        else:
            file.create_dataset("data", PICTURE.shape, PICTURE.dtype, external=[(raw, 0, PICTURE.nbytes)])
    source = open_source(tmp_path / "a.h5")
    assert np.array_equal(source.read(Region.whole(source.shape)), PICTURE)
    assert source.change() == ""
    os.utime(parts if kind == "virtual" else raw)
    assert source.change() == "was written to"


def test_a_scale_that_was_deleted_names_no_axis(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        pixels = file.create_dataset("image", data=np.arange(20.0).reshape(4, 5))
        file.create_dataset("latitude", data=np.arange(4.0)).make_scale("latitude")
        pixels.dims[0].attach_scale(file["latitude"])
        del file["latitude"]
    source = open_source(str(tmp_path / "a.h5"))
    assert source.axes == ("y", "x")
    assert source.read(Region.whole((4, 5))).max() == 19
