"""A path is opened as a source, or refused with a reason and advice; its axes are requested, named by the file, or default."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile import registry
from halotile.errors import InputError, MissingPackage
from halotile.storage.arrays import open_source
from halotile.storage.axes import choose_axes, letters, remarks_on_axes
from tests.cases import in_folders
from tests.storage.saving import Save, every_format, make_image, save_hdf5, save_npy, save_tiff, save_zarr


@every_format
def test_complex_pixels_are_refused(tmp_path: Path, save: Save) -> None:
    pixels = (np.arange(660).reshape(20, 33) * (1 + 2j)).astype("complex64")
    path = save(tmp_path, pixels)
    with pytest.raises(InputError, match=rf"{path.name}.*complex64.*real and imaginary"):
        open_source(path)
    np.testing.assert_array_equal(open_source(path, complex_pixels=True)[:], pixels)


def test_types_that_are_no_image_are_refused(tmp_path: Path) -> None:
    for dtype in ("int64", "uint64", "U3", "S4", "datetime64[s]"):
        with pytest.raises(InputError, match="cannot be used"):
            open_source(save_npy(tmp_path, np.zeros((4, 5), dtype)))
    np.save(tmp_path / "s.npy", np.zeros((4, 5), [("a", "f4")]))
    np.save(tmp_path / "o.npy", np.full((4, 5), None), allow_pickle=True)
    for name in ("s.npy", "o.npy"):
        with pytest.raises(InputError, match=name):
            open_source(tmp_path / name)


def test_shapes_that_are_no_image_are_refused(tmp_path: Path) -> None:
    for shape, words in {(0, 5): "an axis has length 0", (5,): "at least the axes y and x"}.items():
        folder = tmp_path / f"{len(shape)}.zarr"
        zarr.create_array(folder, shape=shape, chunks=(1,) * len(shape), dtype="f4")
        for path in (save_npy(tmp_path, np.zeros(shape, "f4")), folder):
            with pytest.raises(InputError, match=words):
                open_source(path)


def test_a_missing_path_is_refused_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_npy(tmp_path, make_image((4, 4), "uint8"))
    (tmp_path / "link.npy").symlink_to("gone.npy")
    (tmp_path / "scans").symlink_to("loop")
    (tmp_path / "loop").symlink_to("scans")
    gone = r"link\.npy is a link to gone\.npy, where nothing is"
    rows: dict[str | Path, str] = {
        tmp_path / "b.npy": r"nothing is there. Did you mean .*a\.npy",
        tmp_path / "no" / "such" / "a.npy": f"for there is no no in {tmp_path}. Write an existing path",
        "new/a.npy": f"new/a.npy: nothing is there, for there is no new in {tmp_path}",
        tmp_path / "link.npy": f"nothing is there, for {tmp_path}/{gone}",
        tmp_path / "scans" / "new" / "a.npy": "for .*/scans is a link to loop, where nothing is. Repair it",
    }
    for path, said in rows.items():
        with pytest.raises(InputError, match=said):
            open_source(path)


def test_a_tilde_stands_for_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = save_npy(tmp_path, make_image((4, 4), "uint8"))
    assert open_source(f"~/{path.name}").path == str(path)


def test_a_file_of_no_known_format_is_described(tmp_path: Path) -> None:
    for name, content, words in (
        ("a.gif", b"GIF89a\1\0\1\0", r"begins with b'GIF89a"),
        ("a.tif", b"", "an empty file"),
        ("a.txt", b"hello", "no format here reads. Readable: Zarr.*TIFF"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=words):
            open_source(tmp_path / name)


def test_a_directory_that_holds_stores_names_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an empty directory"):
        open_source(tmp_path)
    save_zarr(tmp_path, make_image((4, 4), "uint8"))
    with pytest.raises(InputError, match=r"inside it: a\.zarr; name one of these"):
        open_source(tmp_path)


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
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[hdf5\]"'):
        open_source(path)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[s3\]"'):
        open_source("s3://bucket/a.zarr")


def test_a_plug_in_format_opens_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_npy(tmp_path, make_image((4, 5), "uint8"))
    other = path.rename(tmp_path / "a.mine")
    mine = types.SimpleNamespace(
        claims=lambda place: place.suffix == ".mine", open=registry.find("formats", "npy").open
    )
    monkeypatch.setattr(registry, "names", lambda kind: ["mine"])
    monkeypatch.setattr(registry, "find", lambda kind, name: mine)
    assert open_source(other).shape == (4, 5)


DEFAULTS = [
    ((9, 9), "yx"), ((9, 3), "yx"), ((9, 9, 9), "qyx"), ((30, 30, 3), "yxc"), ((64, 64, 16), "yxc"),
    ((64, 64, 17), "qyx"), ((100, 40, 16), "qyx"),
    ((2, 9, 9, 9), "pqyx"), ((2, 30, 30, 3), "qyxc"), ((5, 2, 9, 9, 9), "opqyx"),
]  # fmt: skip


def test_defaults() -> None:
    assert [(shape, "".join(choose_axes(None, None, shape))) for shape, _ in DEFAULTS] == DEFAULTS


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


def test_what_is_assumed_is_said() -> None:
    for axes, shape, named, words in ASSUMED:
        assert choose_axes(None, named, shape) == tuple(axes)
        remarks = remarks_on_axes(axes, shape, named)
        assert all(word in remark for word, remark in zip(words, remarks, strict=True)), (axes, named)


NAMED: list[tuple[list[str | None], str]] = [
    (["t", "C", "y", "x"], "tcyx"), (["time", "channel", "Y", "X"], "tcyx"), (["q", "q", "y", "x"], "qayx"),
    ([None, "y", "x"], "qyx"), (["sample id", "a", "y", "x"], "qayx"), (["c", "channel", "y", "x"], "cqyx"),
    (["Time", "LAT", "lon"], "tyx"), (["longitude", "latitude"], "xy"), (["lat", "y", "x"], "qyx"),
]  # fmt: skip


def test_names_become_distinct_letters_or_are_left_to_the_defaults_without_y_and_x() -> None:
    for named, axes in NAMED:
        assert letters(named) == tuple(axes), named
    for others in (["row", "column"], ["lat", "x"], ["y", "y"], [None, None], ["z", "x"]):
        assert letters(others) is None
        assert choose_axes(None, others, (4, 4)) == ("y", "x")
