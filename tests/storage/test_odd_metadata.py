"""Metadata of an output that cannot be read: what stands there, or what the system says, is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from halotile.errors import InputError, InputUnreadable, OutputRefused
from halotile.storage.output import open_output
from halotile.storage.ownership import metadata_problems, restore_metadata
from tests.storage.outputs import PLAIN, written


def test_a_directory_in_place_of_metadata_is_told_as_that(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", PLAIN)
    (tmp_path / "a.zarr" / "zarr.json").unlink()
    (tmp_path / "a.zarr" / "zarr.json").mkdir()
    with pytest.raises(InputError, match=r"zarr\.json: it cannot be read: .*[Ii]s a directory"):
        open_output(tmp_path / "a.zarr")
    with pytest.raises(OutputRefused, match=r"zarr\.json is a directory, where the run wrote a file\. Move"):
        restore_metadata(tmp_path / "a.zarr", PLAIN)


def test_metadata_that_the_system_does_not_give_are_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a.zarr", PLAIN)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for ask in (open_output, lambda root: metadata_problems(root, PLAIN)):
        with pytest.raises(InputUnreadable, match=r"zarr\.json: it cannot be read: .*Input/output error"):
            ask(tmp_path / "a.zarr")
