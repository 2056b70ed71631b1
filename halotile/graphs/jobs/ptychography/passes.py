"""The passes of a ptychographic reconstruction: the ranks reconstruct, then the result is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.iterations.rank_programs import ProgramFiles, ProgramWork
from halotile.graphs.jobs.ptychography.words import result_rows
from halotile.graphs.kinds.base import Inspection
from halotile.tasks.ptychography.recipe import ScanRecipe


@dataclass(frozen=True)
class PtychographyWork(ProgramWork):
    """A reconstruction, and the file of its result."""

    recipe: ScanRecipe
    phase = "reconstruct"
    word = "epoch"
    titles = (" while the object was reconstructed", " while the result was written")

    @property
    def steps(self) -> int:
        """Number of epochs."""
        return self.recipe.epochs

    def in_files(self, files: ProgramFiles, drawing: Path) -> ScanRecipe:
        """Return the recipe with its files."""
        return replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, drawing=drawing)

    def program(self, recipe: ScanRecipe) -> Callable[[Any], None]:
        """Return the program of a rank."""
        return partial(reconstruct_on, recipe)

    def encode(self, recipe: ScanRecipe) -> Callable[[], bytes]:
        """Return a function that encodes the result."""
        return partial(_encode, recipe)

    def inspect(self) -> Inspection:
        """Return the last figures of the curve."""
        last, drawing = self.last_row()
        figures = {name: value for name, value in last.items() if name in ("loss", "resolution")}
        return Inspection(figures, result_rows(last, drawing))


def reconstruct_on(recipe: ScanRecipe, group: Any) -> None:
    """Reconstruct on one rank; only workers load torch."""
    from halotile.tasks.ptychography.module_program import refinement_of

    refinement_of(recipe, group).run()


def _encode(recipe: ScanRecipe) -> bytes:
    """Encode the result; only workers load torch."""
    from halotile.tasks.ptychography.results.result import encoded_result

    return encoded_result(recipe)
