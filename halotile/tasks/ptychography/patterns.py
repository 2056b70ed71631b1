"""Patterns of a scan: chunks of neighbours in memory, read before they are needed."""

from __future__ import annotations

import math
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.tasks.ptychography.order import PatternNumbers, held_out
from halotile.tasks.ptychography.recipe import ScanRecipe

MEAN_CHUNKS = 64
"""Chunks, at most, whose patterns are averaged for the first guess of the probe."""


def turned(image: torch.Tensor, recipe: ScanRecipe) -> torch.Tensor:
    """An image of the detector in the order in which it is compared: a far field begins with the direction of the beam."""
    return torch.fft.ifftshift(image, (-2, -1)) if recipe.optics.field == "far" else image


def on_detector(image: torch.Tensor, recipe: ScanRecipe) -> torch.Tensor:
    """An image in that order, as the detector has it."""
    return torch.fft.fftshift(image, (-2, -1)) if recipe.optics.field == "far" else image


class Patterns:
    """The patterns of a scan, as counted.

    Parameters
    ----------
    recipe : ScanRecipe
        The reconstruction.
    slots : int
        Slots of this rank, whose windows and next windows stay in memory.
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
