"""Checks of an output read side by side, no more at once than there are cores and memory for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from halotile.graphs.runs import records
from halotile.graphs.runs.records import damaged_blocks, image_digest
from halotile.storage.grid import Grid
from tests.storage.outputs import PLAIN, written

SHARD_BYTES = 8 * 8 * 2
"""Of PLAIN, with pixels of two bytes."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each check has asked for; the machine has four cores."""
    counts: list[int] = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            counts.append(count)
            super().__init__(count)

    monkeypatch.setattr(records, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(records, "cores_here", lambda: 4)
    return counts


@pytest.mark.parametrize(
    ("held", "thorough", "count"),
    [
        (100 * SHARD_BYTES, True, 4),
        (3 * SHARD_BYTES - 1, True, 2),
        (SHARD_BYTES - 1, True, 1),
        (SHARD_BYTES - 1, False, 4),
    ],
)
def test_whole_shards_are_held_as_memory_allows(
    held: int, thorough: bool, count: int, threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "HELD_BYTES", held)
    layout = replace(PLAIN, dtype="uint16")
    written(tmp_path / "a.zarr", layout)
    assert list(damaged_blocks(tmp_path / "a.zarr", layout, layout.grid, thorough=thorough)) == []
    assert threads == [count]


def test_an_image_is_digested_by_as_many_threads_as_cores(threads: list[int], tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", PLAIN)
    image_digest(tmp_path / "a.zarr", PLAIN, PLAIN.grid)
    assert threads == [4]


@pytest.mark.parametrize("waits", [False, True])
def test_threads_are_asked_once_a_look_waits(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work: set[int] = set()

    def look(*_: object, **__: object) -> list[str]:
        at_work.add(threading.get_ident())
        time.sleep(0.002)
        return ["a problem"]

    monkeypatch.setattr(records, "cores_here", lambda: 4)
    monkeypatch.setattr(records, "check_block", look)
    monkeypatch.setattr(records, "WAITING_SECONDS", 0.0 if waits else 60.0)
    grid = Grid((64, 64), (8, 8), ((0, 0), (0, 0)))
    found = [number for number, _ in damaged_blocks(tmp_path, PLAIN, grid, thorough=False)]
    assert found == list(range(64))
    assert threading.get_ident() in at_work
    assert (len(at_work) > 1) is waits
