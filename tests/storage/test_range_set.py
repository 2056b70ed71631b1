"""RangeSet compared with a plain set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.storage.run_directory.number_ranges import RangeSet

NUMBERS = st.lists(st.integers(0, 60))
STEPS = st.lists(st.tuples(st.booleans(), NUMBERS | st.builds(range, st.integers(0, 60), st.integers(0, 60))))


def applied(steps: list[tuple[bool, list[int] | range]]) -> tuple[RangeSet, set[int]]:
    runs, model = RangeSet(), set[int]()
    for adds, numbers in steps:
        if adds:
            runs.add(numbers)
            model |= set(numbers)
        else:
            runs.discard(numbers)
            model -= set(numbers)
    return runs, model


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_adding_and_discarding_agree_with_a_set(steps: list[tuple[bool, list[int] | range]]) -> None:
    runs, model = applied(steps)
    assert list(runs) == sorted(model)
    assert len(runs) == len(model)
    assert [n in runs for n in range(-1, 63)] == [n in model for n in range(-1, 63)]


@settings(deadline=None, max_examples=100)
@given(STEPS)
def test_ranges_neither_touch_nor_overlap(steps: list[tuple[bool, list[int] | range]]) -> None:
    ranges = list(applied(steps)[0].ranges())
    assert all(len(run) for run in ranges)
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))


@settings(deadline=None, max_examples=100)
@given(NUMBERS, st.integers(0, 80))
def test_the_complement_contains_the_other_numbers(numbers: list[int], total: int) -> None:
    assert list(RangeSet(numbers).complement(total)) == [n for n in range(total) if n not in set(numbers)]


@settings(deadline=None, max_examples=100)
@given(NUMBERS)
def test_the_set_can_be_restored_from_its_text(numbers: list[int]) -> None:
    assert RangeSet.from_text(RangeSet(numbers).to_text()) == RangeSet(numbers)


@pytest.mark.parametrize("text", ["1-", "-3", "a", "1,,2", "1-2-3", " 1", "1,", "+1"])
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor first-last"):
        RangeSet.from_text(text)


def test_numbers_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 is below 0"):
        RangeSet([-1])


def test_a_copy_is_independent() -> None:
    runs = RangeSet([1, 2])
    twin = runs.copy()
    twin.add([9])
    assert list(runs) == [1, 2]
    assert runs != twin


def test_a_million_members_in_batches_form_few_ranges() -> None:
    runs = RangeSet()
    for start in range(0, 1_000_000, 256):
        runs.add(range(start, min(start + 256, 1_000_000)))
    assert runs.to_text() == "0-999999"
    assert len(runs.complement(1_000_001)) == 1
