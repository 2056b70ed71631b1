"""The order in which patterns are used: it follows from the seed and the epoch alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.ptychography.recipe import ScanRecipe

PatternNumbers = NDArray[np.int64]


MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors that turn a count into a random number, as in SplitMix64."""


def held_out(recipe: ScanRecipe, numbers: PatternNumbers) -> NDArray[np.bool_]:
    """True for the pixels of some patterns that no gradient has, (patterns, rows, columns): by seed, pattern and pixel alone.

    References
    ----------
    G. L. Steele, D. Lea, C. H. Flood, Fast splittable pseudorandom number generators, OOPSLA (2014) 453.
    """
    pixels = math.prod(recipe.pattern)
    places = (numbers[:, None] * pixels + np.arange(pixels)).astype(np.uint64)
    drawn = (places + np.uint64(recipe.seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in MIXERS:
        drawn = (drawn ^ (drawn >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(drawn < recipe.held_out * 2.0**64).reshape(-1, *recipe.pattern)


@dataclass(frozen=True)
class EpochOrder:
    """The patterns of each slot in each step, in one array: there may be millions."""

    numbers: NDArray[np.int32]  # those of the first step, slot by slot, then those of the next
    ends: NDArray[np.int64]  # ends of the slots in it, (steps, slots)

    @classmethod
    def of(cls, steps: Iterable[list[PatternNumbers]], count: int) -> EpochOrder:
        """Keep steps that have so many patterns together."""
        numbers, ends, end = np.empty(count, np.int32), [], 0
        for step in steps:
            ends.append([end := end + len(part) for part in step])
            numbers[end - sum(map(len, step)) : end] = np.concatenate(step)
        return cls(numbers, np.array(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, step: int) -> list[PatternNumbers]:
        step = range(len(self))[step]
        ends = [int(self.ends[step - 1, -1]) if step else 0, *self.ends[step].tolist()]
        return [self.numbers[a:b].astype(np.int64) for a, b in itertools.pairwise(ends)]

    def __iter__(self) -> Iterator[list[PatternNumbers]]:
        return map(self.__getitem__, range(len(self)))


def steps_of(recipe: ScanRecipe, epoch: int, half: int | None = None) -> EpochOrder:
    """The patterns of each slot in each step of an epoch of all positions or of a half, some of which may be none.

    With all patterns in memory a step has any of them, and a slot has neighbours among those. Otherwise a slot draws from a window of some
    whole chunks, which are read in a random order.
    """
    _, stage = recipe.stage_of(epoch)
    used = recipe.used(epoch, half)
    random = np.random.default_rng(np.random.SeedSequence((recipe.seed, epoch)))
    if recipe.window:
        return _from_windows(recipe, stage.batch, random, used)
    order = random.permutation(np.flatnonzero(used))
    batches = (np.sort(order[start : start + stage.batch]) for start in range(0, len(order), stage.batch))
    return EpochOrder.of((slots_of(batch, recipe.slots) for batch in batches), len(order))


def slots_of(batch: PatternNumbers, slots: int) -> list[PatternNumbers]:
    """A batch in as many parts of neighbours, some of which may be empty.

    Examples
    --------
    >>> [part.tolist() for part in slots_of(np.arange(5), 4)]
    [[0], [1], [2], [3, 4]]
    """
    return [batch[slot * len(batch) // slots : (slot + 1) * len(batch) // slots] for slot in range(slots)]


def _from_windows(
    recipe: ScanRecipe, batch: int, random: np.random.Generator, used: NDArray[np.bool_]
) -> EpochOrder:
    chunk = recipe.chunk
    chunks = random.permutation(recipe.chunks)
    width = recipe.window // chunk
    orders = []
    for slot in range(recipe.slots):
        mine = chunks[slot :: recipe.slots]
        windows = (mine[start : start + width] for start in range(0, len(mine), width))
        drawn = [random.permutation(_patterns_in(window, chunk, used)) for window in windows]
        orders.append(np.concatenate([np.empty(0, np.int64), *drawn]))
    shares = map(len, slots_of(np.arange(batch), recipe.slots))
    # Chunks are whole, so that a slot may have more patterns than another: no step is left with a few of them.
    steps = max(-(-len(order) // share) for order, share in zip(orders, shares, strict=True))
    if batch >= np.count_nonzero(used):
        steps = 1
    parts = ([np.sort(_part(order, steps, step)) for order in orders] for step in range(steps))
    return EpochOrder.of(parts, sum(map(len, orders)))


def _part(order: PatternNumbers, parts: int, number: int) -> PatternNumbers:
    """One of some parts of nearly the same length, as those of ``np.array_split``."""
    least, more = divmod(len(order), parts)
    start = number * least + min(number, more)
    return order[start : start + least + (number < more)]


def _patterns_in(chunks: PatternNumbers, chunk: int, used: NDArray[np.bool_]) -> PatternNumbers:
    numbers: PatternNumbers = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    numbers = numbers[numbers < len(used)]
    return numbers[used[numbers]]
