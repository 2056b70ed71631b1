"""Programs of ranks that keep a checkpoint and a curve in the state folder of their run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.graphs.kinds.base import Place, RankProgram, Records
from halotile.graphs.runs.passes.records import remove_records
from halotile.graphs.watching.progress import describe_figures
from halotile.tasks.groups.training.curve import CurveRow, read_curve

REPORTED = 5
"""One of so many rows of the curve is reported."""


@dataclass(frozen=True)
class ProgramFiles:
    """The files of a program in the state folder of a run.

    Parameters
    ----------
    folder : Path
        The state folder.
    checkpoint : Path
        Bears the digest of the job: a rank that outlives its driver for a moment writes to no other one.
    """

    folder: Path
    checkpoint: Path

    @classmethod
    def of(cls, at: Place) -> ProgramFiles:
        """The files of a run."""
        folder = at.directory.state_path
        return cls(folder, folder / f"{at.fingerprint[:12]}.checkpoint")

    @property
    def curve(self) -> Path:
        """Figures of the steps so far."""
        return self.folder / "curve.json"

    def begin(self, phase: str) -> None:
        """Forget a program that has no checkpoint."""
        if not self.checkpoint.exists():
            remove_records(self.folder, phase)
            self.curve.unlink(missing_ok=True)

    def keep(self) -> None:
        """Keep the checkpoint. It may be younger than the look at the input: certain is the one that was kept before."""
        with suppress(OSError):  # there is none yet
            if self._last.exists():
                _move(self._last, self._certain)
            os.link(self.checkpoint, self._last)

    def revert(self) -> None:
        """Return to the checkpoint that is certain, or to none; the curve, which may have rows of later steps, begins anew."""
        self.curve.unlink(missing_ok=True)
        self._last.unlink(missing_ok=True)
        if self._certain.exists():
            _move(self._certain, self.checkpoint)
        else:
            self.checkpoint.unlink(missing_ok=True)

    @property
    def _last(self) -> Path:
        """The checkpoint that was there when the input was last seen as it was."""
        return self.checkpoint.with_suffix(".last")

    @property
    def _certain(self) -> Path:
        """The one of the time before."""
        return self.checkpoint.with_suffix(".certain")


def checkpointed(
    at: Place, phase: str, program: Callable[[Any], None], curve: Curve, *, device: str, title: str
) -> RankProgram:
    """Return a program as the driver takes it, with its checkpoint kept and its curve shown."""
    files = curve.files
    return RankProgram(
        phase,
        program,
        Records(files.folder, phase),
        look=curve.look,
        keep=files.keep,
        revert=files.revert,
        device=device,
        title=title,
    )


@dataclass
class Curve:
    """Shows what rank 0 records.

    Parameters
    ----------
    at : Place
        The run.
    files : ProgramFiles
        Its files.
    steps : int
        Steps of the program.
    word : str
        The noun for a step.
    """

    at: Place
    files: ProgramFiles
    steps: int
    word: str
    rows: list[CurveRow] = field(default_factory=list)
    step: int = 0

    def look(self) -> int:
        """Report new rows of the curve; return the number of steps that are done."""
        try:
            step, rows = read_curve(self.files.curve)
        except OSError:  # a network file system that another machine writes to
            return self.step
        self.step = step
        if rows != self.rows:
            is_new = len(rows) > len(self.rows)
            self.rows = rows
            self.at.report_row(rows, self.steps)
            with suppress(OSError):
                self.at.directory.write_iterations(rows)
            if is_new and (len(rows) % REPORTED == 0 or step == self.steps):
                self._report(rows[-1])
        return step

    def _report(self, row: Mapping[str, float]) -> None:
        self.at.report(f"{self.word} {row['iteration']:,.0f} of {self.steps:,}: {describe_figures(row)}")


def _move(file: Path, place: Path) -> None:
    """Move a file; of two names of one file a rename removes neither."""
    os.replace(file, place)
    file.unlink(missing_ok=True)
