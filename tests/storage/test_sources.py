"""Sources: every format reads as NumPy slices, in threads and processes, and notices changes; whatever a file holds is read correctly or refused with advice."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

from halotile.errors import InputError, InputUnreadable, MissingPackage
from halotile.storage.arrays import Source, open_source
from halotile.storage.axes import choose_axes, letters, remarks_on_axes
from halotile.storage.formats.base import DTYPES
from halotile.storage.grid import Region
from tests.cases import all_of, in_folders
from tests.storage.fuzzing import FORMATS, IMAGES, ODD_HDF5, edited_hdf5, is_json

Image = NDArray[Any]
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


SAVERS: list[Save] = [save_npy, save_hdf5, save_zarr, save_ome, save_tiff, save_tiled_tiff]
every_format = pytest.mark.parametrize("save", SAVERS)


def make_image(shape: tuple[int, ...], dtype: str) -> Image:
    return (np.random.default_rng(3).random(shape) * 120).astype(dtype)


@every_format
def test_a_region_reads_as_numpy_would_slice_it(tmp_path: Path, save: Save) -> None:
    rows: list[Any] = [((37, 45), dtype, "yx") for dtype in (*DTYPES, ">f4")]
    rows += [((2, 2, 3, 20, 33)[-n:], "uint16", axes) for n, axes in ((3, "tyx"), (4, "tcyx"), (5, "tczyx"))]
    for folder, (shape, dtype, axes) in in_folders(tmp_path, rows):
        image = make_image(shape, dtype)
        path = save(folder, image)
        source, native = open_source(path), image.dtype.newbyteorder("=")
        assert (source.shape, source.dtype, source.axes[-2:]) == (shape, native, ("y", "x"))
        assert len(set(source.axes)) == len(shape)
        region = Region((*(1 for _ in shape[:-2]), 5, 11), (*shape[:-2], 19, 30))
        pixels = source.read(region)
        assert (pixels.dtype, pixels.flags.c_contiguous, pixels.flags.writeable) == (native, True, True)
        assert np.array_equal(pixels, image[region.slices])
        assert np.array_equal(source.read(Region.whole(shape)), image)
        assert open_source(path, axes=axes.upper()).axes == tuple(axes)
        if axes == "yx":
            for start_stop in (((-1, 0), (4, 4)), ((0, 0), (38, 4)), ((3, 3), (2, 4))):
                with pytest.raises(InputError, match="reaches outside"):
                    source.read(Region(*start_stop))


@every_format
def test_copies_of_a_source_read_in_parallel(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image((200, 333), "uint16")
    path = save(tmp_path, image)
    monkeypatch.chdir(tmp_path)
    source = open_source(path.name)
    source.read(Region((0, 0), (9, 9)))
    sent = pickle.dumps(source)
    assert len(sent) < 2000
    monkeypatch.chdir("/")
    again: Source = pickle.loads(sent)
    assert again.fingerprint() == source.fingerprint()
    for name in ("axes", "chunks", "scale", "units"):
        assert getattr(again, name) == getattr(source, name)
    regions = [Region((y, x), (y + 40, x + 40)) for y in range(0, 88, 8) for x in range(0, 88, 8)]
    with ThreadPoolExecutor(6) as threads:
        for region, pixels in zip(regions, threads.map(again.read, regions, timeout=60), strict=True):
            assert np.array_equal(pixels, image[region.slices])
    if save is save_tiled_tiff:
        first, second = pickle.loads(sent), pickle.loads(sent)
        assert first.reader() is second.reader()


def read_elsewhere(sources: Sequence[Source]) -> list[str]:
    """Sums of a part of each source by another process, and whether it has loaded zarr."""
    code = (
        "import pickle, sys; from halotile.storage.grid import Region; found = pickle.load(sys.stdin.buffer);"
        "print(*(int(s.read(Region((3, 4), (30, 31))).sum()) for s in found), 'zarr' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    shown = subprocess.run(command, input=pickle.dumps(sources), capture_output=True, timeout=60, check=True)
    assert shown.stderr == b""
    return shown.stdout.decode().split()


def test_sources_read_in_another_process_and_a_local_zarr_without_its_library(tmp_path: Path) -> None:
    image = make_image((40, 40), "uint16")
    total = str(image[3:30, 4:31].sum())
    sources = {save: open_source(save(tmp_path, image)) for save in SAVERS}
    assert read_elsewhere([sources[save_zarr], sources[save_ome]]) == [total, total, "False"]
    for document in ("a.zarr/zarr.json", "a.ome.zarr/0/zarr.json"):
        (tmp_path / document).touch()  # opened anew, then
    assert read_elsewhere([*sources.values()]) == [total] * len(SAVERS) + ["True"]


@pytest.mark.parametrize("save", [save_npy, save_zarr, save_ome])
def test_an_input_that_changed_since_it_was_opened_is_refused(tmp_path: Path, save: Save) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    path = save(tmp_path / "old", make_image((40, 40), "uint16"))
    sent = pickle.dumps(open_source(path))
    os.replace(path, tmp_path / "away")
    os.replace(save(tmp_path / "new", make_image((40, 41), "uint16")), path)
    with pytest.raises(InputError, match=r"was uint16 of shape \(40, 40\).*now uint16 of shape \(40, 41\)"):
        pickle.loads(sent).read(Region((0, 0), (2, 2)))


@every_format
def test_a_rewritten_file_is_noticed(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, make_image((20, 33), "uint16"))
    source = open_source(path)
    before = source.fingerprint()
    assert json.loads(json.dumps(before)) == before == open_source(path).fingerprint()
    assert source.change() == ""
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
        for place in ("pathlib.Path.open", "zarr.open", "h5py.File", "tifffile.TiffFile"):
            patch.setattr(place, fail)
        with pytest.raises(InputUnreadable, match=r"\.\S+: .*Permission denied.*network or permissions"):
            source.change()
    shutil.move(path, tmp_path / "elsewhere")
    assert source.change() == "was moved, removed or damaged"
    save(tmp_path, make_image((20, 33), "uint16") + 1)
    assert open_source(path).fingerprint() != before
    assert source.change() == "was written to"


def test_a_source_is_indexed_as_in_numpy(tmp_path: Path) -> None:
    pixels = make_image((6, 7), "uint16")
    source = open_source(save_npy(tmp_path, pixels))
    numbers: list[Any] = [0, -1, np.int64(2), slice(1, 3), (), ..., (..., 0), (1, ...)]
    for index in [*numbers, (slice(None, 10), slice(2, None)), (slice(-3, -1), -2), (slice(3, 1), 0)]:
        assert np.shape(source[index]) == np.shape(pixels[index]), index
        assert np.array_equal(source[index], pixels[index]), index
    for index, words in [
        (6, "index 6 is outside an axis of 6 pixels"),
        ((0, -8), "index -8 is outside an axis of 7 pixels"),
        ((0, 0, 0), "has 3 entries, but the array's shape is"),
        *((each, "write integers and slices of step 1") for each in (slice(None, None, 2), [0, 1], None)),
    ]:
        with pytest.raises(IndexError, match=words):
            source[index]


def test_a_system_error_is_no_damage_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_npy(tmp_path, make_image((4, 5), "uint8"))
    source, sent = open_source(path), pickle.dumps(open_source(path))
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    rows = {"NpyReader.read": "the pixels", "NpyReader.__init__": "it cannot be opened:"}
    for place, said in (rows | {"claims": "its format cannot be determined:"}).items():
        monkeypatch.setattr(f"halotile.storage.formats.npy.{place}", fail)
        with pytest.raises(InputUnreadable, match=rf"a\.npy: {said} .* Input/output error"):
            source.read(Region((0, 0), (2, 2))) if place.endswith("read") else open_source(path)
    monkeypatch.setattr("halotile.storage.formats.npy.NpyReader.read", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        source.read(Region((0, 0), (2, 2)))
    monkeypatch.undo()
    path.unlink()
    with pytest.raises(InputUnreadable, match=r"a\.npy: it cannot be opened: .*No such file or directory"):
        pickle.loads(sent).read(Region((0, 0), (2, 2)))


def test_pixels_that_are_no_image_are_refused(tmp_path: Path) -> None:
    pixels = (np.arange(660).reshape(20, 33) * (1 + 2j)).astype("complex64")
    for folder, save in in_folders(tmp_path, SAVERS):
        path = save(folder, pixels)
        with pytest.raises(InputError, match=rf"{path.name}.*complex64.*real and imaginary"):
            open_source(path)
        np.testing.assert_array_equal(open_source(path, complex_pixels=True)[:], pixels)
    for image, words in [
        *((np.zeros((4, 5), dtype), "cannot be used") for dtype in ("int64", "uint64", "U3", "S4", "datetime64[s]")),
        (np.zeros((4, 5), [("a", "f4")]), r"a\.npy"),
        (np.full((4, 5), None), r"a\.npy"),
        (np.zeros((0, 5), "f4"), "an axis has length 0"),
        (np.zeros(5, "f4"), "at least the axes y and x"),
    ]:
        with pytest.raises(InputError, match=words):
            open_source(save_npy(tmp_path, image))
        if image.ndim == 1 or not image.size:
            options: Any = {"shape": image.shape, "chunks": (1,) * image.ndim, "dtype": "f4"}
            zarr.create_array(tmp_path / "a.zarr", overwrite=True, **options)
            with pytest.raises(InputError, match=words):
                open_source(tmp_path / "a.zarr")


def test_a_path_without_an_image_is_refused_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="an empty directory"):
        open_source(tmp_path)
    save_npy(tmp_path, make_image((4, 4), "uint8"))
    save_zarr(tmp_path, make_image((4, 4), "uint8"))
    for name, target in {"link.npy": "gone.npy", "scans": "loop", "loop": "scans"}.items():
        (tmp_path / name).symlink_to(target)
    for name, content in {"a.gif": b"GIF89a\1\0\1\0", "a.tif": b"", "a.txt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
    gone = r"link\.npy is a link to gone\.npy, where nothing is"
    rows: dict[str | Path, str] = {
        tmp_path / "b.npy": r"nothing is there. Did you mean .*a\.npy",
        tmp_path / "no" / "such" / "a.npy": f"for there is no no in {tmp_path}. Write an existing path",
        "new/a.npy": f"new/a.npy: nothing is there, for there is no new in {tmp_path}",
        tmp_path / "link.npy": f"nothing is there, for {tmp_path}/{gone}",
        tmp_path / "scans" / "new" / "a.npy": "for .*/scans is a link to loop, where nothing is. Repair it",
        "a.gif": r"begins with 'GIF89a",
        "a.tif": "an empty file",
        "a.txt": "no format here reads. Readable: Zarr.*TIFF",
        tmp_path: r"inside it: a\.zarr; name one of these",
    }
    for path, said in rows.items():
        with pytest.raises(InputError, match=said):
            open_source(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_source("~/a.npy").path == str(tmp_path / "a.npy"), "a tilde stands for the home directory"


REFUSED: dict[Save, dict[str, list[Any]]] = {
    save_npy: {"level": [1, -1], "dataset": ["a"], "axes": ["zyx", "yy", "y1", "zx", ""]},
    save_hdf5: {"level": [1]},
    save_zarr: {"level": [2], "dataset": ["a"]},
    save_tiff: {"level": [1], "dataset": ["1", "red"]},
}


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for folder, save in in_folders(tmp_path, REFUSED):
        path = save(folder, make_image((20, 33), "uint8"))
        for name, values in REFUSED[save].items():
            for value in values:
                options: dict[str, Any] = {name: value}
                with pytest.raises(InputError, match=f"{name}.* is "):
                    open_source(path, **options)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_hdf5(tmp_path, make_image((4, 4), "uint8"))
    for form in ("png", "jpeg"):
        IMAGES[form][0](tmp_path)
    images = [("imagecodecs", "rgb.png"), ("imagecodecs", "rgb.jpg"), ("PIL.JpegImagePlugin", "rgb.jpg")]
    rows: list[tuple[str, str, Any]] = [("h5py", "hdf5", path), ("obstore.store", "s3", "s3://bucket/a.zarr")]
    for module, extra, asked in rows + [(module, "images", tmp_path / name) for module, name in images]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(MissingPackage, match=rf'pip install "halotile\[{extra}\]"'):
                open_source(asked)


DEFAULTS = [
    ((9, 9), "yx"), ((9, 3), "yx"), ((9, 9, 9), "qyx"), ((30, 30, 3), "yxc"), ((64, 64, 16), "yxc"),
    ((64, 64, 17), "qyx"), ((100, 40, 16), "qyx"),
    ((2, 9, 9, 9), "pqyx"), ((2, 30, 30, 3), "qyxc"), ((5, 2, 9, 9, 9), "opqyx"),
]  # fmt: skip
ASSUMED: list[tuple[str, tuple[int, ...], Sequence[str | None], list[str]]] = [
        ("qyx", (8, 9, 9), (), ["what axis q is: each of 8 planes is by itself. If they are a volume, write input.axes: zyx"]),
        ("qzyx", (8, 9, 9, 9), "qzyx", ["each of 8 planes is by itself. If they are a volume, write input.axes: one letter for each"]),
        ("pqyx", (2, 8, 9, 9), (), ["what axes pq are: each of 16 planes is by itself. If they are a volume, write input.axes: pzyx"]),
        ("qyx", (8, 9, 9), ("station", "lat", "lon"), ["what axis q (station) is: each of 8 planes is by itself."]),
        ("qyx", (8, 9, 9), ("run", "row", "col"), ["names the axes run, row, col: taken as qyx. If not, write", "what axis q is"]),
        ("tyx", (8, 9, 9), ("time", "row", "col"), ["names the axes time, row, col: taken as tyx. If not, write"]),
        ("yx", (9, 9), ("z", "y", "x"), ["names the axes z, y, x for an array of 2: taken as yx"]),
        ("tyx", (8, 9, 9), ("time", "latitude", "longitude"), []),
        ("yxc", (90, 90, 3), (), ["does not name its axes: taken as yxc. If not, write input.axes"]),
        ("yxc", (90, 90, 3), "yxc", []),
        ("yx", (90, 90), (None, ""), []),
        ("tczyx", (1, 2, 3, 4, 5), "tczyx", []),
]  # fmt: skip
NAMED: list[tuple[list[str | None], str]] = [
    (["t", "C", "y", "x"], "tcyx"), (["time", "channel", "Y", "X"], "tcyx"), (["q", "q", "y", "x"], "qayx"),
    ([None, "y", "x"], "qyx"), (["sample id", "a", "y", "x"], "qayx"), (["c", "channel", "y", "x"], "cqyx"),
    (["Time", "LAT", "lon"], "tyx"), (["longitude", "latitude"], "xy"), (["lat", "y", "x"], "qyx"),
]  # fmt: skip


def test_axes_are_defaults_or_distinct_letters_of_names_and_what_is_assumed_is_said() -> None:
    assert [(shape, "".join(choose_axes(None, None, shape))) for shape, _ in DEFAULTS] == DEFAULTS
    for axes, shape, named, words in ASSUMED:
        assert choose_axes(None, named, shape) == tuple(axes)
        remarks = remarks_on_axes(axes, shape, named)
        assert all(word in remark for word, remark in zip(words, remarks, strict=True)), (axes, named)
    for names, expected in NAMED:
        assert letters(names) == tuple(expected), names
    for others in (["row", "column"], ["lat", "x"], ["y", "y"], [None, None], ["z", "x"]):
        assert letters(others) is None
        assert choose_axes(None, others, (4, 4)) == ("y", "x")


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {"czi"}))
def test_a_file_reads_with_the_bits_of_its_library_and_is_refused_where_truncated(tmp_path: Path, name: str) -> None:
    write, read = IMAGES[name]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    for root in sorted((tmp_path / "whole").iterdir()):
        expected, opened = read(root), open_source(root)
        for source in (opened, pickle.loads(pickle.dumps(opened))):
            pixels = source.read(Region.whole(source.shape))
            if pixels.shape == expected.shape:  # a palette is read as what it shows
                assert pixels.tobytes() == expected.astype(pixels.dtype).tobytes()
            assert pixels[1:, 2:].tobytes() == source[1:, 2:].tobytes()
        for keep in (0.0, 0.02, 0.3, 0.6, 0.9):
            (tmp_path / str(keep)).mkdir(exist_ok=True)
            short = tmp_path / str(keep) / root.name
            (shutil.copytree if root.is_dir() else shutil.copy)(root, short)
            files = [file for file in short.rglob("*") if file.is_file() and not is_json(file)]
            largest = max(files or [short], key=lambda file: file.stat().st_size)
            os.truncate(largest, int(keep * largest.stat().st_size))
            with pytest.raises(InputError, match=root.name):
                open_source(short)[...]


@pytest.mark.parametrize("name", all_of(FORMATS, thorough=FORMATS.keys() - {"zarr-v3"}))
def test_a_randomly_changed_file_is_read_correctly_or_refused(tmp_path: Path, name: str) -> None:
    if name == "czi":
        for package in ("bioio_czi", "pylibCZIrw"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'halotile[bioio]'")
    last = tmp_path / "last"
    command = [sys.executable, "-m", "tests.storage.fuzzing", name, str(1_000), str(last)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, f"{child.stderr}\nThe last file that was tried: {last.read_text()}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cxi", "ptyd", "result"])
def test_an_odd_value_in_a_scan_or_a_result_is_read_or_refused(tmp_path: Path, name: str) -> None:
    write, attempt = FORMATS[name]
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for number, odd in enumerate(ODD_HDF5):
        path.write_bytes(edited_hdf5(content, 5 * number + 3, odd))
        attempt(path)
