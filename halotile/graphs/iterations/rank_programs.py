"""Programs of ranks that keep a checkpoint and a curve in the state folder of their run."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from halotile.graphs.kinds.base import AnyPass, OutputFile, Pass, PassCount, RankProgram, Records, RunView, Sums, Work
from halotile.graphs.runs.records import remove_records
from halotile.graphs.watching.progress import describe_figures
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import EXAMPLES, RunDirectory
from halotile.tasks.block import WriteFile
from halotile.tasks.groups.training.curve import CurveRow, read_curve, write_curve

WRITE = "write"
# Suffixes of a checkpoint, of the one that was there when the input was last found unchanged, and of the one
# before that.
CHECKPOINT, LAST, CERTAIN = ".checkpoint", ".last", ".certain"
REPORTED = 5  # one of so many rows of the curve is reported


@dataclass(frozen=True)
class ProgramFiles:
    """The files of a program in the state folder of a run."""

    folder: Path  # state folder
    # bears the digest of the job: a rank that outlives its driver for a moment writes to no other one. A program may
    # have several, whose names go on after the digest
    checkpoint: Path

    @classmethod
    def from_run(cls, directory: RunDirectory, digest: str) -> ProgramFiles:
        """The files of a run, by the digest of its job."""
        folder = directory.state_path
        return cls(folder, folder / f"{digest[:12]}{CHECKPOINT}")

    @property
    def curve(self) -> Path:
        """Figures of the steps so far."""
        return self.folder / "curve.json"

    def begin(self, phase: str, end: Path, most: int) -> None:
        """Forget that a program ended where the checkpoint of its end is not there, and rows of the curve beyond those that checkpoints may hold."""
        if not self._all(CHECKPOINT):
            self.curve.unlink(missing_ok=True)
        step, rows = read_curve(self.curve)
        if step > most or not end.exists():
            remove_records(self.folder, phase)
        if step > most:
            write_curve(self.curve, most, rows[:most])

    def keep_checkpoint(self) -> None:
        """Keep the checkpoints. They may be younger than the look at the input: certain are those that were kept before."""
        # Where one is gone by now, or a network file system does not answer, the next look keeps them.
        with suppress(OSError):
            for checkpoint in self._all(CHECKPOINT):
                last = checkpoint.with_suffix(LAST)
                if last.exists():
                    _move(last, checkpoint.with_suffix(CERTAIN))
                os.link(checkpoint, last)
            left, certain = (
                [kept for kept in self._all(suffix) if not kept.with_suffix(CHECKPOINT).exists()]
                for suffix in (LAST, CERTAIN)
            )
            if len(certain) < len(self._all(CERTAIN)):  # there is a later one
                left += certain
            for kept in left:
                kept.unlink(missing_ok=True)

    def restore_checkpoint(self) -> None:
        """Return to the checkpoints that are certain, or to none; the curve, which may have rows of later steps, begins anew."""
        for doubtful in (self.curve, *self._all(LAST), *self._all(CHECKPOINT)):
            doubtful.unlink(missing_ok=True)
        for certain in self._all(CERTAIN):
            _move(certain, certain.with_suffix(CHECKPOINT))

    def _all(self, suffix: str) -> list[Path]:
        return list(self.folder.glob(f"{self.checkpoint.stem}*{suffix}"))


@dataclass(frozen=True)
class ProgramWork(Work):
    """A program of ranks, and the pass that writes its result as one file."""

    recipe: Any  # everything that the program needs
    output: OutputFile  # file of the result
    device: str  # `cpu` or `cuda`
    phase: ClassVar[str]  # name of the phase of the program
    word: ClassVar[str]  # the noun for a step
    titles: ClassVar[tuple[str, str]]  # texts that identify the program and the writing after a message

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps."""

    def files(self, at: RunView) -> ProgramFiles:
        return ProgramFiles.from_run(at.directory, at.fingerprint)

    @abstractmethod
    def in_files(self, files: ProgramFiles, drawing: Path) -> Any:
        """Return the recipe with its files."""

    def end_of(self, recipe: Any) -> Path:
        """Return the checkpoint of the last step."""
        checkpoint: Path = recipe.checkpoint
        return checkpoint

    def most_kept(self, recipe: Any) -> int:
        """Return the number of steps that checkpoints may hold, at most."""
        return self.steps

    @abstractmethod
    def program(self, recipe: Any) -> Callable[[Any], None]:
        """Return the program of a rank, called with its group."""

    @abstractmethod
    def encode(self, recipe: Any) -> Callable[[], bytes]:
        """Return a function that encodes the result in the checkpoint on a worker."""

    @property
    def outputs(self) -> tuple[OutputFile, ...]:
        """The result."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """The steps; the writing of the result takes no time beside them."""
        steps = Grid((self.steps,), (1,), ((0, 0),))
        return (PassCount(self.phase, steps), PassCount(WRITE, self.output.grid, times=0))

    def run(self, at: RunView) -> Generator[AnyPass, Sums, None]:
        """Yield the program, and the pass that writes its result."""
        files = self.files(at)
        recipe = self.in_files(files, at.directory.path / EXAMPLES)
        files.begin(self.phase, self.end_of(recipe), self.most_kept(recipe))
        curve = Curve(at, files, self.steps, self.word)
        yield RankProgram(
            self.phase,
            self.program(recipe),
            Records(files.folder, self.phase),
            steps_done=curve.steps_done,
            keep_checkpoint=files.keep_checkpoint,
            restore_checkpoint=files.restore_checkpoint,
            device=self.device,
            title=self.titles[0],
        )
        at.directory.write_output_iterations(curve.rows)
        task = WriteFile(self.encode(recipe), self.output.path, self.output.layout)
        yield Pass(WRITE, task, self.output, title=self.titles[1])

    def last_row(self) -> tuple[CurveRow, Path]:
        """Return the last row of the curve of a finished result, and the path of its drawing."""
        directory = RunDirectory.beside(self.output.path)
        rows = directory.read_output_iterations()
        return (dict(rows[-1]) if rows else {}), directory.path / EXAMPLES


@dataclass
class Curve:
    """Shows what rank 0 records."""

    at: RunView
    files: ProgramFiles
    steps: int  # steps of the program
    word: str  # noun for a step
    rows: list[CurveRow] = field(default_factory=list)
    step: int = 0

    def steps_done(self) -> int:
        """Report new rows of the curve; return the number of steps that are done."""
        try:
            step, rows = read_curve(self.files.curve)
        except OSError:  # a network file system that another machine writes to
            return self.step
        self.step = step
        if rows != self.rows:
            before, self.rows = len(self.rows), rows
            self.at.report_row(rows, self.steps)
            with suppress(OSError):
                self.at.directory.write_iterations(rows)
            # Many may have come at once.
            if len(rows) // REPORTED > before // REPORTED or (step == self.steps and len(rows) > before):
                self._report(rows[-1])
        return step

    def _report(self, row: Mapping[str, float]) -> None:
        self.at.report(f"{self.word} {row['iteration']:,.0f} of {self.steps:,}: {describe_figures(row)}")


def _move(file: Path, place: Path) -> None:
    """Move a file; of two names of one file a rename removes neither."""
    os.replace(file, place)
    file.unlink(missing_ok=True)
