"""The grid: every pixel is in exactly one core, and windows cover the cores with their halos."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError
from halotile.storage.grid import Grid, Region, align_outward

axis = st.tuples(
    st.integers(1, 40), st.integers(1, 50), st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 2, 8])
)


def grid_of(axes: list[tuple[int, int, int, int, int]], least: int = 1) -> Grid:
    shape, block, before, after, align = zip(*axes, strict=True)
    depth = tuple(zip(before, after, strict=True))
    return Grid(shape, block, depth, align, (least,) * len(shape))


@given(st.lists(axis, min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_cores_partition_the_array(axes: list[tuple[int, int, int, int, int]]) -> None:
    grid = grid_of(axes)
    covered = np.zeros(grid.shape, int)
    for block in itertools.islice(grid, 2000):
        covered[block.core.slices] += 1
    if len(grid) <= 2000:
        assert (covered == 1).all()


@given(st.lists(axis, min_size=1, max_size=3), st.integers(1, 70))
@settings(deadline=None, max_examples=60)
def test_windows_hold_core_and_halo_and_are_aligned(
    axes: list[tuple[int, int, int, int, int]], least: int
) -> None:
    grid = grid_of(axes, least)
    reach = Region.whole(grid.shape).grow(grid.depth)
    for block in itertools.islice(grid, 200):
        assert block.core.grow(grid.depth).inside(block.window)
        for i, k in enumerate(grid.align):
            assert block.window.start[i] % k == 0
            assert block.window.stop[i] % k == 0 or block.window.stop[i] >= grid.shape[i]
            whole = reach.stop[i] - reach.start[i]
            assert block.window.shape[i] >= min(least, whole)


@given(st.lists(axis, min_size=1, max_size=2))
@settings(deadline=None, max_examples=60)
def test_no_block_is_larger_than_the_middle_one(axes: list[tuple[int, int, int, int, int]]) -> None:
    grid = grid_of(axes)
    whole = Region.whole(grid.shape)
    blocks = [grid.middle, *itertools.islice(grid, 2000)]
    assert max(block.core.size for block in blocks) == grid.middle.core.size
    grid = grid_of(
        [(n, b, before, after, 1) for n, b, before, after, _ in axes]
    )  # the size of the alignment margin depends on the position
    blocks = [grid.middle, *itertools.islice(grid, 2000)]
    assert max(block.window.size for block in blocks) == grid.middle.window.size
    if all(count > 2 for count in grid.counts) and max(map(max, grid.depth)) <= min(grid.block):
        assert max(block.window.clip(whole).size for block in blocks) == grid.middle.window.clip(whole).size


@given(st.lists(axis, min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=60)
def test_number_and_index_are_inverse(
    axes: list[tuple[int, int, int, int, int]], data: st.DataObject
) -> None:
    grid = grid_of(axes)
    number = data.draw(st.integers(0, len(grid) - 1))
    assert grid.number_of(grid.index_of(number)) == number
    assert grid.block_at(number).index == grid.index_of(number)


def test_a_million_blocks_are_computed_on_demand() -> None:
    grid = Grid((10**6, 10**6), (10**3, 10**3), ((8, 8), (8, 8)))
    assert len(grid) == 10**6
    assert grid.block_at(10**6 - 1).core == Region((999_000, 999_000), (10**6, 10**6))


def test_a_block_is_an_immutable_value() -> None:
    block = Grid((10, 10), (4, 4), ((1, 1), (1, 1))).block_at(4)
    assert pickle.loads(pickle.dumps(block)) == block
    assert {block: 1}[block] == 1
    with pytest.raises(AttributeError):
        block.number = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 4), (2, 2), ((0, 0), (0, 0))), r"shape is \(0, 4\): write at least 1"),
        (((4, 4), (0, 2), ((0, 0), (0, 0))), "at least 1"),
        (((4, 4), (2, 2), ((0, -1), (0, 0))), "negative"),
        (((4, 4), (2,), ((0, 0), (0, 0))), "different numbers of axes"),
        (((4, 4), (2, 2), ((0, 0), (0, 0)), (0, 1)), "at least 1"),
    ],
)
def test_impossible_grids_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(*arguments)  # type: ignore[arg-type]


def test_numbers_outside_the_grid_are_index_errors() -> None:
    grid = Grid((10,), (5,), ((0, 0),))
    with pytest.raises(IndexError):
        grid.block_at(2)
    with pytest.raises(IndexError):
        grid.number_of((2,))


def test_alignment_stops_at_the_end_of_the_array() -> None:
    assert align_outward(Region((5,), (9,)), (4,), (10,)) == Region((4,), (10,))
    assert align_outward(Region((5,), (12,)), (4,), (10,)) == Region((4,), (12,))
