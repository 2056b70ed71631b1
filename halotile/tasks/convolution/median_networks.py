"""Medians by minimum and maximum only: exchange networks over shifted slices.

The window is sorted along one axis after the other. Each sort is shared by all windows that lie
along the axes still to come, and after the last one the ranks are known to grow along every axis:
an entry with more than half of the window on one side of it cannot be the median. Those left are
thinned out by dropping the least and the greatest of just over half of them, again and again.
Only the exchanges whose result is used are kept.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Step = tuple[str, int, int]
"""("shift", source, axis * size + offset), or ("min" or "max", one value, the other)."""


@dataclass
class MedianNetwork:
    """The steps that lead from an array, value 0, to the medians of its windows, value ``result``.

    Examples
    --------
    >>> network = median_network(3, 2)
    >>> sum(kind != "shift" for kind, _, _ in network.kept.values())
    20
    """

    size: int
    steps: list[Step] = field(default_factory=list)
    result: int = 0

    def add(self, kind: str, one: int, other: int) -> int:
        """Write a step down; its result is the value of this number."""
        self.steps.append((kind, one, other))
        return len(self.steps)

    def exchange(self, prefetch: list[int], low: int, high: int) -> None:
        """Put the lesser of two lanes first."""
        one, other = prefetch[low], prefetch[high]
        prefetch[low], prefetch[high] = self.add("min", one, other), self.add("max", one, other)

    @cached_property
    def kept(self) -> dict[int, Step]:
        """The steps whose result is used, by the number of that result."""
        wanted = {self.result}
        for number in range(len(self.steps), 0, -1):
            if number in wanted:
                kind, one, other = self.steps[number - 1]
                wanted.update((one,) if kind == "shift" else (one, other))
        return {number: self.steps[number - 1] for number in sorted(wanted) if number}

    @cached_property
    def last_uses(self) -> dict[int, list[int]]:
        """Which values are not needed any more after a step."""
        last: dict[int, int] = {}
        for number, (kind, one, other) in self.kept.items():
            last[one] = number
            if kind != "shift":
                last[other] = number
        ends: dict[int, list[int]] = {}
        for value, number in last.items():
            ends.setdefault(number, []).append(value)
        return ends

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        """The median of every window that fits into ``source``."""
        import torch

        values = {0: source}
        for number, (kind, one, other) in self.kept.items():
            if kind == "shift":
                axis, offset = divmod(other, self.size)
                length = values[one].shape[axis + 2] - self.size + 1
                values[number] = values[one].narrow(axis + 2, offset, length)
            else:
                operation = torch.minimum if kind == "min" else torch.maximum
                values[number] = operation(values[one], values[other])
            for value in self.last_uses.get(number, ()):
                del values[value]
        return values[self.result]


@cache
def median_network(size: int, axes: int) -> MedianNetwork:
    """The network for windows of ``size`` pixels along each of so many axes."""
    network = MedianNetwork(size)
    ranks: dict[tuple[int, ...], int] = {(): 0}
    for axis in range(axes):
        ranks = {
            (*rank, place): value
            for rank, source in ranks.items()
            for place, value in enumerate(_sorted_prefetch(network, source, axis))
        }
    candidates = [value for rank, value in ranks.items() if _may_be_median(rank, size)]
    network.result = _select_middle(network, candidates)
    return network


def _sorted_prefetch(network: MedianNetwork, source: int, axis: int) -> list[int]:
    """The pixels at every offset along an axis, sorted."""
    prefetch = [network.add("shift", source, axis * network.size + offset) for offset in range(network.size)]
    for end, place in itertools.product(range(network.size - 1, 0, -1), range(network.size - 1)):
        if place < end:
            network.exchange(prefetch, place, place + 1)
    return prefetch


def _may_be_median(rank: tuple[int, ...], size: int) -> bool:
    """Whether neither too many pixels are known to be below nor above the one of this rank."""
    half = size ** len(rank) // 2 + 1
    below, above = math.prod(i + 1 for i in rank), math.prod(size - i for i in rank)
    return bool(max(below, above) <= half)


def _select_middle(network: MedianNetwork, candidates: list[int]) -> int:
    """Drop the least and the greatest of just over half of what is left, until one is left."""
    pool, rest = candidates[: len(candidates) // 2 + 2], candidates[len(candidates) // 2 + 2 :]
    while len(pool) > 1:
        _extremes_outward(network, pool)
        pool = pool[1:-1] + rest[:1]
        rest = rest[1:]
    return pool[0]


def _extremes_outward(network: MedianNetwork, pool: list[int]) -> None:
    """Move the least to the front and the greatest to the back."""
    last = len(pool) - 1
    for place in range(len(pool) // 2):
        network.exchange(pool, place, last - place)
    for place in range(1, (len(pool) + 1) // 2):
        network.exchange(pool, 0, place)
    for place in range(len(pool) // 2, last):
        network.exchange(pool, place, last)
