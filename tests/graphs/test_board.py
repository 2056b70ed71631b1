"""The map of a run: its states, and its cost."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from halotile.graphs.watching.page import DONE, EDGE, LEVELS, QUARANTINED, RETRIED, STATES, UNKNOWN, WAITING, Board

COUNTS = [(1,), (7,), (300,), (4, 5), (3, 4, 5), (2, 1, 6, 1), (130, 2), (257, 300), (1, 1, 1)]
"""Numbers of blocks along each axis: a line, an image, a stack, channels last, more than a map has room for."""


def walked(counts: tuple[int, ...], seed: int) -> tuple[Board, np.ndarray[Any, Any], dict[int, float]]:
    """A board with many changes, and the states that it should show, from plain bookkeeping."""
    rng = np.random.default_rng(seed)
    total = math.prod(counts)
    first = int(rng.integers(0, total + 1))
    states = np.where(np.arange(total) < first, DONE, WAITING)
    board, took = Board(counts, [range(first)]), dict[int, float]()
    for _ in range(20):
        numbers = rng.choice(total, size=min(total, 9), replace=False)
        state = int(rng.choice([DONE, RETRIED, QUARANTINED]))
        seconds = {int(n): float(rng.random()) for n in numbers} if state == DONE else {}
        board.mark(map(int, numbers), state, seconds)
        states[numbers] = state
        took |= seconds
    return board, states, took


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_board_counts_what_plain_bookkeeping_counts(counts: tuple[int, ...], seed: int) -> None:
    board, states, _ = walked(counts, seed)
    in_flight = range(0, len(states), 5)
    expected = Counter(STATES[s] for s in states)
    running = sum(states[n] == WAITING for n in in_flight)
    counted = board.counted(in_flight)
    assert sum(counted.values()) == len(states)
    assert counted == {name: expected[name] for name in STATES} | {
        "todo": expected["todo"] - running,
        "running": running,
    }


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_map_shows_what_matters_most_in_each_cell(counts: tuple[int, ...], seed: int) -> None:
    board, states, took = walked(counts, seed)
    shown = board.cells()
    size = shown["rows"] * shown["columns"]
    assert max(shown["rows"], shown["columns"]) <= EDGE
    assert {len(shown[name]) for name in ("states", "filled", "seconds")} == {size}
    cells: list[list[int]] = [[] for _ in range(size)]
    for number, cell in enumerate(board._cells_of(np.arange(len(states)))):
        cells[cell].append(number)
    assert all(cells)
    for cell, numbers in enumerate(cells):
        inside = {int(states[n]) for n in numbers}
        alone = DONE if inside == {DONE} else WAITING
        expected = next((s for s in (QUARANTINED, RETRIED) if s in inside), alone)
        assert int(shown["states"][cell]) == expected
        assert int(shown["filled"][cell]) == 9 * sum(states[n] == DONE for n in numbers) // len(numbers)
        assert (shown["seconds"][cell] == UNKNOWN) == took.keys().isdisjoint(numbers)


@pytest.mark.parametrize(
    ("counts", "rows", "columns", "axes"),
    [
        ((5,), 1, 5, (0,)),
        ((4, 5), 4, 5, (0, 1)),
        ((9, 4, 5), 4, 5, (1, 2)),
        ((4, 5, 1), 4, 5, (0, 1)),
        ((40, 1, 1), 1, 40, (0,)),
        ((1000, 3), EDGE, 3, (0, 1)),
        ((1, 1), 1, 1, (0,)),
    ],
)
def test_the_map_has_the_last_two_axes_that_are_cut(
    counts: tuple[int, ...], rows: int, columns: int, axes: tuple[int, ...]
) -> None:
    board = Board(counts)
    assert (board.rows, board.columns, board.axes) == (rows, columns, axes)


def test_a_block_that_is_retried_stays_so_until_it_is_done() -> None:
    board = Board((2, 2), done=[range(1)])
    board.mark([2], RETRIED)
    assert board.cells(in_flight=[1, 2])["states"] == "2130"
    board.mark([2], DONE, {2: 0.5})
    assert board.cells(in_flight=[1])["states"] == "2120"
    board.mark([3], QUARANTINED)
    assert board.counted([1]) == {"todo": 0, "running": 1, "done": 2, "retried": 0, "quarantined": 1}


def test_durations_that_are_nearly_the_same_look_nearly_the_same() -> None:
    board = Board((4,))
    board.mark(range(3), DONE, {0: 0.50, 1: 0.51, 2: 0.50})
    shown = board.cells()
    assert shown["seconds"][3] == UNKNOWN
    places = [LEVELS.index(letter) for letter in shown["seconds"][:3]]
    assert max(places) - min(places) <= 3
    assert shown["most"] / shown["least"] == pytest.approx(2)
    board.mark([3], DONE, {3: 50.0})
    assert board.cells()["seconds"] == f"{LEVELS[0]}{board.cells()['seconds'][1]}{LEVELS[0]}{LEVELS[-1]}"


def test_a_look_at_a_million_blocks_costs_what_the_map_costs() -> None:
    board = Board((1000, 1000), done=[range(400_000)])
    tracemalloc.start()
    try:
        board.mark(range(400_000, 400_200), DONE, dict.fromkeys(range(400_000, 400_200), 0.01))
        told = json.dumps(board.cells(range(440_000, 442_000)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(told) < 100_000
    # A list of the blocks would be 8 MB; measured are 1.4 MB.
    assert peak_bytes < 3e6
