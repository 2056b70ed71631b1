"""Patterns of a scan: the order of their use, from the seed and the epoch alone; chunks of neighbours in memory, read before they are needed."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.tasks.ptychography.recipe import ScanRecipe

PatternNumbers = NDArray[np.int64]


# Shifts and factors that turn a count into a random number, as in SplitMix64.
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


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
    def from_steps(cls, steps: Iterable[list[PatternNumbers]], count: int) -> EpochOrder:
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
    """The patterns of each slot in each step of an epoch of all positions or of a half; some may be empty.

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
    return EpochOrder.from_steps((slots_of(batch, recipe.slots) for batch in batches), len(order))


def slots_of(batch: PatternNumbers, slots: int) -> list[PatternNumbers]:
    """A batch in as many parts of neighbours; some may be empty.

    >>> [part.tolist() for part in slots_of(np.arange(5), 4)]
    [[0], [1], [2], [3, 4]]
    """
    return [batch[slot * len(batch) // slots : (slot + 1) * len(batch) // slots] for slot in range(slots)]


def _from_windows(recipe: ScanRecipe, batch: int, random: np.random.Generator, used: NDArray[np.bool_]) -> EpochOrder:
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
    return EpochOrder.from_steps(parts, sum(map(len, orders)))


def _part(order: PatternNumbers, parts: int, number: int) -> PatternNumbers:
    """One of some parts of nearly the same length, as those of ``np.array_split``."""
    least, more = divmod(len(order), parts)
    start = number * least + min(number, more)
    return order[start : start + least + (number < more)]


def _patterns_in(chunks: PatternNumbers, chunk: int, used: NDArray[np.bool_]) -> PatternNumbers:
    numbers: PatternNumbers = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    numbers = numbers[numbers < len(used)]
    return numbers[used[numbers]]


MEAN_CHUNKS = 64  # chunks, at most, whose patterns are averaged for the first guess of the probe


def turned(image: torch.Tensor, recipe: ScanRecipe) -> torch.Tensor:
    """An image of the detector in the order in which it is compared: a far field begins with the direction of the beam."""
    return torch.fft.ifftshift(image, (-2, -1)) if recipe.optics.field == "far" else image


def on_detector(image: torch.Tensor, recipe: ScanRecipe) -> torch.Tensor:
    """An image in that order, as the detector has it."""
    return torch.fft.fftshift(image, (-2, -1)) if recipe.optics.field == "far" else image


class Patterns:
    """The patterns of a scan, as counted.

    ``recipe``: the reconstruction; ``slots``: slots of this rank, whose windows and next windows stay in memory.
    """

    def __init__(self, recipe: ScanRecipe, slots: int) -> None:
        self.recipe = recipe
        self.most = recipe.chunks
        if recipe.window:
            self.most = min(recipe.chunks, 2 * slots * (recipe.window // recipe.chunk) + slots)
        self.reader = ThreadPoolExecutor(1, "halotile-read")
        self.chunks: OrderedDict[int, Future[NDArray[Any]]] = OrderedDict()
        """By number, the one last used at the end."""

    def expect(self, numbers: PatternNumbers) -> None:
        """Begin to read chunks with some patterns in the background."""
        for number in self._chunks_with(numbers):
            self._chunk(number)

    def read(self, numbers: PatternNumbers, device: Any) -> torch.Tensor:
        """Some patterns, (positions, rows, columns)."""
        chunks = {number: self._chunk(number).result() for number in self._chunks_with(numbers)}
        pixels = np.empty((len(numbers), *self.recipe.pattern), np.float32)
        for out, number, place in zip(pixels, *np.divmod(numbers, self.recipe.chunk), strict=True):
            out[...] = chunks[int(number)][place]
        return turned(torch.from_numpy(pixels).to(device), self.recipe)

    def mask(self, device: Any) -> torch.Tensor | None:
        """1 where a pixel counts, else 0; None where all do."""
        mask = self.recipe.scan.mask
        return None if mask is None else turned(torch.from_numpy(mask).float(), self.recipe).to(device)

    def held_out(self, numbers: PatternNumbers, device: Any) -> torch.Tensor | None:
        """True for the pixels of some patterns that no gradient has, of those that count; None where there are none."""
        if not self.recipe.held_out:
            return None
        held = torch.from_numpy(held_out(self.recipe, numbers)).to(device)
        mask = self.mask(device)
        return held if mask is None else held & (mask > 0)

    @cached_property
    def counted_pixels(self) -> int:
        """Pixels of a pattern that count."""
        mask = self.recipe.scan.mask
        return math.prod(self.recipe.pattern) if mask is None else int(mask.sum())

    def mean(self) -> torch.Tensor:
        """The mean of some patterns of all parts of the scan, 0 in pixels that do not count."""
        step = -(-self.recipe.chunks // MEAN_CHUNKS)
        total, count = np.zeros(self.recipe.pattern), 0
        for number in range(0, self.recipe.chunks, step):
            chunk = self._chunk(number).result()
            total += chunk.sum(0, dtype=np.float64)
            count += len(chunk)
        mean = turned(torch.from_numpy(total / count).float(), self.recipe)
        mask = self.mask("cpu")
        return mean if mask is None else mean * mask

    def _chunks_with(self, numbers: PatternNumbers) -> list[int]:
        return [int(number) for number in np.unique(numbers // self.recipe.chunk)]

    def _chunk(self, number: int) -> Future[NDArray[Any]]:
        if number not in self.chunks:
            self.chunks[number] = self.reader.submit(self._load, number)
            while len(self.chunks) > self.most:
                self.chunks.popitem(last=False)
        self.chunks.move_to_end(number)
        return self.chunks[number]

    def _load(self, number: int) -> NDArray[Any]:
        count, rows, columns = self.recipe.patterns.shape
        first = number * self.recipe.chunk
        pixels: NDArray[Any] = self.recipe.patterns.read(
            Region((first, 0, 0), (min(first + self.recipe.chunk, count), rows, columns))
        )
        if not 0 <= pixels.min() <= pixels.max() < np.inf:  # nor NaN
            raise InputError(
                f"{self.recipe.patterns.path} has negative values or NaN, which are not counts. Convert the scan again."
            )
        return pixels
