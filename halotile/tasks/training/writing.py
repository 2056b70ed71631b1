"""The last block of a training: the weights are written to their file."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import OutputRefused
from halotile.storage.grid import Block, Grid
from halotile.storage.sharded.output import FileLayout, WrittenBlock
from halotile.tasks.block import Receipt
from halotile.tasks.denoisers.common.weights import METADATA
from halotile.tasks.training.recipe import Recipe

ONE_FILE = Grid((1,), (1,), ((0, 0),))


@dataclass(frozen=True)
class WriteWeights:
    """Writes the weights of a training that has ended, as a task of one block.

    Parameters
    ----------
    recipe : Recipe
        The training.
    path : Path
        The file to write, .safetensors.
    layout : FileLayout
        Its layout.
    """

    recipe: Recipe
    path: Path
    layout: FileLayout
    grid: Grid = ONE_FILE
    overlap: bool = False
    io_threads: int = 1
    batch: int = 1

    def stages(self) -> WeightStages:
        """The stages of the block."""
        return WeightStages(self)


@dataclass
class WeightStages:
    """Reading, encoding and writing of the weights."""

    task: WriteWeights
    batch: int = 1
    device_peak_bytes: int = 0

    def check(self) -> None:
        """Nothing can be refused."""

    def read(self, block: Block) -> dict[str, Any]:
        """Read the weights in the checkpoint."""
        from halotile.tasks.training.trainer import Trainer

        return Trainer(self.task.recipe, "cpu").trained()

    def compute(self, block: Block, what_was_read: dict[str, Any], receipt: Receipt) -> bytes:
        """Encode them."""
        from safetensors.torch import save

        recipe = self.task.recipe
        content = {
            "denoiser": recipe.network.denoiser(recipe.channels),
            "method": recipe.method,
            "values": list(recipe.patches.values),
        }
        metadata = {METADATA: json.dumps(content)}  # the library writes several in no fixed order
        encoded: bytes = save({name: tensor.contiguous() for name, tensor in what_was_read.items()}, metadata)
        return encoded

    def write(self, block: Block, result: bytes, receipt: Receipt) -> None:
        """Replace the empty file that the run has made.

        Raises
        ------
        OutputRefused
            When another program has written there meanwhile.
        """
        with suppress(FileNotFoundError):
            if (present := self.task.path.read_bytes()) not in (b"", result):
                raise OutputRefused(
                    f"{self.task.path} has {len(present):,} bytes that no run wrote. Move it away and run again to write the weights."
                )
        receipt.enter(block.number, [WrittenBlock(*self.task.layout.write(self.task.path, result))])
