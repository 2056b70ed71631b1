"""Writes are complete or absent."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from halotile.storage.disk.durable import DISK, Buffers, Disk, remove_partials


class Log(Disk):
    """A disk that records its system calls with the names of the files."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _name(self, fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition(".")[0]

    def _write(self, fd: int, buffers: Buffers) -> int:
        self.calls.append(f"write {self._name(fd)}")
        return super()._write(fd, buffers)

    def _fsync(self, fd: int) -> None:
        self.calls.append(f"fsync {self._name(fd)}")
        super()._fsync(fd)

    def _replace(self, old: Path, new: Path) -> None:
        self.calls.append(f"rename {new.name}")
        super()._replace(old, new)

    def _mkdir(self, path: Path, mode: int) -> None:
        self.calls.append(f"mkdir {path.name}")
        super()._mkdir(path, mode)


class Full(Disk):
    """A disk with a limited number of free bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def _write(self, fd: int, buffers: Buffers) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(buffers)[: min(self.room, 3)]
        self.room -= len(data)
        return super()._write(fd, [data])


def test_a_file_is_its_buffers_one_after_the_other(tmp_path: Path) -> None:
    kinds: list[Buffers] = [
        [b"one", b"", memoryview(b"two"), bytearray(b"three")],
        [b"", b"abcde", b"f", b"", b"ghijklmn", b""],
        [bytes([i % 256]) * (i % 7) for i in range(5000)],  # more than one system call takes
    ]
    for buffers, disk in itertools.product(kinds, (DISK, Full(room=10**6))):  # the second writes 3 bytes at once
        whole = b"".join(buffers)
        assert disk.write_file(tmp_path / "a", buffers) == len(whole)
        assert (tmp_path / "a").read_bytes() == whole
        assert os.listdir(tmp_path) == ["a"]


def test_data_is_synced_before_the_rename_and_the_directory_after(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    for sync, calls in ((True, ["write a", "fsync a", "rename a", "fsync d"]), (False, ["write a", "rename a"])):
        log = Log()
        log.write_file(directory / "a", [b"1"], sync=sync)
        assert log.calls == calls


def test_many_files_share_the_sync_of_their_directory(tmp_path: Path) -> None:
    log = Log()
    directory = tmp_path / "d"
    directory.mkdir()
    log.write_files((directory / str(i), [b"1"]) for i in range(100))
    assert log.calls.count("fsync d") == 1
    assert log.calls[-1] == "fsync d"
    assert sorted(map(int, os.listdir(directory))) == list(range(100))
    for i in range(100):
        assert log.calls.index(f"fsync {i}") < log.calls.index(f"rename {i}")


def test_a_full_disk_leaves_the_old_file_and_no_partial(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        Full(room=5).write_file(tmp_path / "a", [b"new and longer"])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_while_producing_contents_leaves_no_partial(tmp_path: Path) -> None:
    def files() -> Iterator[tuple[Path, Buffers]]:
        yield tmp_path / "a", [b"1"]
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        DISK.write_files(files())
    assert os.listdir(tmp_path) == []


def test_a_new_directory_and_its_parents_are_synced_from_the_top(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for calls in (["mkdir a", "fsync top", "mkdir b", "fsync a"], ["fsync a"]):  # another process may have made it
        log = Log()
        log.make_directory(top / "a" / "b", 0o700)
        assert log.calls[-len(calls) :] == calls
        assert (top / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_an_append_neither_creates_a_file_nor_follows_a_symlink(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        DISK.append(path, b"x")
    assert os.listdir(tmp_path) == []
    DISK.write_file(path, [b"abc"])
    DISK.append(path, b"def")
    DISK.sync(path)
    DISK.truncate(path, 4)
    assert path.read_bytes() == b"abcd"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        DISK.append(tmp_path / "link", b"x")
    assert path.read_bytes() == b"abcd"


def test_removing_a_tree_does_not_follow_symlinks(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "x").write_bytes(b"keep")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    for name in ("tree", "link"):
        DISK.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == ["theirs"]
    assert (tmp_path / "theirs" / "x").read_bytes() == b"keep"


def test_a_partly_removed_tree_can_still_be_recognized(tmp_path: Path) -> None:
    class Dies(Disk):
        def _unlink(self, path: Path) -> None:
            if path.name == "last":
                raise KeyboardInterrupt
            super()._unlink(path)

    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("a", "last", "z"):
        (tree / name).touch()
    with pytest.raises(KeyboardInterrupt):
        Dies().remove_tree(tree, last=["last", "absent"])
    assert os.listdir(tree) == ["last"]


def test_removing_a_missing_file_does_nothing(tmp_path: Path) -> None:
    DISK.remove(tmp_path / "absent")
    (tmp_path / "a").touch()
    DISK.remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_leftover_partials_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "c" / "0").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.1f.partial", "c/0/1.2e.partial", "c/0/1", "partial", "elsewhere/theirs.partial"):
        (tmp_path / name).touch()
    (tmp_path / "c" / "link").symlink_to(tmp_path / "elsewhere")
    assert remove_partials(tmp_path / "c") == 1
    assert (tmp_path / "elsewhere" / "theirs.partial").exists()
    assert remove_partials(tmp_path) == 2
    assert (tmp_path / "c" / "0" / "1").exists()
    assert (tmp_path / "partial").exists()


def test_it_pickles() -> None:
    assert isinstance(pickle.loads(pickle.dumps(DISK)), Disk)
