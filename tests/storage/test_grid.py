"""The grid: every pixel is in exactly one core, and windows cover the cores with their halos; rim rules compared with numpy.pad, at any depth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Pixels, Rim, read_window

Axes = list[tuple[int, ...]]
halos = st.integers(0, 60)
axis = st.tuples(st.integers(1, 40), st.integers(1, 50), halos, halos, st.sampled_from([1, 2, 8]))


def grid_of(axes: Axes, least: int = 1) -> Grid:
    shape, block, before, after, align = zip(*axes, strict=True)
    return Grid(shape, block, tuple(zip(before, after, strict=True)), align, (least,) * len(shape))


@given(st.lists(axis, min_size=1, max_size=3), st.integers(1, 70), st.data())
@settings(deadline=None, max_examples=90)
def test_cores_partition_the_array_in_aligned_windows(axes: Axes, least: int, data: st.DataObject) -> None:
    grid = grid_of(axes, least)
    covered, reach = np.zeros(grid.shape, int), Region.whole(grid.shape).grow(grid.depth)
    for block in itertools.islice(grid, 2000):
        covered[block.core.slices] += 1
        assert block.core.grow(grid.depth).inside(block.window)
        for i, k in enumerate(grid.align):
            assert block.window.start[i] % k == 0
            assert block.window.stop[i] % k == 0 or block.window.stop[i] >= grid.shape[i]
            assert block.window.shape[i] >= min(least, reach.stop[i] - reach.start[i])
    if len(grid) <= 2000:
        assert (covered == 1).all()
    number = data.draw(st.integers(0, len(grid) - 1))
    assert grid.number_of(grid.index_of(number)) == number
    assert grid.block_at(number).index == grid.index_of(number)


@given(st.lists(axis, min_size=1, max_size=2))
@settings(deadline=None, max_examples=60)
def test_no_block_is_larger_than_the_middle_one(axes: Axes) -> None:
    grid = grid_of(axes)
    whole, blocks = Region.whole(grid.shape), [grid.middle, *itertools.islice(grid, 2000)]
    assert max(block.core.size for block in blocks) == grid.middle.core.size
    grid = grid_of([(*sizes, 1) for *sizes, _ in axes])  # the size of the alignment margin depends on the position
    blocks = [grid.middle, *itertools.islice(grid, 2000)]
    assert max(block.window.size for block in blocks) == grid.middle.window.size
    if all(count > 2 for count in grid.counts) and max(map(max, grid.depth)) <= min(grid.block):
        assert max(block.window.clip(whole).size for block in blocks) == grid.middle.window.clip(whole).size


def test_impossible_grids_are_refused() -> None:
    for arguments, message in [
        (((0, 4), (2, 2), ((0, 0), (0, 0))), r"shape is \(0, 4\): write at least 1"),
        (((4, 4), (0, 2), ((0, 0), (0, 0))), "at least 1"),
        (((4, 4), (2, 2), ((0, -1), (0, 0))), "negative"),
        (((4, 4), (2,), ((0, 0), (0, 0))), "different numbers of axes"),
        (((4, 4), (2, 2), ((0, 0), (0, 0)), (0, 1)), "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Grid(*arguments)  # type: ignore[arg-type]


PAD_MODE = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "periodic": "wrap", "constant": "constant"}


class Counting:
    """An array that counts the pixels read from it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.pixels = np.arange(np.prod(shape), dtype=float).reshape(shape)
        self.read_pixels = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        assert region.inside(Region.whole(self.shape))
        self.read_pixels += region.size
        return self.pixels[region.slices]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(sorted(PAD_MODE))), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=200)
def test_windows_read_what_numpy_pads(axes: list[tuple[int, str]], data: st.DataObject) -> None:
    source, margin = Counting(tuple(n for n, _ in axes)), 25
    padded: Pixels = source.pixels
    for i, (_, rule) in enumerate(axes):
        width = [(margin, margin) if j == i else (0, 0) for j in range(len(axes))]
        extra = {"constant_values": -3.0} if rule == "constant" else {}
        padded = np.pad(padded, width, mode=PAD_MODE[rule], **extra)  # type: ignore[call-overload]
    start = tuple(data.draw(st.integers(-margin, n + margin - 1)) for n, _ in axes)
    stop = tuple(data.draw(st.integers(a + 1, n + margin)) for a, (n, _) in zip(start, axes, strict=True))
    rim, window = Rim(tuple(rule for _, rule in axes), (-3.0,) * len(axes)), Region(start, stop)
    assert np.array_equal(read_window(source, window, rim), padded[window.shift((margin,) * len(axes)).slices])
    assert source.read_pixels <= source.pixels.size


def test_cut_ends_the_window_at_the_edge_and_a_periodic_one_reads_two_slabs_not_the_array_between() -> None:
    source, rim = Counting((5, 6)), Rim(("cut", "reflect"))
    window = Region((-2, -2), (4, 4))
    assert read_window(source, window, rim).shape == (4, 6)
    assert rim.reach(window, source.shape) == Region((0, -2), (4, 4))
    source = Counting((1000, 4))
    read_window(source, Region((-10, 0), (10, 4)), Rim.everywhere("periodic", 2))
    assert source.read_pixels == 20 * 4
    with pytest.raises(ConfigError, match="boundary is 'turn'"):
        Rim.everywhere("turn", 2)
