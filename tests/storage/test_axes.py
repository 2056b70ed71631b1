"""Axis letters: requested, named by the file, or default."""

from __future__ import annotations

import pytest

from halotile.storage.axes import choose_axes, letters, remarks_on_axes


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((9, 9), "yx"),
        ((9, 9, 9), "qyx"),
        ((30, 30, 3), "yxc"),
        ((64, 64, 16), "yxc"),
        ((64, 64, 17), "qyx"),
        ((100, 40, 16), "qyx"),
        ((9, 3), "yx"),
        ((2, 9, 9, 9), "pqyx"),
        ((2, 30, 30, 3), "qyxc"),
        ((5, 2, 9, 9, 9), "opqyx"),
    ],
)
def test_defaults(shape: tuple[int, ...], axes: str) -> None:
    assert "".join(choose_axes(None, None, shape)) == axes


@pytest.mark.parametrize(
    ("axes", "shape", "is_named", "words"),
    [
        ("qyx", (8, 9, 9), False, "what axis q is: each of 8 planes is by itself. If they are a volume, write input.axes: zyx"),
        ("qzyx", (8, 9, 9, 9), True, "each of 8 planes is by itself. If they are a volume, write input.axes: one letter for each"),
        ("pqyx", (2, 8, 9, 9), False, "what axes pq are: each of 16 planes is by itself. If they are a volume, write input.axes: pzyx"),
        ("yxc", (90, 90, 3), False, "taken as yxc. If not, write input.axes"),
        ("yxc", (90, 90, 3), True, None),
        ("yx", (90, 90), False, None),
        ("tczyx", (1, 2, 3, 4, 5), True, None),
    ],
)  # fmt: skip
def test_what_is_assumed_is_said(
    axes: str, shape: tuple[int, ...], is_named: bool, words: str | None
) -> None:
    remarks = remarks_on_axes(axes, shape, is_named=is_named)
    assert [words in remark for remark in remarks if words] == [True] * (words is not None)
    assert len(remarks) == (words is not None)


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
    assert choose_axes(None, named, (4, 4)) == ("y", "x")
