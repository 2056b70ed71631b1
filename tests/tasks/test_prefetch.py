"""Reads ahead and writes behind: the same blocks, in order, with their own errors."""

from __future__ import annotations

import threading

import pytest

from halotile.storage.grid import Block, Grid
from halotile.tasks.block import Prefetch

BLOCKS = list(Grid((5,), (1,), ((0, 0),)))


@pytest.mark.parametrize("overlap", [False, True])
def test_every_block_is_read_and_written_once_in_order(overlap: bool) -> None:
    prefetch = Prefetch(overlap)
    written: list[int] = []
    ended: list[tuple[Block, BaseException | None]] = []
    for block, fetched in prefetch.ahead(BLOCKS, lambda b: b.number * 10):
        assert fetched() == block.number * 10
        prefetch.behind(block, lambda n=block.number: written.append(n))  # type: ignore[misc]
        ended += prefetch.written()
    prefetch.finish()
    ended += prefetch.written()
    assert written == [0, 1, 2, 3, 4]
    assert [(b.number, e) for b, e in ended] == [(n, None) for n in range(5)]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_belongs_to_its_block(overlap: bool) -> None:
    def read(block: Block) -> int:
        if block.number == 1:
            raise OSError("cannot read 1")
        return block.number

    def write(block: Block) -> None:
        if block.number == 3:
            raise OSError("cannot write 3")

    prefetch = Prefetch(overlap)
    unread = []
    for block, fetched in prefetch.ahead(BLOCKS, read):
        try:
            fetched()
        except OSError:
            unread.append(block.number)
            continue
        prefetch.behind(block, lambda b=block: write(b))  # type: ignore[misc]
    prefetch.finish()
    failed = [block.number for block, error in prefetch.written() if error is not None]
    assert (unread, failed) == ([1], [3])


def test_the_next_read_begins_while_this_block_is_computed() -> None:
    prefetch = Prefetch(overlap=True)
    begun = [threading.Event() for _ in BLOCKS]
    for block, fetched in prefetch.ahead(BLOCKS, lambda b: begun[b.number].set()):
        fetched()
        if block.number + 1 < len(BLOCKS):
            assert begun[block.number + 1].wait(5)


def test_the_last_write_goes_on_while_the_next_block_is_computed() -> None:
    prefetch = Prefetch(overlap=True)
    may_end = threading.Event()

    def write() -> None:
        may_end.wait(5)

    prefetch.behind(BLOCKS[0], write)
    assert prefetch.written() == []
    may_end.set()
    prefetch.finish()
    assert [error for _, error in prefetch.written()] == [None]
