"""The passes of a training: the ranks train, then the weights are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.iterations.rank_programs import ProgramFiles, ProgramWork
from halotile.graphs.jobs.train.words import result_rows
from halotile.graphs.kinds.base import Inspection
from halotile.tasks.training.recipe import Recipe


@dataclass(frozen=True)
class TrainWork(ProgramWork):
    """A training, and the file of its weights."""

    recipe: Recipe
    phase = "train"
    word = "step"
    titles = (" while the network was trained", " while the weights were written")

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.recipe.steps

    def in_files(self, files: ProgramFiles, drawing: Path) -> Recipe:
        """Return the recipe with its files."""
        return replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, examples=drawing)

    def program(self, recipe: Recipe) -> Callable[[Any], None]:
        """Return the program of a rank."""
        return partial(_train, recipe)

    def encode(self, recipe: Recipe) -> Callable[[], bytes]:
        """Return a function that encodes the weights."""
        return partial(_encode, recipe)

    def inspect(self) -> Inspection:
        """Return the last figures of the curve, and the denoiser to write into a job."""
        last, drawing = self.last_row()
        denoiser = {**self.recipe.network.denoiser(self.recipe.channels), "weights": str(self.output.path)}
        figures = {name: last[name] for name in ("loss", "validation") if name in last}
        return Inspection(figures | {"denoiser": denoiser}, result_rows(last, denoiser, drawing))


def _train(recipe: Recipe, group: Any) -> None:
    """Train on one rank; only workers load torch."""
    from halotile.tasks.training.trainer import Trainer

    Trainer(recipe, group.device).train(group)


def _encode(recipe: Recipe) -> bytes:
    """Encode the weights; only workers load torch."""
    from halotile.tasks.training.writing import encoded_weights

    return encoded_weights(recipe)
