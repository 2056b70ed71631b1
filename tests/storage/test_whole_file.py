"""Outputs that are one file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from halotile.errors import OutputRefused
from halotile.storage.grid import Region
from halotile.storage.sharded.output import (
    FOREIGN_FILE,
    UNREADABLE,
    FileLayout,
    check_block,
    create_output,
    layout_from_json,
)
from halotile.storage.sharded.ownership import (
    added_levels,
    find_foreign_entry,
    foreign_pixels_reason,
    metadata_problems,
    remove_added_levels,
    restore_metadata,
)

LAYOUT, ALL = FileLayout(1000), Region((0,), (1,))


def test_it_is_empty_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    create_output(path, LAYOUT)
    assert path.read_bytes() == b""
    assert check_block(path, LAYOUT, ALL) == [f"{path}: the file is empty"]
    size, digest = LAYOUT.write(path, b"weights")
    assert (size, path.read_bytes()) == (7, b"weights")
    assert check_block(path, LAYOUT, ALL, digest) == []


def test_other_content_is_not_what_the_run_wrote(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    _, digest = LAYOUT.write(path, b"weights")
    path.write_bytes(b"WEIGHTS")
    problems = check_block(path, LAYOUT, ALL, digest)
    assert problems == [f"{path}: {FOREIGN_FILE}"]
    assert foreign_pixels_reason({0: problems}, 1) == "the file has other contents"


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    problems = check_block(path, LAYOUT, ALL, b"1234")
    assert problems == [f"{path}: the file is missing"]
    assert foreign_pixels_reason({0: problems}, 1) == ""
    path.mkdir()
    assert check_block(path, LAYOUT, ALL) == [f"{path}: there is a directory in place of the file"]


def test_a_file_that_cannot_be_read_for_a_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", failing)
    path = tmp_path / "net.safetensors"
    assert check_block(path, LAYOUT, ALL) == [f"{path}: the file {UNREADABLE}: Input/output error"]


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"of another program")
    with pytest.raises(OutputRefused, match="something stands there"):
        create_output(path, LAYOUT)
    create_output(path, LAYOUT, overwrite=True)
    assert path.read_bytes() == b""
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OutputRefused, match="it is a folder, and the output is a file"):
        create_output(folder, LAYOUT, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OutputRefused, match="a symlink to"):
        create_output(link, LAYOUT, overwrite=True)


def test_it_has_neither_metadata_nor_levels(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    LAYOUT.write(path, b"weights")
    assert metadata_problems(path, LAYOUT) == []
    restore_metadata(path, LAYOUT)
    assert (added_levels(path, LAYOUT), remove_added_levels(path, LAYOUT)) == (0, 0)
    assert find_foreign_entry(path, LAYOUT) == ""
    assert layout_from_json(LAYOUT.to_json()) == LAYOUT
