"""HDF5 datasets: the named one, or the only image in the file; changes are detected in every file that one is read from."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from halotile.errors import DamagedData, InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region

FRAME = np.arange(30 * 40, dtype="uint16").reshape(30, 40)


def _write(path: Path, **datasets: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name.replace("__", "/"), data=values)
    return path


def test_datasets_are_listed_when_none_was_chosen(tmp_path: Path) -> None:
    for dataset in (None, "entry/nothing", "entry", "../a", ""):
        path = _write(tmp_path / "a.h5", entry__data=FRAME, entry__dark=FRAME)
        with pytest.raises(InputError, match=r"entry/dark uint16 \(30, 40\); entry/data uint16"):
            open_source(path, dataset=dataset)
        assert open_source(path, dataset="/entry/dark").shape == (30, 40)
    with pytest.raises(InputError, match="no datasets at all"):
        open_source(_write(tmp_path / "b.h5"))


def test_axes_are_called_as_labels_or_dimensions_of_netcdf_whose_other_attributes_are_noted(tmp_path: Path) -> None:
    no_variable = "This is a netCDF dimension but not a netCDF variable."  # as netCDF-4 writes
    for dims in itertools.permutations(("lat", "lon", "time")):
        path = tmp_path / f"{dims}.nc"
        with h5py.File(path, "w", userblock_size=1024) as file:  # which is no obstacle
            dataset = file.create_dataset("group/a", (8, 9, 10), "f4", chunks=(1, 9, 5), fillvalue=9.969209968386869e36)
            for axis, name in enumerate(dims):
                file.create_dataset(name, data=np.arange(8.0 + axis)).make_scale(no_variable)
                dataset.dims[axis].attach_scale(file[name])
        letters, source = {"lat": "y", "lon": "x", "time": "t"}, open_source(path)
        assert (source.axes, source.remarks) == (tuple(letters[name] for name in dims), ())
        assert source.fingerprint()["dataset"] == "/group/a", "the only image among tables"
        assert source.chunks == (1, 9, 5)
        assert source.nodata == source[0, 0, 0], "what was never written is a hole"
    path = Path(shutil.copy(path, tmp_path / "d.nc"))
    with h5py.File(path, "a") as file:
        file["group/a"].attrs.update({"coordinates": "height lon", "valid_range": np.array([0, 5.0])})
        for name in ("time", "lon"):
            file[name].make_scale(name)
    remarks = sorted(open_source(path).remarks)
    assert remarks[0].startswith("its coordinates time, lon, height are not written to the output")
    assert "valid_range [0. 5.]), which is not applied: values outside it count as measured" in remarks[1]
    with h5py.File(tmp_path / "b.nc", "w") as file:
        pixels = file.create_dataset("image", data=np.arange(20.0).reshape(4, 5))
        file.create_dataset("latitude", data=np.arange(4.0)).make_scale("latitude")
        pixels.dims[0].attach_scale(file["latitude"])
        del file["latitude"]  # a scale that is deleted names no axis
    assert open_source(tmp_path / "b.nc").axes == ("y", "x")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        dataset = file.create_dataset("a", data=np.zeros((3, 30, 40), "f4"))
        for axis, label in enumerate(("time", "y", "x")):
            dataset.dims[axis].label = label
    assert open_source(tmp_path / "c.h5").axes == ("t", "y", "x")


def test_a_chunk_that_fails_its_checksum_is_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=FRAME, chunks=(10, 10), fletcher32=True)
        place = file["a"].id.get_chunk_info(0).byte_offset
    whole = bytearray((tmp_path / "a.h5").read_bytes())
    whole[place + 5] ^= 1
    (tmp_path / "a.h5").write_bytes(whole)
    source = open_source(tmp_path / "a.h5")
    with pytest.raises(DamagedData, match=r"from \(0, 0\) to \(5, 5\)"):
        source.read(Region((0, 0), (5, 5)))
    assert np.array_equal(source.read(Region((10, 10), (30, 40))), FRAME[10:, 10:])


def _plain(path: Path, name: str = "data") -> Path:
    path.parent.mkdir(exist_ok=True)
    return _write(path, **{name: FRAME})


def _virtual(path: Path, source: str, name: str = "data") -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout(FRAME.shape, FRAME.dtype)
        layout[...] = h5py.VirtualSource(source, name, FRAME.shape)
        file.create_virtual_dataset("data", layout)
    return path


def _external(path: Path, raw: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", FRAME.shape, FRAME.dtype, external=[(raw, 0, FRAME.nbytes)])
    return path


def _linked(path: Path, file: str, name: str = "data") -> Path:
    with h5py.File(path, "w") as made:
        made["data"] = h5py.ExternalLink(file, name)
    return path


def _raw(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    FRAME.tofile(path)
    return path


def _numbered(path: Path, source: str, count: int, name: str = "data") -> Path:
    """A virtual dataset of unlimited length with one source for each plane."""
    plane = h5py.h5s.create_simple(FRAME.shape)
    space = h5py.h5s.create_simple((count, *FRAME.shape), (h5py.h5s.UNLIMITED, *FRAME.shape))
    space.select_hyperslab((0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1), (1, 1, 1), (1, *FRAME.shape))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_virtual(space, source.encode(), name.encode(), plane)
    with h5py.File(path, "w") as file:
        whole = h5py.h5s.create_simple((count, *FRAME.shape), (h5py.h5s.UNLIMITED, *FRAME.shape))
        h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_UINT16, whole, creation)
    return path


def _of_a_group_behind_links(folder: Path) -> tuple[Path, Path]:
    part = _plain(folder / "part.h5", "group/there")
    with h5py.File(folder / "a.h5", "w") as file:
        file["far"] = h5py.ExternalLink("part.h5", "/group")
        file["data"] = h5py.SoftLink("far/there")
    return folder / "a.h5", part


def _of_many(folder: Path) -> tuple[Path, Path]:
    parts = [_plain(folder / f"q[1]-{number}-100%.h5", f"at {number}") for number in range(11)]
    return _numbered(folder / "a.h5", "q[1]-%b-100%%.h5", 11, "at %b"), parts[-1]


def _through_a_link_in_another_folder(folder: Path) -> tuple[Path, Path]:
    part = _plain(folder / "real" / "part.h5")
    (folder / "a.h5").symlink_to(_virtual(folder / "real" / "whole.h5", "part.h5"))
    return folder / "a.h5", part


def _through(middle: Any, first: Any, last: Any = _plain, end: str = "part.h5") -> Callable[[Path], tuple[Path, Path]]:
    """A file that leads to one in a folder, which leads to the last one."""

    def make(folder: Path) -> tuple[Path, Path]:
        part = last(folder / "deep" / end)
        middle(folder / "deep" / "middle.h5", end if last is _plain else str(part))
        return first(folder / "a.h5", "deep/middle.h5"), part

    return make


def _nested_of_many(folder: Path) -> tuple[Path, Path]:
    part = _plain(folder / "part.h5")
    _plain(folder / "q0.h5")
    _virtual(folder / "q1.h5", "part.h5")
    return _numbered(folder / "a.h5", "q%b.h5", 2), part


def _numbered_inside(folder: Path) -> tuple[Path, Path]:
    part = _plain(folder / "part.h5")
    with h5py.File(folder / "q.h5", "w") as file:
        file["at 0"] = FRAME
        file["at 1"] = h5py.ExternalLink("part.h5", "data")
    return _numbered(folder / "a.h5", "q.h5", 2, "at %b"), part


KINDS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "of a file opened through a link in another folder": _through_a_link_in_another_folder,
    "of a source that is virtual": _through(_virtual, _virtual),
    "of a source that is a link": _through(_linked, _virtual),
    "by way of a link": _through(_linked, _linked),
    "of a group behind links": _of_a_group_behind_links,
    "raw, of a source": _through(_external, _virtual, _raw, "part.raw"),
    # From its absolute path to the folder of the file.
    "that was moved": lambda folder: (_virtual(folder / "a.h5", "/nowhere/part.h5"), _plain(folder / "part.h5")),
    "of many, by number": _of_many,
    "of one of many that is virtual": _nested_of_many,
    "of many datasets in one file": _numbered_inside,
    "raw, in the folder that the process works in": lambda folder: (
        _external(folder / "there" / "a.h5", "part.raw"), _raw(folder / "part.raw"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_change_of_a_file_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    path, part = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = open_source(path, dataset="data")
    read = source[...]
    assert np.array_equal(read, np.broadcast_to(FRAME, read.shape)), "HDF5 reads it from there"
    assert source.change() == ""
    os.utime(part, ns=(0, 12345))
    assert source.change() == "was written to"
    if make is _of_many:
        (tmp_path / "q[1]-4-100%.h5").unlink()
        with pytest.raises(InputError, match=r"in another file, q\[1\]-4-100%\.h5, which is missing"):
            open_source(path, dataset="data")


def test_the_environment_goes_before_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"": "part.raw", "${ORIGIN}/raw": "there/raw/part.raw", "elsewhere": "elsewhere/part.raw"}
    raw = {prefix: _raw(tmp_path / place) for prefix, place in places.items()}
    path = _external(tmp_path / "there" / "a.h5", "part.raw")
    monkeypatch.chdir(tmp_path)
    for prefix, place in raw.items():
        monkeypatch.setenv("HDF5_EXTFILE_PREFIX", prefix)
        assert list(open_source(path).fingerprint()["files"]) == [str(place)]
    _plain(tmp_path / "part.h5")
    before = _plain(tmp_path / "before" / "part.h5")
    for variable, make in (("HDF5_VDS_PREFIX", _virtual), ("HDF5_EXT_PREFIX", _linked)):
        with monkeypatch.context() as patch:
            patch.setenv(variable, f"/nowhere:{before.parent}")
            files = open_source(make(tmp_path / "a.h5", "part.h5"), dataset="data").fingerprint()["files"]
            assert list(files) == [str(before)]


def test_cyclic_sources_are_handled(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout(FRAME.shape, FRAME.dtype)
        layout[:3] = h5py.VirtualSource("b.h5", "data", FRAME.shape)[:3]
        layout[3:] = h5py.VirtualSource(".", "own", FRAME.shape)[3:]
        file.create_virtual_dataset("data", layout)
        file["own"] = FRAME
    _virtual(tmp_path / "b.h5", "a.h5")
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["loop"] = h5py.SoftLink("loop/on")
    assert list(open_source(tmp_path / "a.h5", dataset="data").fingerprint()["files"]) == [str(tmp_path / "b.h5")]
    path = _virtual(tmp_path / "c.h5", "b.h5", "loop")
    with pytest.raises(InputError, match=r"b\.h5, dataset loop, which cannot be read"):
        open_source(path)


def test_a_source_that_hdf5_would_replace_by_its_fill_value_is_refused(tmp_path: Path) -> None:
    path, part = _virtual(tmp_path / "a.h5", "part.h5"), tmp_path / "part.h5"
    for one in (path, _linked(tmp_path / "link.h5", "a.h5"), _virtual(tmp_path / "nested.h5", "a.h5")):
        message = rf"{one}: .* in another file, part\.h5, which is not in .* \({tmp_path}\)\. Put it there, .* HDF5_VDS_PREFIX"
        with pytest.raises(InputError, match=message):
            open_source(one, dataset="data")
    for make in (lambda: part.write_bytes(b"no HDF5"), lambda: _plain(part, "another")):
        make()
        with pytest.raises(InputError, match=rf"{part}, dataset data, which cannot be read"):
            open_source(path)
    _plain(part)
    source = open_source(path)
    part.unlink()
    assert source.change() == "was moved, removed or damaged"


def test_datasets_of_a_file_of_links_are_chosen_by_link_name(tmp_path: Path) -> None:
    _plain(tmp_path / "part.h5")
    path = _linked(tmp_path / "a.h5", "part.h5")
    assert np.array_equal(open_source(path)[...], FRAME)
    assert list(open_source(path).fingerprint()["files"]) == [str(tmp_path / "part.h5")]
    with h5py.File(path, "a") as file:
        file["entry/image"] = h5py.SoftLink("/data")
        file["entry/gone"] = h5py.ExternalLink("nowhere.h5", "data")
    message = r"holds 2 datasets.*Write dataset: one of data uint16 \(30, 40\); entry/image uint16 \(30, 40\)\.$"
    with pytest.raises(InputError, match=message):
        open_source(path)
    with h5py.File(path, "a") as file:
        file["own"] = FRAME + 1
    assert np.array_equal(open_source(path)[...], FRAME + 1), "its own goes before links"


def test_a_raw_file_that_is_cut_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw, path = _raw(tmp_path / "part.raw"), _external(tmp_path / "a.h5", "part.raw")
    assert np.array_equal(open_source(path)[...], FRAME)
    raw.write_bytes(raw.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"part\.raw has {FRAME.nbytes - 1:,} bytes, and .* reads {FRAME.nbytes:,}"):
        open_source(path)


def test_numbers_that_netcdf_stores_with_another_sign_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["data"] = FRAME.astype("int8")
        file["data"].attrs["_Unsigned"] = np.bytes_(b"true")  # as netCDF-C writes text
    with pytest.raises(InputError, match="int8 are unsigned"):
        open_source(tmp_path / "a.nc")


@pytest.mark.parametrize("there", [True, False])
def test_raw_files_that_are_not_found_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    path = _external(tmp_path / "a.h5", "part.raw")
    if there:
        _raw(tmp_path / "part.raw")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("HDF5_EXTFILE_PREFIX", raising=False)
    remedy = r"Set HDF5_EXTFILE_PREFIX='\$\{ORIGIN\}'" if there else "Put it there"
    with pytest.raises(InputError, match=rf"part\.raw, which is not in .*/work\)\. {remedy}"):
        open_source(path)
    _raw(tmp_path / "part.raw")
    code = "import sys; from halotile.storage.arrays import open_source; print(open_source(sys.argv[1])[...].sum())"
    environment = os.environ | {"HDF5_EXTFILE_PREFIX": "${ORIGIN}"}
    done = subprocess.run([sys.executable, "-c", code, path], env=environment, capture_output=True, check=True)
    assert int(done.stdout) == FRAME.sum()


def test_a_process_ends_cleanly_while_a_thread_has_a_virtual_dataset(tmp_path: Path) -> None:
    _plain(tmp_path / "part.h5")
    path = _virtual(tmp_path / "a.h5", "part.h5")
    code = (
        "import sys, threading, time; from halotile.storage.arrays import open_source\n"
        "def hold():\n"
        "    source = open_source(sys.argv[1]); source[...]; held.set(); time.sleep(60)\n"
        "held = threading.Event(); threading.Thread(target=hold, daemon=True).start(); held.wait(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
