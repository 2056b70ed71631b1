"""A path becomes a source, or a refusal that says why and what to write."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

from halotile import registry
from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.arrays import Source, open_source
from halotile.storage.formats.base import DTYPES
from halotile.storage.grid import Region

Picture = NDArray[np.generic]
Save = Callable[[Path, Picture], Path]


def _save_npy(folder: Path, picture: Picture) -> Path:
    np.save(folder / "a.npy", picture)
    return folder / "a.npy"


def _save_hdf5(folder: Path, picture: Picture) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("picture", data=picture, chunks=tuple(min(n, 16) for n in picture.shape))
    return folder / "a.h5"


def _save_zarr(folder: Path, picture: Picture) -> Path:
    array = zarr.create_array(
        folder / "a.zarr",
        shape=picture.shape,
        chunks=tuple(min(n, 16) for n in picture.shape),
        dtype=picture.dtype,
    )
    array[...] = picture
    return folder / "a.zarr"


def _save_ome(folder: Path, picture: Picture) -> Path:
    group = zarr.open_group(folder / "a.ome.zarr", mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    group.create_array("0", data=picture, chunks=tuple(min(n, 16) for n in picture.shape))
    return folder / "a.ome.zarr"


def _save_tiff(folder: Path, picture: Picture) -> Path:
    tifffile.imwrite(folder / "a.tif", picture, photometric="minisblack")
    return folder / "a.tif"


def _save_tiled_tiff(folder: Path, picture: Picture) -> Path:
    tifffile.imwrite(folder / "t.tif", picture, photometric="minisblack", tile=(16, 16), compression="zlib")
    return folder / "t.tif"


SAVERS: dict[str, Save] = {
    "npy": _save_npy,
    "hdf5": _save_hdf5,
    "zarr": _save_zarr,
    "ome": _save_ome,
    "tiff": _save_tiff,
    "tiled tiff": _save_tiled_tiff,
}
every_format = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


def _picture(shape: tuple[int, ...], dtype: str) -> Picture:
    return (np.random.default_rng(3).random(shape) * 120).astype(dtype)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_region_reads_as_numpy_would_slice_it(tmp_path: Path, save: Save, dtype: str) -> None:
    picture = _picture((37, 45), dtype)
    source = open_source(save(tmp_path, picture))
    region = Region((5, 11), (30, 45))
    pixels = source.read(region)
    assert (source.shape, source.dtype, source.axes) == (picture.shape, picture.dtype, ("y", "x"))
    assert pixels.dtype == picture.dtype
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert np.array_equal(pixels, picture[5:30, 11:45])
    assert np.array_equal(source.read(Region.whole(source.shape)), picture)


@every_format
@pytest.mark.parametrize("shape", [(3, 20, 33), (2, 3, 20, 33), (2, 2, 3, 20, 33)])
def test_leading_axes_are_read_too(tmp_path: Path, save: Save, shape: tuple[int, ...]) -> None:
    picture = _picture(shape, "uint16")
    source = open_source(save(tmp_path, picture))
    start, stop = (*(1 for _ in shape[:-2]), 3, 4), (*shape[:-2], 19, 30)
    assert source.axes[-2:] == ("y", "x")
    assert len(set(source.axes)) == len(shape)
    assert np.array_equal(source.read(Region(start, stop)), picture[Region(start, stop).slices])


@every_format
def test_asked_axes_win_over_the_file(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, _picture((3, 20, 33), "float32"))
    assert open_source(path, axes="TYX").axes == ("t", "y", "x")


@every_format
def test_big_endian_pixels_come_out_native(tmp_path: Path, save: Save) -> None:
    picture = _picture((20, 33), "float32")
    if save is _save_tiff:
        tifffile.imwrite(tmp_path / "a.tif", picture, byteorder=">")
        path = tmp_path / "a.tif"
    else:
        path = save(tmp_path, picture.astype(">f4"))
    source = open_source(path)
    assert source.dtype.isnative
    assert source.read(Region((1, 1), (5, 5))).dtype.isnative
    assert np.array_equal(source.read(Region.whole(source.shape)), picture)


@every_format
def test_complex_pixels_are_refused(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, np.zeros((20, 33), "complex64"))
    with pytest.raises(InputError, match=rf"{path.name}.*complex64.*real and imaginary"):
        open_source(path)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "complex128", "U3", "S4", "datetime64[s]"])
def test_types_that_are_no_picture_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        open_source(_save_npy(tmp_path, np.zeros((4, 5), dtype)))


def test_structured_and_object_pixels_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.zeros((4, 5), [("a", "f4")]))
    np.save(tmp_path / "o.npy", np.full((4, 5), None), allow_pickle=True)
    for name in ("s.npy", "o.npy"):
        with pytest.raises(InputError, match=name):
            open_source(tmp_path / name)


@pytest.mark.parametrize("save", [_save_npy, _save_zarr], ids=["npy", "zarr"])
@pytest.mark.parametrize(
    ("shape", "words"), [((0, 5), "without pixels"), ((5,), "at least the axes y and x")]
)
def test_shapes_that_are_no_picture_are_refused(
    tmp_path: Path, save: Save, shape: tuple[int, ...], words: str
) -> None:
    if save is _save_zarr:
        zarr.create_array(tmp_path / "a.zarr", shape=shape, chunks=(1,) * len(shape), dtype="f4")
        path = tmp_path / "a.zarr"
    else:
        path = save(tmp_path, np.zeros(shape, "f4"))
    with pytest.raises(InputError, match=words):
        open_source(path)


@every_format
@pytest.mark.parametrize("start_stop", [((-1, 0), (4, 4)), ((0, 0), (21, 4)), ((3, 3), (2, 4))])
def test_a_region_outside_the_array_is_refused(
    tmp_path: Path, save: Save, start_stop: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    source = open_source(save(tmp_path, _picture((20, 33), "uint8")))
    with pytest.raises(InputError, match="reaches outside"):
        source.read(Region(*start_stop))


@every_format
def test_a_source_pickles_as_its_path(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = _picture((200, 333), "uint16")
    path = save(tmp_path, picture)
    monkeypatch.chdir(tmp_path)
    source = open_source(path.name)
    source.read(Region((0, 0), (9, 9)))
    sent = pickle.dumps(source)
    assert len(sent) < 2000
    monkeypatch.chdir("/")
    again: Source = pickle.loads(sent)
    assert again.fingerprint() == source.fingerprint()
    assert (again.axes, again.chunks, again.scale, again.units) == (
        source.axes,
        source.chunks,
        source.scale,
        source.units,
    )
    assert np.array_equal(again.read(Region((1, 2), (99, 55))), picture[1:99, 2:55])


def test_copies_in_one_process_share_one_open_file(tmp_path: Path) -> None:
    source = open_source(_save_tiled_tiff(tmp_path, _picture((40, 40), "uint16")))
    first, second = pickle.loads(pickle.dumps(source)), pickle.loads(pickle.dumps(source))
    assert first.reader() is second.reader()


def test_a_source_reads_in_another_process(tmp_path: Path) -> None:
    picture = _picture((40, 40), "uint16")
    for save in SAVERS.values():
        (tmp_path / "sent").write_bytes(pickle.dumps(open_source(save(tmp_path, picture))))
        code = (
            "import pickle, sys; from halotile.storage.grid import Region;"
            "s = pickle.load(sys.stdin.buffer); print(int(s.read(Region((3, 4), (30, 31))).sum()))"
        )
        with (tmp_path / "sent").open("rb") as sent:
            shown = subprocess.run(
                [sys.executable, "-W", "error", "-c", code],
                stdin=sent,
                capture_output=True,
                timeout=60,
                check=True,
            )
        assert int(shown.stdout) == picture[3:30, 4:31].sum()
        assert shown.stderr == b""


def test_an_input_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    source = open_source(_save_npy(tmp_path, _picture((40, 40), "uint16")))
    sent = pickle.dumps(source)
    _save_npy(tmp_path, _picture((40, 41), "uint16"))
    with pytest.raises(InputError, match=r"was uint16 of shape \(40, 40\).*now uint16 of shape \(40, 41\)"):
        pickle.loads(sent).read(Region((0, 0), (2, 2)))


@every_format
def test_threads_read_side_by_side(tmp_path: Path, save: Save) -> None:
    picture = _picture((128, 128), "uint16")
    source = pickle.loads(pickle.dumps(open_source(save(tmp_path, picture))))
    regions = [Region((y, x), (y + 40, x + 40)) for y in range(0, 88, 8) for x in range(0, 88, 8)]
    wrong: list[object] = []

    def work(mine: list[Region]) -> None:
        try:
            wrong.extend(r for r in mine if not np.array_equal(source.read(r), picture[r.slices]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(regions[i::6],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong


@every_format
def test_the_fingerprint_is_json_and_tells_a_rewritten_file(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, _picture((20, 33), "uint16"))
    before = open_source(path).fingerprint()
    assert json.loads(json.dumps(before)) == before
    assert before == open_source(path).fingerprint()
    if path.is_dir():
        shutil.rmtree(path)
    save(tmp_path, _picture((20, 33), "uint16") + 1)
    assert open_source(path).fingerprint() != before


def test_a_missing_path_is_answered_with_the_nearest(tmp_path: Path) -> None:
    _save_npy(tmp_path, _picture((4, 4), "uint8"))
    with pytest.raises(InputError, match=r"nothing is there. Did you mean .*a\.npy"):
        open_source(tmp_path / "b.npy")
    with pytest.raises(InputError, match=f"for there is no no in {tmp_path}. Write an existing path"):
        open_source(tmp_path / "no" / "such" / "a.npy")


def test_a_missing_relative_path_is_answered_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=f"scans/a.npy: nothing is there, for there is no scans in {tmp_path}"
    ):
        open_source("scans/a.npy")


def test_a_tilde_stands_for_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = _save_npy(tmp_path, _picture((4, 4), "uint8"))
    assert open_source(f"~/{path.name}").path == str(path)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        np.int64(2),
        slice(1, 3),
        (slice(None, 10), slice(2, None)),
        (..., 0),
        (1, ...),
        (slice(-3, -1), -2),
        (slice(3, 1), 0),
        (),
        ...,
    ],
)
def test_a_source_is_indexed_as_in_numpy(tmp_path: Path, index: Any) -> None:
    pixels = _picture((6, 7), "uint16")
    read = open_source(_save_npy(tmp_path, pixels))[index]
    assert np.shape(read) == np.shape(pixels[index])
    assert np.array_equal(read, pixels[index])


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (6, "index 6 is outside an axis of 6 pixels"),
        ((0, -8), "index -8 is outside an axis of 7 pixels"),
        ((0, 0, 0), "has 3 entries, but the array's shape is"),
        (slice(None, None, 2), "write integers and slices of step 1"),
        ([0, 1], "write integers and slices of step 1"),
        (None, "write integers and slices of step 1"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, index: Any, words: str) -> None:
    source = open_source(_save_npy(tmp_path, _picture((6, 7), "uint16")))
    with pytest.raises(IndexError, match=words):
        source[index]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n....", r"begins with b'\\x89PNG"),
        ("a.tif", b"", "an empty file"),
        ("a.txt", b"hello", "no format here reads. Readable: Zarr.*TIFF"),
    ],
)
def test_a_file_of_no_known_format_is_described(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        open_source(tmp_path / name)


def test_a_directory_that_holds_stores_names_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an empty directory"):
        open_source(tmp_path)
    _save_zarr(tmp_path, _picture((4, 4), "uint8"))
    with pytest.raises(InputError, match=r"inside it: a\.zarr; name one of these"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (_save_npy, {"level": 1}),
        (_save_npy, {"dataset": "a"}),
        (_save_hdf5, {"level": 1}),
        (_save_zarr, {"level": 2}),
        (_save_zarr, {"dataset": "a"}),
        (_save_tiff, {"level": 1}),
        (_save_tiff, {"dataset": "1"}),
        (_save_tiff, {"dataset": "red"}),
        (_save_npy, {"level": -1}),
        (_save_npy, {"axes": "zyx"}),
        (_save_npy, {"axes": "yy"}),
        (_save_npy, {"axes": "y1"}),
        (_save_npy, {"axes": "zx"}),
        (_save_npy, {"axes": ""}),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, save: Save, options: dict[str, str | int]
) -> None:
    path = save(tmp_path, _picture((20, 33), "uint8"))
    with pytest.raises(InputError, match=f"{next(iter(options))}.* is "):
        open_source(path, **options)  # type: ignore[arg-type]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save_hdf5(tmp_path, _picture((4, 4), "uint8"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[hdf5\]"'):
        open_source(path)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[s3\]"'):
        open_source("s3://bucket/a.zarr")


def test_a_plug_in_format_opens_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save_npy(tmp_path, _picture((4, 5), "uint8"))
    other = path.rename(tmp_path / "a.mine")
    mine = types.SimpleNamespace(
        claims=lambda place: place.suffix == ".mine", open=registry.find("formats", "npy").open
    )
    monkeypatch.setattr(registry, "names", lambda kind: ["mine"])
    monkeypatch.setattr(registry, "find", lambda kind, name: mine)
    assert open_source(other).shape == (4, 5)


def test_a_system_error_is_not_called_damage(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(open_source(_save_npy(tmp_path, _picture((4, 5), "uint8")))))
    (tmp_path / "a.npy").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        source.read(Region((0, 0), (2, 2)))
    assert not isinstance(caught.value, DamagedData)


def test_importing_the_module_loads_no_format_package() -> None:
    code = (
        "import sys, halotile.storage.arrays;"
        "print([m for m in ('zarr', 'tifffile', 'h5py', 'numcodecs', 'obstore') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]"
