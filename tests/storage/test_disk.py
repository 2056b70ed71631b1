"""Writes are complete or absent; I/O threads give results in order and end with a failure; the user's cache is private, atomic and bounded."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halotile.errors import InputError
from halotile.storage import cache
from halotile.storage.disk.durable import DISK, Buffers, Disk, remove_partials
from halotile.storage.io_threads import IoThreads
from halotile.storage.run_directory.json_files import with_checksum


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that change a disk, with the names of the files."""
    noted: list[str] = []

    def note(name: str, call: Any) -> Any:
        def noting(disk: Disk, place: Any, *rest: Any) -> Any:
            path = place if isinstance(place, Path) else Path(os.readlink(f"/proc/self/fd/{place}"))
            noted.append(f"{name} {path.name.partition('.')[0]}")
            return call(disk, place, *rest)

        return noting

    for name in ("_write", "_fsync", "_replace", "_mkdir"):
        monkeypatch.setattr(Disk, name, note(name[1:], getattr(Disk, name)))
    return noted


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
        assert (disk.write_file(tmp_path / "a", buffers), (tmp_path / "a").read_bytes()) == (len(whole), whole)
        assert os.listdir(tmp_path) == ["a"]


def test_data_are_synced_before_the_rename_and_directories_after_from_the_top(tmp_path: Path, calls: list[str]) -> None:
    (top := tmp_path / "top").mkdir()
    rows = {True: ["write a", "fsync a", "replace a", "fsync top"], False: ["write a", "replace a"]}
    for sync, expected in rows.items():
        calls.clear()
        DISK.write_file(top / "a", [b"1"], sync=sync)
        assert calls == expected
    for expected in (["mkdir b", "fsync top", "mkdir c", "fsync b"], ["fsync b"]):  # another process may have made it
        calls.clear()
        DISK.make_directory(top / "b" / "c", 0o700)
        assert (calls[-len(expected) :], (top / "b" / "c").stat().st_mode & 0o777) == (expected, 0o700)


def test_a_full_disk_or_an_error_leaves_the_old_file_and_no_partial(tmp_path: Path) -> None:
    def files() -> Iterator[tuple[Path, Buffers]]:
        yield tmp_path / "a", [b"new"]
        raise ValueError("no more")

    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        Full(room=5).write_file(tmp_path / "a", [b"new and longer"])
    with pytest.raises(ValueError, match="no more"):
        DISK.write_files(files())
    assert ((tmp_path / "a").read_bytes(), os.listdir(tmp_path)) == (b"old", ["a"])


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


def test_removing_a_tree_follows_no_symlinks_and_a_part_of_it_can_still_be_recognized(tmp_path: Path) -> None:
    for folder in ("theirs", "tree/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "theirs" / "x").write_bytes(b"keep")
    for link in ("tree/deep/link", "link"):
        (tmp_path / link).symlink_to(tmp_path / "theirs")
    for name in ("a", "last", "z"):
        (tmp_path / "tree" / name).touch()

    class Dies(Disk):
        def _unlink(self, path: Path) -> None:
            if path.name == "last":
                raise KeyboardInterrupt
            super()._unlink(path)

    with pytest.raises(KeyboardInterrupt):
        Dies().remove_tree(tmp_path / "tree", last=["last", "absent"])
    assert os.listdir(tmp_path / "tree") == ["last"]
    for name in ("tree", "link"):
        DISK.remove_tree(tmp_path / name)
    DISK.remove(tmp_path / "absent")
    assert (os.listdir(tmp_path), (tmp_path / "theirs" / "x").read_bytes()) == (["theirs"], b"keep")


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


def test_results_come_in_order_and_are_computed_at_the_same_time_a_few_ahead() -> None:
    io_threads, drawn, meeting = IoThreads(), list[int](), threading.Barrier(3, timeout=20)
    io_threads.resize(3)
    io_threads.run_all(lambda _: meeting.wait(), range(3))

    def items() -> Iterator[int]:
        for number in range(20):
            drawn.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.01 * (number % 3))
        return number

    for taken, number in enumerate(io_threads.map(slow, items())):
        assert number == taken
        assert len(drawn) - taken <= 4
    io_threads.resize(1)


@pytest.mark.parametrize("count", [1, 3])
def test_after_a_failure_no_work_continues(count: int) -> None:
    io_threads, running = IoThreads(), set()
    io_threads.resize(count)

    def work(number: int) -> None:
        running.add(number)
        if number == 2:
            raise InputError("the third")
        time.sleep(0.05)
        running.remove(number)

    with pytest.raises(InputError, match="the third"):
        io_threads.run_all(work, range(50))
    assert running == {2}, "all started work has ended"
    io_threads.resize(1)


KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/halotile/found"


def test_an_entry_is_private_and_under_its_key_only_and_a_damaged_one_is_replaced(folder: Path) -> None:
    damaged = (lambda old: old[:-3], lambda old: old.replace(b"1", b"7"), lambda _: b"", lambda _: os.urandom(200))
    for damage in (*damaged, lambda _: b"0" * 2**17):
        cache.write_cached(KEY, [1])
        (folder / KEY).write_bytes(damage((folder / KEY).read_bytes()))
        assert cache.read_cached(KEY) is cache.read_cached(OTHER) is None
        cache.write_cached(KEY, [2])
        assert cache.read_cached(KEY) == [2]
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / KEY)] == [0o700, 0o600]


@pytest.mark.parametrize("kind", ["open to others", "linked", "of another user", "closed to others"])
def test_a_folder_that_others_write_to_is_not_used(folder: Path, kind: str) -> None:
    theirs = folder.parents[1] / "theirs"
    (theirs if kind == "linked" else folder).mkdir(parents=True, mode=0o777 if kind == "open to others" else 0o700)
    if kind == "open to others":
        folder.chmod(0o777)
    elif kind == "linked":
        folder.parent.mkdir()
        folder.symlink_to(theirs)
    elif kind == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    cache.write_cached(KEY, 1)
    assert (cache.read_cached(KEY) == 1) is (kind == "closed to others")


@pytest.mark.usefixtures("homeless")
def test_a_missing_home_or_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (None, "/dev/null"):
        if home:
            monkeypatch.setenv("XDG_CACHE_HOME", home)
        cache.write_cached(KEY, 1)
        assert cache.read_cached(KEY) is None


def test_concurrent_writers_never_leave_a_partial_entry(folder: Path) -> None:
    def turn(number: int) -> Any:
        cache.write_cached(KEY, [number] * 100)
        return cache.read_cached(KEY)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(turn, range(200)))
    assert all(len(set(each)) == 1 and len(each) == 100 for each in found)
    assert os.listdir(folder) == [KEY]


def test_too_many_and_too_long_entries_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "0" * (cache.MOST_BYTES - len(with_checksum(b'""')))
    cache.write_cached(KEY, longest)
    assert cache.read_cached(KEY) == longest
    cache.write_cached(OTHER, longest + "0")
    assert os.listdir(folder) == [KEY]
    os.utime(folder / KEY, (0, 0))
    monkeypatch.setattr(cache, "MOST_ENTRIES", 10)
    for number in range(12):
        cache.write_cached(f"{number:064d}", number)
        os.utime(folder / f"{number:064d}", (number, number))
    assert len(os.listdir(folder)) <= 10
    assert cache.read_cached(f"{11:064d}") == 11
    assert cache.read_cached(f"{0:064d}") is None
