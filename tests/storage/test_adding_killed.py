"""Levels that are added to an image when the program is killed, the disk fills up, or the image changes meanwhile."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import zarr

from halotile.errors import DamagedData, DiskRefused, InputError, OutputInUse
from halotile.storage.arrays import open_source
from halotile.storage.disk.durable import Disk
from halotile.storage.images.added_levels import WORK, add_levels
from halotile.storage.run_directory.directory import RunDirectory
from tests.cases import all_of
from tests.storage.adding import (
    FORMATS,
    SHAPE,
    Killed,
    MortalDisk,
    check_equal,
    save_image,
    small_images,
    stored_levels,
    tree,
)
from tests.support import noisy_image


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    small_images(monkeypatch)


@pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:Object at")
@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v2"]))
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(tmp_path: Path, form: str) -> None:
    whole = save_image(tmp_path / "whole.zarr", noisy_image((70, 50), "uint8"), form)
    if form != "shards":
        zarr.consolidate_metadata(whole)
    shutil.copytree(whole, tmp_path / "first.zarr")
    before = stored_levels(whole)
    add_levels(whole)
    expected, files = stored_levels(whole), tree(whole)
    for last in itertools.count():
        path = tmp_path / f"{last}.zarr"
        shutil.copytree(tmp_path / "first.zarr", path)
        try:
            add_levels(path, disk=MortalDisk(last))
        except Killed:
            check_equal(path, expected if len(stored_levels(path)) > 1 else before)
            check_equal(
                path,
                [
                    level[...]
                    for level in map(_read_level, itertools.repeat(path), range(len(stored_levels(path))))
                ],
            )
            add_levels(path)
            check_equal(path, expected)
            assert tree(path) == files
            shutil.rmtree(path)
        else:
            break
    assert last > 20


def _read_level(path: Path, level: int) -> Any:
    return open_source(path, level=level)


class BeforeMetadata(Disk):
    """A disk on which the program is killed before the metadata of the group are replaced."""

    def _replace(self, old: Path, new: Path) -> None:
        if old.parent.name == "state" and old.suffix == ".json":
            raise Killed
        super()._replace(old, new)


class FullDisk(MortalDisk):
    """A disk that has no more room after some operations."""

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(path: Path, last: int = 40) -> list[Path]:
    """Levels of which some shards are written; returns their files."""
    with pytest.raises(Killed):
        add_levels(path, disk=MortalDisk(last))
    shards = sorted(
        file
        for file in (path / WORK / "state" / "1" / "c").rglob("*")
        if file.is_file() and not file.name.endswith(".partial")
    )
    assert len(shards) > 2
    return shards


def test_shards_that_are_done_are_kept_and_damaged_ones_are_not(tmp_path: Path) -> None:
    path, whole = (save_image(tmp_path / name, noisy_image(SHAPE)) for name in ("a.zarr", "b.zarr"))
    add_levels(whole)
    kept, damaged, *_ = interrupted(path)
    moment = kept.stat().st_mtime_ns
    damaged.write_bytes(damaged.read_bytes()[:20])
    add_levels(path)
    assert (path / "1" / kept.relative_to(path / WORK / "state" / "1")).stat().st_mtime_ns == moment
    check_equal(path, stored_levels(whole))


def test_levels_of_an_image_that_has_changed_since_are_made_anew(tmp_path: Path) -> None:
    for last in (40, 10_000):
        path, whole = tmp_path / f"a{last}.zarr", tmp_path / f"b{last}.zarr"
        save_image(path, noisy_image(SHAPE))
        save_image(whole, noisy_image(SHAPE, seed=1))
        add_levels(whole)
        if last == 40:
            interrupted(path)
        else:  # moved, and not yet named
            with pytest.raises(Killed):
                add_levels(path, disk=BeforeMetadata())
            assert (path / "4").exists()
            assert len(stored_levels(path)) == 1
        zarr.open_group(path)["0"][...] = noisy_image(SHAPE, seed=1)
        add_levels(path)
        check_equal(path, stored_levels(whole))
        assert sorted(os.listdir(path)) == ["0", "1", "2", "3", "4", "zarr.json"]


def test_an_image_that_changes_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))

    def change(done: float) -> None:
        if done > 0.9:
            zarr.open_group(path)["0"][:5] = 0

    with pytest.raises(InputError, match="was written to while its levels were made"):
        add_levels(path, change)
    assert sorted(os.listdir(path)) == ["0", "zarr.json"]
    assert len(stored_levels(path)) == 1


def test_a_damaged_chunk_is_named_and_nothing_is_added(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    chunk = path / "0" / "c" / "2" / "3"
    chunk.write_bytes(chunk.read_bytes()[:50])
    files = tree(path)
    with pytest.raises(DamagedData, match="chunk file c/2/3"):
        add_levels(path)
    assert tree(path) == files
    assert not (path / WORK).exists()


def test_one_at_a_time(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    with (
        RunDirectory(path / WORK).lock(),
        pytest.raises(OutputInUse, match=r"a\.zarr/\.levels is in use: process \d+ on .*\. Wait"),
    ):
        add_levels(path)


def test_without_room_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    needed = 4 * (75 * 107 + 38 * 54 + 19 * 27 + 10 * 14)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(
        DiskRefused, match=rf"levels take up to {needed:,} bytes, and {needed - 1:,} are free"
    ):
        add_levels(path)
    assert len(stored_levels(path)) == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert add_levels(path)[0] == 5


def test_a_disk_that_fills_up_is_named_and_the_rest_follows(tmp_path: Path) -> None:
    path, whole = (save_image(tmp_path / name, noisy_image(SHAPE)) for name in ("a.zarr", "b.zarr"))
    add_levels(whole)
    with pytest.raises(DiskRefused, match=r"the disk ran full: .*\. Free some space and run again"):
        add_levels(path, disk=FullDisk(40))
    assert len(stored_levels(path)) == 1
    add_levels(path)
    check_equal(path, stored_levels(whole))
