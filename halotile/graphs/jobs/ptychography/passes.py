"""The passes of a ptychographic reconstruction: the ranks reconstruct, then the result is written."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from halotile.graphs.iterations.rank_programs import Curve, ProgramFiles, checkpointed
from halotile.graphs.jobs.ptychography.words import result_rows
from halotile.graphs.kinds.base import AnyPass, Inspection, OutputFile, Pass, PassCount, Place, Sums, Work
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import EXAMPLES
from halotile.tasks.groups.training.one_file import WriteFile
from halotile.tasks.ptychography.recipe import ScanRecipe

RECONSTRUCT, WRITE = "reconstruct", "write"


@dataclass(frozen=True)
class PtychographyWork(Work):
    """A reconstruction, and the file of its result."""

    recipe: ScanRecipe
    output: OutputFile
    device: str

    @property
    def outputs(self) -> tuple[OutputFile, ...]:
        """The result."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """The epochs, and the writing of the result."""
        epochs = Grid((self.recipe.epochs,), (1,), ((0, 0),))
        return (PassCount(RECONSTRUCT, epochs), PassCount(WRITE, self.output.grid))

    def run(self, at: Place) -> Generator[AnyPass, Sums, None]:
        """Yield the reconstruction, and the pass that writes its result."""
        files = ProgramFiles.of(at)
        files.begin(RECONSTRUCT)
        drawing = at.directory.path / EXAMPLES
        recipe = replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, drawing=drawing)
        curve = Curve(at, files, recipe.epochs, "epoch")
        title = " while the object was reconstructed"
        program = partial(_reconstruct, recipe)
        yield checkpointed(at, RECONSTRUCT, program, curve, device=self.device, title=title)
        at.directory.write_output_iterations(curve.rows)
        task = WriteFile(partial(_encode, recipe), self.output.path, self.output.layout)
        yield Pass(WRITE, task, self.output, title=" while the result was written", stages=("read", "write"))

    def inspect(self) -> Inspection:
        """Return the last figures of the curve."""
        directory = RunDirectory.beside(self.output.path)
        rows = directory.read_output_iterations()
        last = rows[-1] if rows else {}
        figures = {"loss": last["loss"]} if "loss" in last else {}
        return Inspection(figures, result_rows(last, directory.path / EXAMPLES))


def _reconstruct(recipe: ScanRecipe, group: Any) -> None:
    """Reconstruct on one rank; only workers load torch."""
    from halotile.tasks.ptychography.program import Refinement

    Refinement(recipe, group).run()


def _encode(recipe: ScanRecipe) -> bytes:
    """Encode the result; only workers load torch."""
    from halotile.tasks.ptychography.result import encoded_result

    return encoded_result(recipe)
