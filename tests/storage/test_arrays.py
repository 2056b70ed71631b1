"""Sources: reads agree with NumPy slices in threads and processes, and changed files are detected."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from halotile.errors import InputError, InputUnreadable
from halotile.storage.arrays import Source, open_source
from halotile.storage.formats.base import DTYPES
from halotile.storage.grid import Region
from halotile.storage.views import Remembered
from tests.cases import in_folders
from tests.storage.saving import (
    SAVERS,
    Save,
    every_format,
    make_image,
    save_npy,
    save_ome,
    save_tiff,
    save_tiled_tiff,
    save_zarr,
)


@every_format
def test_a_region_reads_as_numpy_would_slice_it(tmp_path: Path, save: Save) -> None:
    for dtype in DTYPES:
        (tmp_path / dtype).mkdir()
        image = make_image((37, 45), dtype)
        source = open_source(save(tmp_path / dtype, image))
        pixels = source.read(Region((5, 11), (30, 45)))
        assert (source.shape, source.dtype, source.axes) == (image.shape, image.dtype, ("y", "x"))
        assert pixels.dtype == image.dtype
        assert pixels.flags.c_contiguous
        assert pixels.flags.writeable
        assert np.array_equal(pixels, image[5:30, 11:45])
        assert np.array_equal(source.read(Region.whole(source.shape)), image)
    for start_stop in (((-1, 0), (4, 4)), ((0, 0), (38, 4)), ((3, 3), (2, 4))):
        with pytest.raises(InputError, match="reaches outside"):
            source.read(Region(*start_stop))


@every_format
def test_leading_axes_are_read_too_and_called_as_requested(tmp_path: Path, save: Save) -> None:
    for shape, axes in {(3, 20, 33): "tyx", (2, 3, 20, 33): "tcyx", (2, 2, 3, 20, 33): "tczyx"}.items():
        (tmp_path / axes).mkdir()
        image = make_image(shape, "uint16")
        path = save(tmp_path / axes, image)
        source = open_source(path)
        region = Region((*(1 for _ in shape[:-2]), 3, 4), (*shape[:-2], 19, 30))
        assert source.axes[-2:] == ("y", "x")
        assert len(set(source.axes)) == len(shape)
        assert np.array_equal(source.read(region), image[region.slices])
        assert open_source(path, axes=axes.upper()).axes == tuple(axes)


@every_format
def test_big_endian_pixels_come_out_native(tmp_path: Path, save: Save) -> None:
    image = make_image((20, 33), "float32")
    if save is save_tiff:
        tifffile.imwrite(tmp_path / "a.tif", image, byteorder=">")
        path = tmp_path / "a.tif"
    else:
        path = save(tmp_path, image.astype(">f4"))
    source = open_source(path)
    assert source.dtype.isnative
    assert source.read(Region((1, 1), (5, 5))).dtype.isnative
    assert np.array_equal(source.read(Region.whole(source.shape)), image)


@every_format
def test_a_source_pickles_as_its_path(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert np.array_equal(again.read(Region((1, 2), (99, 55))), image[1:99, 2:55])


def test_copies_in_one_process_share_one_open_file(tmp_path: Path) -> None:
    source = open_source(save_tiled_tiff(tmp_path, make_image((40, 40), "uint16")))
    first, second = pickle.loads(pickle.dumps(source)), pickle.loads(pickle.dumps(source))
    assert first.reader() is second.reader()


def test_sources_read_in_another_process(tmp_path: Path) -> None:
    image = make_image((40, 40), "uint16")
    sent = pickle.dumps([open_source(save(tmp_path, image)) for save in SAVERS.values()])
    code = (
        "import pickle, sys; from halotile.storage.grid import Region;"
        "print(*(int(s.read(Region((3, 4), (30, 31))).sum()) for s in pickle.load(sys.stdin.buffer)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    shown = subprocess.run(command, input=sent, capture_output=True, timeout=60, check=True)
    assert [*map(int, shown.stdout.split())] == [image[3:30, 4:31].sum()] * len(SAVERS)
    assert shown.stderr == b""


def test_an_input_that_changed_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    for folder, save in in_folders(tmp_path, (save_npy, save_zarr, save_ome)):
        for name in ("old", "new"):
            (folder / name).mkdir()
        path = save(folder / "old", make_image((40, 40), "uint16"))
        sent = pickle.dumps(open_source(path))
        os.replace(path, folder / "away")
        os.replace(save(folder / "new", make_image((40, 41), "uint16")), path)
        changed = r"was uint16 of shape \(40, 40\).*now uint16 of shape \(40, 41\)"
        with pytest.raises(InputError, match=changed):
            pickle.loads(sent).read(Region((0, 0), (2, 2)))


def test_a_local_zarr_is_read_elsewhere_without_its_library(tmp_path: Path) -> None:
    rows: list[tuple[Save, str]] = [(save_zarr, "zarr.json"), (save_ome, "0/zarr.json")]
    for folder, (save, document) in in_folders(tmp_path, rows):
        image = make_image((40, 40), "uint16")
        path = save(folder, image)
        sent = pickle.dumps(open_source(path))
        code = (
            "import pickle, sys; from halotile.storage.grid import Region;"
            "s = pickle.load(sys.stdin.buffer); print(int(s.read(Region((3, 4), (30, 31))).sum()), 'zarr' in sys.modules)"
        )
        for loaded in (False, True):
            shown = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
            assert shown.stdout.split() == [b"%d" % image[3:30, 4:31].sum(), str(loaded).encode()]
            (path / document).touch()  # opened anew, then


@every_format
def test_threads_read_in_parallel(tmp_path: Path, save: Save) -> None:
    image = make_image((128, 128), "uint16")
    source = pickle.loads(pickle.dumps(open_source(save(tmp_path, image))))
    regions = [Region((y, x), (y + 40, x + 40)) for y in range(0, 88, 8) for x in range(0, 88, 8)]
    with ThreadPoolExecutor(6) as threads:
        for region, pixels in zip(regions, threads.map(source.read, regions, timeout=60), strict=True):
            assert np.array_equal(pixels, image[region.slices])


@every_format
def test_the_fingerprint_is_json_and_detects_a_rewritten_file(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, make_image((20, 33), "uint16"))
    source = open_source(path)
    before = source.fingerprint()
    assert json.loads(json.dumps(before)) == before
    assert before == open_source(path).fingerprint()
    assert source.change() == ""
    shutil.move(path, tmp_path / "elsewhere")
    assert source.change() == "was moved, removed or damaged"
    save(tmp_path, make_image((20, 33), "uint16") + 1)
    assert open_source(path).fingerprint() != before
    assert source.change() == "was written to"


def test_a_source_is_indexed_as_in_numpy(tmp_path: Path) -> None:
    pixels = make_image((6, 7), "uint16")
    source = open_source(save_npy(tmp_path, pixels))
    numbers: list[Any] = [0, -1, np.int64(2), slice(1, 3), (), ..., (..., 0), (1, ...)]
    pairs = [(slice(None, 10), slice(2, None)), (slice(-3, -1), -2), (slice(3, 1), 0)]
    for index in numbers + pairs:
        assert np.shape(source[index]) == np.shape(pixels[index]), index
        assert np.array_equal(source[index], pixels[index]), index
    refused: list[tuple[Any, str]] = [
        (6, "index 6 is outside an axis of 6 pixels"),
        ((0, -8), "index -8 is outside an axis of 7 pixels"),
        ((0, 0, 0), "has 3 entries, but the array's shape is"),
        *((each, "write integers and slices of step 1") for each in (slice(None, None, 2), [0, 1], None)),
    ]
    for index, words in refused:
        with pytest.raises(IndexError, match=words):
            source[index]


def test_a_system_error_is_not_called_damage(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(open_source(save_npy(tmp_path, make_image((4, 5), "uint8")))))
    (tmp_path / "a.npy").unlink()
    with pytest.raises(InputUnreadable, match=r"a\.npy: it cannot be opened: .*No such file or directory"):
        source.read(Region((0, 0), (2, 2)))


def test_a_failing_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_npy(tmp_path, make_image((4, 5), "uint8"))
    source = open_source(path)
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    for place, said in {
        "NpyReader.read": "the pixels .*",
        "NpyReader.__init__": "it cannot be opened: .*",
        "claims": "its format cannot be determined: .*",
    }.items():
        monkeypatch.setattr(f"halotile.storage.formats.npy.{place}", fail)
        with pytest.raises(InputUnreadable, match=rf"a\.npy: {said} Input/output error"):
            source.read(Region((0, 0), (2, 2))) if place.endswith("read") else open_source(path)
    monkeypatch.setattr("halotile.storage.formats.npy.NpyReader.read", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        source.read(Region((0, 0), (2, 2)))


@every_format
def test_only_a_file_that_is_gone_can_no_longer_be_opened(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(save(tmp_path, make_image((20, 33), "uint16")))
    fail = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    for place in ("pathlib.Path.open", "zarr.open", "h5py.File", "tifffile.TiffFile"):
        monkeypatch.setattr(place, fail)
    with pytest.raises(InputUnreadable, match=r"\.\S+: .*Permission denied.*network or permissions"):
        source.change()


class Counted:
    """An array of 100 x 100 numbers in chunks of 50, and the regions that were read of it."""

    shape, dtype, chunks = (100, 100), np.dtype(np.int64), (50, 50)
    pixels = np.arange(100 * 100).reshape(100, 100)

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def read(self, region: Region) -> NDArray[Any]:
        self.regions.append(region)
        return self.pixels[region.slices]


def test_chunks_that_several_samples_need_are_decoded_twice_at_most() -> None:
    source = Counted()
    view = Remembered(source)
    places = [Region((y, x), (y + 8, x + 9)) for y in (3, 20, 40) for x in (0, 11, 30, 45, 80)]
    for region in places:
        np.testing.assert_array_equal(view.read(region), Counted.pixels[region.slices])
    assert len(source.regions) == 2 * 3  # the same chunk, two of them, and the other one
    assert pickle.loads(pickle.dumps(view)).__class__ is Counted
    view.read(places[0])[...] = 0
    np.testing.assert_array_equal(view.read(places[0]), Counted.pixels[places[0].slices])
