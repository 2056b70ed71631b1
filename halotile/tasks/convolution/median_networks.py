"""Medians by minimum and maximum only: sorting networks over shifted slices.

The window is sorted along one axis after the other. Each sort is shared by all windows along
the remaining axes, and after the last one the ranks are known to grow along every axis:
an entry with more than half of the window on one side of it cannot be the median. The remaining candidates are
reduced by dropping the least and the greatest of just over half of them, again and again.
Exchanges whose result is not used are dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SORTED_SIZES = (3, 5, 7)  # windows whose network is written out and compiled, once for each in median.c
NetworkStep = tuple[str, int, int]  # ("shift", source, axis * size + offset), or ("min" or "max", one value, the other)


@dataclass
class MedianNetwork:
    """The steps that lead from an array, value 0, to the medians of its windows, value ``result``.

    >>> network = median_network(3, 2)
    >>> sum(kind != "shift" for kind, _, _ in network.used.values())
    20
    """

    size: int
    steps: list[NetworkStep] = field(default_factory=list)
    result: int = 0

    def add(self, kind: str, one: int, other: int) -> int:
        """Append a step; returns the number of its result."""
        self.steps.append((kind, one, other))
        return len(self.steps)

    def exchange(self, values: list[int], low: int, high: int) -> None:
        """Put the lesser of two values first."""
        one, other = values[low], values[high]
        values[low], values[high] = self.add("min", one, other), self.add("max", one, other)

    @cached_property
    def used(self) -> dict[int, NetworkStep]:
        """The steps whose result is used, by the number of that result."""
        wanted = {self.result}
        for number in range(len(self.steps), 0, -1):
            if number in wanted:
                kind, one, other = self.steps[number - 1]
                wanted.update((one,) if kind == "shift" else (one, other))
        return {number: self.steps[number - 1] for number in sorted(wanted) if number}

    @cached_property
    def last_uses(self) -> dict[int, list[int]]:
        """For each step, the values that are not needed after it."""
        last: dict[int, int] = {}
        for number, (kind, one, other) in self.used.items():
            last[one] = number
            if kind != "shift":
                last[other] = number
        ends: dict[int, list[int]] = {}
        for value, number in last.items():
            ends.setdefault(number, []).append(value)
        return ends

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        """Return the median of every window inside ``source``."""
        import torch

        values = {0: source}
        for number, (kind, one, other) in self.used.items():
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
    """The network for windows of ``size`` pixels along each axis."""
    network = MedianNetwork(size)
    ranks: dict[tuple[int, ...], int] = {(): 0}
    for axis in range(axes):
        ranks = {
            (*rank, place): value
            for rank, source in ranks.items()
            for place, value in enumerate(_sorted_shifts(network, source, axis))
        }
    candidates = [value for rank, value in ranks.items() if _may_be_median(rank, size)]
    network.result = _select_middle(network, candidates)
    return network


def _sorted_shifts(network: MedianNetwork, source: int, axis: int) -> list[int]:
    """Sort the pixels at every offset along an axis."""
    values = [network.add("shift", source, axis * network.size + offset) for offset in range(network.size)]
    for end, place in itertools.product(range(network.size - 1, 0, -1), range(network.size - 1)):
        if place < end:
            network.exchange(values, place, place + 1)
    return values


def _may_be_median(rank: tuple[int, ...], size: int) -> bool:
    """Return whether at most half of the pixels are known to be below, and above, the one of this rank."""
    half = size ** len(rank) // 2 + 1
    below, above = math.prod(i + 1 for i in rank), math.prod(size - i for i in rank)
    return bool(max(below, above) <= half)


def _select_middle(network: MedianNetwork, candidates: list[int]) -> int:
    """Drop the least and the greatest of just over half of the candidates, until one is left."""
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
