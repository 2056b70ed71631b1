"""I/O threads: results in order, computed a few ahead, with no work left after a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from halotile.errors import DamagedData, InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.io_threads import IO_THREADS, IoThreads
from halotile.storage.sharded.output import Layout
from tests.storage.outputs import written
from tests.support import noisy_image, write_zarr


@pytest.fixture(params=[1, 4])
def io_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of I/O threads of this process."""
    IO_THREADS.resize(request.param)
    yield request.param
    IO_THREADS.resize(1)


def test_results_come_in_order_and_are_computed_a_few_ahead() -> None:
    io_threads, drawn = IoThreads(), []
    io_threads.resize(3)

    def items() -> Iterator[int]:
        for number in range(20):
            drawn.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.01 * (number % 3))
        return number

    ahead = []
    for taken, number in enumerate(io_threads.map(slow, items())):
        assert number == taken
        ahead.append(len(drawn) - taken)
    assert max(ahead) <= 4
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


def test_several_threads_work_at_the_same_time() -> None:
    io_threads, meeting = IoThreads(), threading.Barrier(3, timeout=20)
    io_threads.resize(3)
    io_threads.run_all(lambda _: meeting.wait(), range(3))
    io_threads.resize(1)


def test_several_threads_read_and_write_the_same_image_as_one(io_threads: int, tmp_path: Path) -> None:
    pixels = noisy_image((300, 260), "uint16")
    source = open_source(str(write_zarr(tmp_path / "in.zarr", pixels, chunk=32)))
    region = Region((10, 20), (290, 250))
    np.testing.assert_array_equal(source.read(region), pixels[region.slices])
    layout = Layout((300, 260), "uint16", (64, 64), (32, 32), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
    put = written(tmp_path / "out.zarr", layout)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "out.zarr", mode="r")[...], put)


def test_a_damaged_chunk_file_is_named(io_threads: int, tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)), chunk=32)
    (path / "c/3/4").write_bytes(b"short")
    with pytest.raises(DamagedData, match="chunk file c/3/4"):
        open_source(str(path)).read(Region.whole((300, 260)))
