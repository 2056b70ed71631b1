"""The order in which patterns are used: it follows from the seed and the epoch alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.ptychography.recipe import ScanRecipe

PatternNumbers = NDArray[np.int64]


def steps_of(recipe: ScanRecipe, epoch: int, half: int | None = None) -> list[list[PatternNumbers]]:
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
    return [slots_of(batch, recipe.slots) for batch in batches]


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
) -> list[list[PatternNumbers]]:
    chunk = recipe.chunk
    chunks = random.permutation(recipe.chunks)
    width = recipe.window // chunk
    parts = []
    for slot, share in enumerate(map(len, slots_of(np.arange(batch), recipe.slots))):
        mine = chunks[slot :: recipe.slots]
        windows = (mine[start : start + width] for start in range(0, len(mine), width))
        drawn = [random.permutation(_patterns_in(window, chunk, used)) for window in windows]
        order = np.concatenate([np.empty(0, np.int64), *drawn])
        parts.append([np.sort(order[start : start + share]) for start in range(0, len(order), share)])
    none = np.empty(0, np.int64)
    return [
        [part[step] if step < len(part) else none for part in parts] for step in range(max(map(len, parts)))
    ]


def _patterns_in(chunks: PatternNumbers, chunk: int, used: NDArray[np.bool_]) -> PatternNumbers:
    numbers: PatternNumbers = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    numbers = numbers[numbers < len(used)]
    return numbers[used[numbers]]
