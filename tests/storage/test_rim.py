"""Rim rules compared with numpy.pad, at any depth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Rim, read_window

PAD_MODE = {
    "reflect": "symmetric",
    "mirror": "reflect",
    "nearest": "edge",
    "periodic": "wrap",
    "constant": "constant",
}


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


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(sorted(PAD_MODE))), min_size=1, max_size=3),
    st.data(),
)
@settings(deadline=None, max_examples=200)
def test_windows_read_what_numpy_pads(axes: list[tuple[int, str]], data: st.DataObject) -> None:
    source = Counting(tuple(n for n, _ in axes))
    margin = 25
    padded: Pixels = source.pixels
    for i, (_, rule) in enumerate(axes):
        width = [(margin, margin) if j == i else (0, 0) for j in range(len(axes))]
        extra = {"constant_values": -3.0} if rule == "constant" else {}
        padded = np.pad(padded, width, mode=PAD_MODE[rule], **extra)  # type: ignore[call-overload]
    start = tuple(data.draw(st.integers(-margin, n + margin - 1)) for n, _ in axes)
    stop = tuple(data.draw(st.integers(a + 1, n + margin)) for a, (n, _) in zip(start, axes, strict=True))
    rim = Rim(tuple(rule for _, rule in axes), (-3.0,) * len(axes))
    window = Region(start, stop)
    got = read_window(source, window, rim)
    assert np.array_equal(got, padded[window.shift((margin,) * len(axes)).slices])
    assert source.read_pixels <= source.pixels.size


def test_cut_ends_the_window_at_the_edge() -> None:
    source = Counting((5, 6))
    rim = Rim(("cut", "reflect"))
    window = Region((-2, -2), (4, 4))
    assert read_window(source, window, rim).shape == (4, 6)
    assert rim.reach(window, source.shape) == Region((0, -2), (4, 4))


def test_a_periodic_window_reads_two_slabs_not_the_array_between_them() -> None:
    source = Counting((1000, 4))
    read_window(source, Region((-10, 0), (10, 4)), Rim.everywhere("periodic", 2))
    assert source.read_pixels == 20 * 4


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="boundary is 'turn'"):
        Rim.everywhere("turn", 2)
