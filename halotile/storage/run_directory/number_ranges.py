"""A set of integers stored as ranges: a million consecutive members cost as much as one."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """A set of integers >= 0, stored as sorted half-open ranges that neither touch nor overlap.

    Parameters
    ----------
    numbers : iterable of int
        Initial members. A ``range`` is added in one step.

    Examples
    --------
    >>> done = RangeSet(range(32))
    >>> done.add([40, 33, 32])
    >>> done.discard([7])
    >>> done, len(done), 7 in done
    (RangeSet('0-6,8-33,40'), 34, False)
    >>> done.complement(50)
    RangeSet('7,34-39,41-49')
    """

    __slots__ = ("_count", "_starts", "_stops")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        self.add(numbers)

    @classmethod
    def from_text(cls, text: str) -> RangeSet:
        """The set written by :meth:`to_text`.

        >>> len(RangeSet.from_text("0-31,40"))
        33
        """
        numbers = cls()
        for part in text.split(",") if text else ():
            first, dash, last = part.partition("-")
            if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
                raise ValueError(f"{part!r} is neither a number nor first-last, as in 0-31,40")
            numbers._add(int(first), int(last or first) + 1)
        return numbers

    def to_text(self) -> str:
        """The set as compact text, such as ``0-31,40``."""
        return ",".join(str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in self.ranges())

    def ranges(self) -> Iterator[range]:
        """The ranges in order."""
        return map(range, self._starts, self._stops)

    def add(self, numbers: Iterable[int]) -> None:
        """Add these numbers."""
        for start, stop in _bounds(numbers):
            self._add(start, stop)

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove those of these numbers that are members."""
        for start, stop in _bounds(numbers):
            self._discard(start, stop)

    def complement(self, total: int) -> RangeSet:
        """The numbers of ``range(total)`` that are not in the set."""
        rest = RangeSet(range(total))
        rest.discard(self)
        return rest

    def copy(self) -> RangeSet:
        """An independent copy."""
        return RangeSet(self)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        position = bisect_right(self._starts, number) - 1
        return position >= 0 and number < self._stops[position]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.ranges())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    def __repr__(self) -> str:
        return f"RangeSet({self.to_text()!r})"

    def _add(self, start: int, stop: int) -> None:
        if start < 0:
            raise ValueError(f"{start} is below 0: members are integers >= 0")
        if start >= stop:
            return
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._put(low, high, [start], [stop])

    def _discard(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        low = bisect_right(self._stops, start)
        high = bisect_left(self._starts, stop)
        if low >= high:
            return
        first, last = self._starts[low], self._stops[high - 1]
        rest = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._put(low, high, [a for a, _ in rest], [b for _, b in rest])

    def _put(self, low: int, high: int, starts: list[int], stops: list[int]) -> None:
        """Replace the ranges ``low`` to ``high`` by others."""
        self._count += sum(stops) - sum(starts) - sum(self._stops[low:high]) + sum(self._starts[low:high])
        self._starts[low:high] = starts
        self._stops[low:high] = stops


def _bounds(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in any order as sorted half-open ranges."""
    if isinstance(numbers, range) and numbers.step == 1:
        return [(numbers.start, numbers.stop)]
    if isinstance(numbers, RangeSet):
        return list(zip(numbers._starts, numbers._stops, strict=True))
    return [(number, number + 1) for number in sorted(numbers)]
