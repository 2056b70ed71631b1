"""The passes of a training: the ranks train, then the weights are written."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from halotile.graphs.iterations.rank_programs import Curve, ProgramFiles, checkpointed
from halotile.graphs.jobs.train.words import result_rows
from halotile.graphs.kinds.base import (
    AnyPass,
    Inspection,
    OutputFile,
    Pass,
    PassCount,
    Place,
    Sums,
    Work,
)
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import EXAMPLES
from halotile.tasks.groups.training.one_file import WriteFile
from halotile.tasks.training.recipe import Recipe

TRAIN, WRITE = "train", "write"


@dataclass(frozen=True)
class TrainWork(Work):
    """A training, and the file of its weights."""

    recipe: Recipe
    output: OutputFile
    device: str

    @property
    def outputs(self) -> tuple[OutputFile, ...]:
        """The weights."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """The steps, and the writing of the weights."""
        steps = Grid((self.recipe.steps,), (1,), ((0, 0),))
        return (PassCount(TRAIN, steps), PassCount(WRITE, self.output.grid))

    def run(self, at: Place) -> Generator[AnyPass, Sums, None]:
        """Yield the training, and the pass that writes the weights."""
        files = ProgramFiles.of(at)
        files.begin(TRAIN)
        recipe = replace(
            self.recipe,
            checkpoint=files.checkpoint,
            curve=files.curve,
            examples=at.directory.path / EXAMPLES,
        )
        curve = Curve(at, files, recipe.steps, "step")
        title = " while the network was trained"
        yield checkpointed(at, TRAIN, partial(_train, recipe), curve, device=self.device, title=title)
        at.directory.write_output_iterations(curve.rows)
        task = WriteFile(partial(_encode, recipe), self.output.path, self.output.layout)
        yield Pass(
            WRITE, task, self.output, title=" while the weights were written", stages=("read", "write")
        )

    def inspect(self) -> Inspection:
        """Return the last figures of the curve, and the denoiser to write into a job."""
        directory = RunDirectory.beside(self.output.path)
        rows = directory.read_output_iterations()
        denoiser = {**self.recipe.network.denoiser(self.recipe.channels), "weights": str(self.output.path)}
        last = rows[-1] if rows else {}
        figures = {name: last[name] for name in ("loss", "validation") if name in last}
        return Inspection(
            figures | {"denoiser": denoiser}, result_rows(last, denoiser, directory.path / EXAMPLES)
        )


def _train(recipe: Recipe, group: Any) -> None:
    """Train on one rank; only workers load torch."""
    from halotile.tasks.training.trainer import Trainer

    Trainer(recipe, group.device).train(group)


def _encode(recipe: Recipe) -> bytes:
    """Encode the weights; only workers load torch."""
    from halotile.tasks.training.writing import encoded_weights

    return encoded_weights(recipe)
