"""The pass of posterior samples: each block on itself with a halo."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from halotile.graphs.kinds.base import Gather, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Pixels
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.image_task import ImageTask
from halotile.tasks.posterior.gaussian import Solved
from halotile.tasks.shared import Shared

PHASE = "samples"


@dataclass(frozen=True)
class Layer:
    """One image of several."""

    images: Shared
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape[1:]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.images.dtype

    def read(self, region: Region) -> Pixels:
        count = self.images.shape[0]
        layer: Pixels = self.images.read(Region((0, *region.start), (count, *region.stop)))[self.number]
        return layer


@dataclass(frozen=True)
class SampleWork(Work):
    """Mean, standard deviation and draws, written by one pass."""

    maps: tuple[OutputArray, ...]
    solved: Solved
    overlap: bool

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The mean, the standard deviation and the draws, where they are wanted."""
        return self.maps

    @property
    def grid(self) -> Grid:
        """The blocks of the pass."""
        return self.maps[0].grid

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """One pass, counted for each output."""
        return (PassCount(PHASE, self.grid, len(self.maps)),)

    @property
    def layers(self) -> Iterator[int]:
        """The image of each output: mean 0, standard deviation 1, draws from 2 on."""
        further = itertools.count(2)
        places = {"output.path": 0, "output.std": 1}
        return (places[output.key] if output.key in places else next(further) for output in self.maps)

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        images = Shared(self.solved, computed=True)
        writers = (ShardWriter(output.path, output.layout) for output in self.maps)
        task = ImageTask(
            grid=self.grid,
            images=tuple((w, Layer(images, n)) for w, n in zip(writers, self.layers, strict=True)),
            overlap=self.overlap,
        )
        first, *also = self.maps
        yield Pass(PHASE, task, first, also=tuple(also))
