"""Unreadable metadata of an output are reported with the reason."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import zarr

from halotile.errors import DamagedData, InputError, InputUnreadable, OutputRefused
from halotile.storage.arrays import open_source
from halotile.storage.sharded.output import Layout, open_output
from halotile.storage.sharded.ownership import metadata_problems, restore_metadata
from tests.storage.outputs import OME, PLAIN, written


@pytest.mark.parametrize("layout", [PLAIN, OME], ids=["plain", "OME"])
def test_a_directory_in_place_of_metadata_is_damage(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "a.zarr"
    written(path, layout)
    (path / "zarr.json").unlink()
    (path / "zarr.json").mkdir()
    with pytest.raises(
        DamagedData, match=r"zarr\.json: it cannot be read: .*Is a directory.* restore this file"
    ):
        open_output(path)
    with pytest.raises(DamagedData, match=r"a\.zarr: .*Is a directory.* restore this file"):
        open_source(path)
    with pytest.raises(OutputRefused, match=r"zarr\.json is a directory, where the run wrote a file\. Move"):
        restore_metadata(path, layout)


def test_metadata_that_the_system_cannot_read_are_reported_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a.zarr", PLAIN)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for ask in (open_output, lambda root: metadata_problems(root, PLAIN)):
        with pytest.raises(InputUnreadable, match=r"zarr\.json: it cannot be read: .*Input/output error"):
            ask(tmp_path / "a.zarr")


def test_a_file_in_place_of_the_folder_of_an_array_is_no_zarr(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", OME)
    shutil.rmtree(tmp_path / "a.zarr" / "0")
    (tmp_path / "a.zarr" / "0").touch()
    with pytest.raises(InputError, match=r"0/zarr\.json is not there"):
        open_output(tmp_path / "a.zarr")


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62, 2**62)])
def test_more_pixels_than_any_disk_holds_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=shape, chunks=(2**20, 2**20), dtype="f4")
    with pytest.raises(InputError, match="no disk holds so many pixels"):
        open_source(tmp_path / "a.zarr")
