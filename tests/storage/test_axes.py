"""Axis letters: requested, named by the file, or default."""

from __future__ import annotations

import numpy as np
import pytest

from halotile.errors import InputError
from halotile.storage.axes import choose_axes, letters


@pytest.mark.parametrize(
    ("shape", "dtype", "axes"),
    [
        ((9, 9), "uint8", "yx"),
        ((9, 9, 9), "uint8", "zyx"),
        ((9, 9, 3), "uint8", "yxc"),
        ((9, 9, 4), "uint8", "yxc"),
        ((9, 9, 3), "uint16", "zyx"),
        ((9, 3), "uint8", "yx"),
        ((2, 9, 9, 9), "float32", "czyx"),
        ((2, 9, 9, 3), "uint8", "zyxc"),
        ((5, 2, 9, 9, 9), "float32", "tczyx"),
    ],
)
def test_defaults(shape: tuple[int, ...], dtype: str, axes: str) -> None:
    assert "".join(choose_axes(None, None, shape, np.dtype(dtype))) == axes


def test_six_axes_must_be_named() -> None:
    with pytest.raises(InputError, match="nothing says which"):
        choose_axes(None, None, (2,) * 6, np.dtype("u1"))
    assert choose_axes("abcdyx", None, (2,) * 6, np.dtype("u1")) == tuple("abcdyx")


@pytest.mark.parametrize(
    ("named", "axes"),
    [
        (["t", "C", "y", "x"], "tcyx"),
        (["time", "channel", "Y", "X"], "tcyx"),
        (["q", "q", "y", "x"], "qayx"),
        ([None, "y", "x"], "qyx"),
        (["sample id", "a", "y", "x"], "qayx"),
        (["c", "channel", "y", "x"], "cqyx"),
    ],
)
def test_names_become_distinct_letters(named: list[str | None], axes: str) -> None:
    assert letters(named) == tuple(axes)


@pytest.mark.parametrize("named", [["lat", "lon"], ["y", "y"], [None, None], ["z", "x"]])
def test_names_without_y_and_x_are_left_to_the_defaults(named: list[str | None]) -> None:
    assert letters(named) is None
    assert choose_axes(None, named, (4, 4), np.dtype("f4")) == ("y", "x")
