"""Axis letters: requested, named by the file, or default."""

from __future__ import annotations

from collections.abc import Sequence

from halotile.storage.axes import choose_axes, letters, remarks_on_axes

DEFAULTS = [
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
]


def test_defaults() -> None:
    assert [(shape, "".join(choose_axes(None, None, shape))) for shape, _ in DEFAULTS] == DEFAULTS


ASSUMED: list[tuple[str, tuple[int, ...], Sequence[str | None], list[str]]] = [
        ("qyx", (8, 9, 9), (), ["what axis q is: each of 8 planes is by itself. If they are a volume, write input.axes: zyx"]),
        ("qzyx", (8, 9, 9, 9), "qzyx", ["each of 8 planes is by itself. If they are a volume, write input.axes: one letter for each"]),
        ("pqyx", (2, 8, 9, 9), (), ["what axes pq are: each of 16 planes is by itself. If they are a volume, write input.axes: pzyx"]),
        ("qyx", (8, 9, 9), ("station", "lat", "lon"), ["what axis q (station) is: each of 8 planes is by itself."]),
        ("qyx", (8, 9, 9), ("run", "row", "col"), ["names the axes run, row, col: taken as qyx. If not, write", "what axis q is"]),
        ("tyx", (8, 9, 9), ("time", "row", "col"), ["names the axes time, row, col: taken as tyx. If not, write"]),
        ("yx", (9, 9), ("z", "y", "x"), ["names the axes z, y, x for an array of 2: taken as yx"]),
        ("tyx", (8, 9, 9), ("time", "latitude", "longitude"), []),
        ("yxc", (90, 90, 3), (), ["does not name its axes: taken as yxc. If not, write input.axes"]),
        ("yxc", (90, 90, 3), "yxc", []),
        ("yx", (90, 90), (None, ""), []),
        ("tczyx", (1, 2, 3, 4, 5), "tczyx", []),
]  # fmt: skip


def test_what_is_assumed_is_said() -> None:
    for axes, shape, named, words in ASSUMED:
        assert choose_axes(None, named, shape) == tuple(axes)
        remarks = remarks_on_axes(axes, shape, named)
        assert all(word in remark for word, remark in zip(words, remarks, strict=True)), (axes, named)


NAMED: list[tuple[list[str | None], str]] = [
    (["t", "C", "y", "x"], "tcyx"),
    (["time", "channel", "Y", "X"], "tcyx"),
    (["q", "q", "y", "x"], "qayx"),
    ([None, "y", "x"], "qyx"),
    (["sample id", "a", "y", "x"], "qayx"),
    (["c", "channel", "y", "x"], "cqyx"),
    (["Time", "LAT", "lon"], "tyx"),
    (["longitude", "latitude"], "xy"),
    (["lat", "y", "x"], "qyx"),
]


def test_names_become_distinct_letters_or_are_left_to_the_defaults_without_y_and_x() -> None:
    for named, axes in NAMED:
        assert letters(named) == tuple(axes), named
    for named in (["row", "column"], ["lat", "x"], ["y", "y"], [None, None], ["z", "x"]):
        assert letters(named) is None
        assert choose_axes(None, named, (4, 4)) == ("y", "x")
