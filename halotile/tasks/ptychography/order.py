"""The order in which patterns are used: it follows from the seed and the epoch alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.ptychography.recipe import ScanRecipe

Numbers = NDArray[np.int64]


def steps_of(recipe: ScanRecipe, epoch: int) -> list[list[Numbers]]:
    """The patterns of each slot in each step of an epoch, some of which may be none.

    With all patterns in memory a step has any of them, and a slot has neighbours among those. Otherwise a slot draws from a window of some
    whole chunks, which are read in a random order.
    """
    _, stage = recipe.stage_of(epoch)
    random = np.random.default_rng(np.random.SeedSequence((recipe.seed, epoch)))
    if recipe.window:
        return _from_windows(recipe, stage.batch, random)
    count = len(recipe.scan.positions)
    order = random.permutation(count)
    batches = (np.sort(order[start : start + stage.batch]) for start in range(0, count, stage.batch))
    return [slots_of(batch, recipe.slots) for batch in batches]


def slots_of(batch: Numbers, slots: int) -> list[Numbers]:
    """A batch in as many parts of neighbours, some of which may be empty.

    Examples
    --------
    >>> [part.tolist() for part in slots_of(np.arange(5), 4)]
    [[0], [1], [2], [3, 4]]
    """
    return [batch[slot * len(batch) // slots : (slot + 1) * len(batch) // slots] for slot in range(slots)]


def _from_windows(recipe: ScanRecipe, batch: int, random: np.random.Generator) -> list[list[Numbers]]:
    chunk, count = recipe.chunk, len(recipe.scan.positions)
    chunks = random.permutation(-(-count // chunk))
    width = recipe.window // chunk
    parts = []
    for slot, share in enumerate(map(len, slots_of(np.arange(batch), recipe.slots))):
        mine = chunks[slot :: recipe.slots]
        windows = (mine[start : start + width] for start in range(0, len(mine), width))
        drawn = [random.permutation(_patterns_in(window, chunk, count)) for window in windows]
        order = np.concatenate([np.empty(0, np.int64), *drawn])
        parts.append([np.sort(order[start : start + share]) for start in range(0, len(order), share)])
    none = np.empty(0, np.int64)
    return [
        [part[step] if step < len(part) else none for part in parts] for step in range(max(map(len, parts)))
    ]


def _patterns_in(chunks: Numbers, chunk: int, count: int) -> Numbers:
    numbers = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    return numbers[numbers < count]
