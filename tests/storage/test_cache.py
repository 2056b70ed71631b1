"""The user's cache: private, atomic and bounded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halotile.storage import cache
from halotile.storage.cache import read_cached, write_cached
from halotile.storage.run_directory.json_files import with_checksum

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/halotile/found"


def test_a_value_is_cached_under_its_key_only(folder: Path) -> None:
    write_cached(KEY, {"depth": [1, 2]})
    assert read_cached(KEY) == {"depth": [1, 2]}
    assert read_cached(OTHER) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / KEY).stat().st_mode & 0o777 == 0o600


def test_a_damaged_entry_counts_as_absent_and_is_replaced(folder: Path) -> None:
    rows: list[Any] = [
        lambda content: content[:-3],
        lambda content: content.replace(b"1", b"7"),
        lambda content: b"",
        lambda content: os.urandom(200),
        lambda content: b"0" * 2**17,
    ]
    for damage in rows:
        write_cached(KEY, [1])
        (folder / KEY).write_bytes(damage((folder / KEY).read_bytes()))
        assert read_cached(KEY) is None
        write_cached(KEY, [2])
        assert read_cached(KEY) == [2]


def test_an_entry_that_is_too_long_to_be_read_is_not_written(folder: Path) -> None:
    longest = "0" * (cache.MOST_BYTES - len(with_checksum(b'""')))
    write_cached(KEY, longest)
    assert read_cached(KEY) == longest
    write_cached(OTHER, longest + "0")
    assert os.listdir(folder) == [KEY]


@pytest.mark.parametrize("kind", ["open to others", "linked", "of another user", "closed to others"])
def test_a_folder_that_others_write_to_is_not_used(folder: Path, kind: str) -> None:
    theirs = folder.parents[1] / "theirs"
    made = theirs if kind == "linked" else folder
    made.mkdir(parents=True, mode=0o700)
    if kind == "open to others":
        folder.chmod(0o777)
    elif kind == "linked":
        folder.parent.mkdir()
        folder.symlink_to(theirs)
    elif kind == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    write_cached(KEY, 1)
    assert (read_cached(KEY) == 1) is (kind == "closed to others")


def test_a_missing_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    write_cached(KEY, 1)
    assert read_cached(KEY) is None


@pytest.mark.usefixtures("homeless")
def test_a_missing_home_is_no_error() -> None:
    write_cached(KEY, 1)
    assert read_cached(KEY) is None


def test_concurrent_writers_never_leave_a_partial_entry(folder: Path) -> None:
    def turn(number: int) -> Any:
        write_cached(KEY, [number] * 100)
        return read_cached(KEY)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(turn, range(200)))
    assert all(len(set(each)) == 1 and len(each) == 100 for each in found)
    assert os.listdir(folder) == [KEY]


def test_the_oldest_entries_are_removed_when_there_are_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_ENTRIES", 10)
    for number in range(12):
        write_cached(f"{number:064d}", number)
        os.utime(folder / f"{number:064d}", (number, number))
    assert len(os.listdir(folder)) <= 10
    assert read_cached(f"{11:064d}") == 11
    assert read_cached(f"{0:064d}") is None
