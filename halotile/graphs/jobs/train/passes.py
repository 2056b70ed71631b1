"""The passes of a training: the ranks train, then the weights are written."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.jobs.train.words import result_rows
from halotile.graphs.kinds.base import (
    AnyPass,
    Inspection,
    OutputFile,
    Pass,
    PassCount,
    Place,
    RankProgram,
    Records,
    Sums,
    Work,
)
from halotile.graphs.runs.passes.records import remove_records
from halotile.graphs.watching.progress import describe_figures
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.training.recipe import CurveRow, Recipe, read_curve
from halotile.tasks.training.writing import WriteWeights

TRAIN, WRITE = "train", "write"
REPORTED = 5
"""One of so many rows of the curve is reported."""


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
        folder = at.directory.state_path
        # A rank that outlives its driver for a moment writes to no other training.
        owned = f"{at.fingerprint[:12]}.checkpoint"
        recipe = replace(self.recipe, checkpoint=folder / owned, curve=folder / "curve.json")
        if not recipe.checkpoint.exists():
            remove_records(folder, TRAIN)
            recipe.curve.unlink(missing_ok=True)
        curve = _Curve(at, recipe)
        yield RankProgram(
            TRAIN,
            partial(_train, recipe),
            Records(folder, TRAIN),
            look=curve.look,
            keep=partial(_keep, recipe.checkpoint),
            revert=partial(_revert, recipe),
            device=self.device,
            title=" while the network was trained",
        )
        at.directory.write_output_iterations(curve.rows)
        task = WriteWeights(recipe, self.output.path, self.output.layout)
        yield Pass(
            WRITE, task, self.output, title=" while the weights were written", stages=("read", "write")
        )

    def inspect(self) -> Inspection:
        """Return the last figures of the curve, and the denoiser to write into a job."""
        rows = RunDirectory.beside(self.output.path).read_output_iterations()
        denoiser = {**self.recipe.network.denoiser(self.recipe.channels), "weights": str(self.output.path)}
        last = rows[-1] if rows else {}
        figures = {name: last[name] for name in ("loss", "validation") if name in last}
        return Inspection(figures | {"denoiser": denoiser}, result_rows(last, denoiser))


def _train(recipe: Recipe, group: Any) -> None:
    """Train on one rank; only workers load torch."""
    from halotile.tasks.training.trainer import Trainer

    Trainer(recipe, group.device).train(group)


def _kept(checkpoint: Path) -> tuple[Path, Path]:
    """Checkpoints that were there when the input was last seen as it was, and the time before."""
    return checkpoint.with_suffix(".last"), checkpoint.with_suffix(".certain")


def _keep(checkpoint: Path) -> None:
    """Keep a checkpoint. It may be younger than the look at the input: certain is the one that was kept before."""
    last, certain = _kept(checkpoint)
    with suppress(OSError):  # there is none yet
        if last.exists():
            _move(last, certain)
        os.link(checkpoint, last)


def _revert(recipe: Recipe) -> None:
    """Return to the checkpoint that is certain, or to none; the curve, which may have rows of later steps, begins anew."""
    recipe.curve.unlink(missing_ok=True)
    checkpoint = recipe.checkpoint
    last, certain = _kept(checkpoint)
    last.unlink(missing_ok=True)
    if certain.exists():
        _move(certain, checkpoint)
    else:
        checkpoint.unlink(missing_ok=True)


def _move(file: Path, place: Path) -> None:
    """Move a file; of two names of one file a rename removes neither."""
    os.replace(file, place)
    file.unlink(missing_ok=True)


class _Curve:
    """Shows what rank 0 records."""

    def __init__(self, at: Place, recipe: Recipe) -> None:
        self.at = at
        self.recipe = recipe
        self.rows: list[CurveRow] = []
        self.step = 0

    def look(self) -> int:
        """Report new rows of the curve; return the number of steps that are done."""
        try:
            step, rows = read_curve(self.recipe.curve)
        except OSError:  # a network file system that another machine writes to
            return self.step
        self.step = step
        if rows != self.rows:
            is_new = len(rows) > len(self.rows)
            self.rows = rows
            self.at.report_row(rows, self.recipe.steps)
            with suppress(OSError):
                self.at.directory.write_iterations(rows)
            if is_new and (len(rows) % REPORTED == 0 or step == self.recipe.steps):
                row = rows[-1]
                self.at.report(
                    f"step {row['iteration']:,.0f} of {self.recipe.steps:,}: {describe_figures(row)}"
                )
        return step
