"""A set of whole numbers kept as runs: a million members in a row cost as much as one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Runs:
    """A set of integers >= 0, stored as sorted half-open runs that neither touch nor overlap.

    Parameters
    ----------
    numbers : iterable of int
        Its first members. A ``range`` is one run, whatever its length.

    Examples
    --------
    >>> done = Runs(range(32))
    >>> done.add([40, 33, 32])
    >>> done.discard([7])
    >>> done, len(done), 7 in done
    (Runs('0-6,8-33,40'), 34, False)
    >>> done.complement(50)
    Runs('7,34-39,41-49')
    """

    __slots__ = ("_count", "_starts", "_stops")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        self.add(numbers)

    @classmethod
    def from_text(cls, text: str) -> Runs:
        """The set that :meth:`to_text` wrote.

        Raises
        ------
        ValueError
            When the text is anything else than numbers and ``first-last`` pairs between commas.

        Examples
        --------
        >>> len(Runs.from_text("0-31,40"))
        33
        """
        runs = cls()
        for part in text.split(",") if text else ():
            first, dash, last = part.partition("-")
            if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
                raise ValueError(f"{part!r} is neither a number nor first-last, as in 0-31,40")
            runs._add(int(first), int(last or first) + 1)
        return runs

    def to_text(self) -> str:
        """The set as compact text, such as ``0-31,40``."""
        return ",".join(str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in self.ranges())

    def ranges(self) -> Iterator[range]:
        """The runs in order."""
        return map(range, self._starts, self._stops)

    def add(self, numbers: Iterable[int]) -> None:
        """Put these numbers in."""
        for start, stop in _grouped(numbers):
            self._add(start, stop)

    def discard(self, numbers: Iterable[int]) -> None:
        """Take these numbers out, where they are in."""
        for start, stop in _grouped(numbers):
            self._discard(start, stop)

    def complement(self, total: int) -> Runs:
        """The numbers of ``range(total)`` that are not in the set."""
        rest = Runs(range(total))
        for run in self.ranges():
            rest._discard(run.start, run.stop)
        return rest

    def copy(self) -> Runs:
        """A set of its own with the same members."""
        twin = Runs()
        twin._starts, twin._stops, twin._count = self._starts[:], self._stops[:], self._count
        return twin

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for run in self.ranges():
            yield from run

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    def __repr__(self) -> str:
        return f"Runs({self.to_text()!r})"

    def _add(self, start: int, stop: int) -> None:
        if start < 0:
            raise ValueError(f"{start} is below 0: the set holds numbers from 0 on")
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
        pieces = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._put(low, high, [a for a, _ in pieces], [b for _, b in pieces])

    def _put(self, low: int, high: int, starts: list[int], stops: list[int]) -> None:
        """Replace the runs ``low`` to ``high`` by others."""
        self._count += sum(stops) - sum(starts) - sum(self._stops[low:high]) + sum(self._starts[low:high])
        self._starts[low:high] = starts
        self._stops[low:high] = stops


def _grouped(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Numbers in any order as half-open runs."""
    if isinstance(numbers, range) and numbers.step == 1:
        yield numbers.start, numbers.stop
        return
    if isinstance(numbers, Runs):
        yield from list(zip(numbers._starts, numbers._stops, strict=True))
        return
    start = stop = None
    for number in sorted(numbers):
        if start is None or stop is None:
            start, stop = number, number + 1
        elif number <= stop:
            stop = max(stop, number + 1)
        else:
            yield start, stop
            start, stop = number, number + 1
    if start is not None and stop is not None:
        yield start, stop
