"""Outputs that are made beside their place: one writer at a time, nothing by halves, and no leftovers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from halotile.errors import DiskRefused, OutputInUse, OutputRefused
from halotile.storage.disk.durable import Disk
from halotile.storage.run_directory.directory import RunDirectory, replacing
from halotile.storage.scans.convert import convert_scan
from halotile.storage.scans.scan import open_scan
from tests.cases import in_folders
from tests.storage.test_scans import COUNT, write_cxi


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_or_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for folder, is_folder in in_folders(tmp_path, (False, True)):
        place = folder / "out"
        for content in ("old", "new"):
            with replacing(place) as made:
                assert made.parents[1].stat().st_mode & 0o777 == 0o700
                (made.parent / "scratch").write_text("a")
                if is_folder:
                    made.mkdir()
                (made / content if is_folder else made).write_text(content)
        assert names(folder) == ["out"]
        assert (names(place) == ["new"]) if is_folder else (place.read_text() == "new")
        mode = place.stat().st_mode
        (folder / "usual").mkdir() if is_folder else (folder / "usual").touch()
        assert mode == (folder / "usual").stat().st_mode


def write(path: Path, *, error: Exception | None = None, check: Callable[[], None] = lambda: None) -> None:
    with replacing(path, check) as made:
        made.write_text("half")
        if error:
            raise error


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(ValueError, match="odd"):
        write(out, error=ValueError("odd"))
    with pytest.raises(DiskRefused, match=r"the disk ran full: .*out cannot be written"):
        write(out, error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OutputRefused):
        write(out, check=Mock(side_effect=[None, OutputRefused("something stands there")]))
    assert names(tmp_path) == ["out"]
    assert out.read_text() == "old"


def test_of_two_writers_the_second_is_refused(tmp_path: Path) -> None:
    source, path = write_cxi(tmp_path / "scan.cxi"), tmp_path / "scan.zarr"
    seen = []

    def second(done: int, count: int) -> None:
        with pytest.raises(OutputInUse, match=rf"scan\.zarr\.partial is in use: process {os.getpid()} on "):
            convert_scan(source, str(path))
        seen.append(done)

    convert_scan(source, str(path), report=second)
    assert seen == [COUNT]
    assert open_scan(str(path))[1][...].any(axis=(1, 2)).all()
    assert names(tmp_path) == ["scan.cxi", "scan.zarr"]
    run = RunDirectory.beside(path)
    with run.lock(), pytest.raises(OutputInUse, match=r"scan\.zarr\.run is in use"):
        convert_scan(source, str(path), overwrite=True)


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from halotile.storage.run_directory.directory import replacing\n"
        "with replacing(Path('a')) as made, replacing(Path('a.tif')) as other:\n"
        "    made.write_text('half'); other.mkdir(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".a.partial", ".a.tif.partial"]
    write(tmp_path / "a")
    assert names(tmp_path) == [".a.tif.partial", "a"]
    write(tmp_path / "a.tif")
    assert names(tmp_path) == ["a", "a.tif"]


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    plants: list[Callable[[Path], object]] = [
        lambda folder: (folder / ".out.partial").symlink_to("theirs"),
        lambda folder: (folder / ".out.partial").hardlink_to(folder / "theirs" / "kept"),
        lambda folder: shutil.copytree(folder / "theirs", folder / ".out.partial"),
    ]
    for folder, plant in in_folders(tmp_path, plants):
        (folder / "theirs").mkdir()
        (folder / "theirs" / "kept").touch()
        plant(folder)
        with pytest.raises(OutputRefused, match=r"\.out\.partial .*Move it away, or write another path"):
            write(folder / "out")
        assert names(folder) == [".out.partial", "theirs"]
        assert names(folder / "theirs") == ["kept"]


def test_a_file_in_place_of_the_directory_of_a_run_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "out.run").touch()
    write(tmp_path / "out")
    assert names(tmp_path) == ["out", "out.run"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, move = tmp_path / "out", Disk.move
    out.mkdir()
    (out / "old").touch()

    def failing(disk: Disk, source: Path, target: Path) -> None:
        if source.name == "made":
            raise OSError(errno.EIO, "the disk is broken")
        move(disk, source, target)

    monkeypatch.setattr(Disk, "move", failing)
    with pytest.raises(OSError, match="broken"), replacing(out) as made:
        made.mkdir()
    assert (names(tmp_path), names(out)) == (["out"], ["old"])


def test_a_folder_comes_back_where_its_move_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, sync = tmp_path / "out", Disk.sync_directory
    out.mkdir()
    (out / "old").touch()

    def interrupted(disk: Disk, folder: Path) -> None:
        if (folder / "replaced").exists() and folder.name == "state":
            raise KeyboardInterrupt
        sync(disk, folder)

    monkeypatch.setattr(Disk, "sync_directory", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(out) as made:
        made.mkdir()
    assert (names(tmp_path), names(out)) == (["out"], ["old"])


def killed_between_moves(folder: Path) -> None:
    """A folder ``out`` with a file ``old``, moved away by a call that was killed then."""
    (folder / "out").mkdir()
    (folder / "out/old").touch()
    code = (
        "import os, signal; from pathlib import Path; from halotile.storage.disk.durable import Disk\n"
        "from halotile.storage.run_directory.directory import replacing\n"
        "move = Disk.move\n"
        "def killed(disk, source, target):\n"
        "    if source.name == 'made': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    move(disk, source, target)\n"
        "Disk.move = killed\n"
        "with replacing(Path('out')) as made: made.mkdir()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False)
    assert (ended.returncode, names(folder)) == (-signal.SIGKILL, [".out.partial"])


def test_a_folder_that_was_moved_away_by_a_killed_call_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_between_moves(tmp_path)
    with pytest.raises(ValueError, match="no result"), replacing(out):
        raise ValueError("no result")
    assert (names(tmp_path), names(out)) == (["out"], ["old"])


def test_it_comes_back_although_the_next_call_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_between_moves(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("halotile.storage.run_directory.locks.write_holder", full)
        with pytest.raises(DiskRefused), replacing(tmp_path / "out"):
            pass
    assert names(tmp_path) == [".out.partial"]
    with pytest.raises(ValueError, match="no result"), replacing(tmp_path / "out"):
        raise ValueError("no result")
    assert (names(tmp_path), names(tmp_path / "out")) == (["out"], ["old"])


def test_what_comes_back_is_refused_before_the_work(tmp_path: Path) -> None:
    killed_between_moves(tmp_path)
    out = tmp_path / "out"

    def check() -> None:
        if out.exists():
            raise OutputRefused("something stands there")

    with pytest.raises(OutputRefused), replacing(out, check):
        pytest.fail("the work began")
    assert (names(tmp_path), names(out)) == (["out"], ["old"])


def test_the_lock_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, removed = Disk._unlink, list[str]()

    def recorded(disk: Disk, path: Path) -> None:
        removed.append(path.name)
        unlink(disk, path)

    monkeypatch.setattr(Disk, "_unlink", recorded)
    with replacing(tmp_path / "out") as made:
        made.touch()
        for name in "abcdefgh":
            (made.parent.parent / name).touch()
    assert (removed[-1], len(removed)) == ("lock", 9)
