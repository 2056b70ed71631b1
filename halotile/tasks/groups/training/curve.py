"""Files between a program of ranks and its driver: the curve, rows of figures by step, and the steps that a loop asks for; and the bytes that were received."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.storage.disk.durable import DISK
from halotile.tasks.lazy import torch

if TYPE_CHECKING:
    from halotile.tasks.groups.group import TorchGroup


LOOK_SECONDS = 0.001
QUIET_SECONDS = 0.02  # time without a request after which the loop is taken to be busy with something else
# Longest time that other ranks wait for a word of rank 0, which they take to be lost after a longer one.
WORD_SECONDS = 5.0
WAIT, GO, END = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class StepRequests:
    """A file as long as the number of steps that were asked for, on a disk that all processes see."""

    path: Path  # file

    def ask(self, steps: int) -> None:
        """Ask for so many steps in all."""
        self.path.touch()
        os.truncate(self.path, steps)

    def end(self) -> None:
        """Ask for no more."""
        self._ended.touch()

    def await_step(self, step: int, group: TorchGroup, quiet: Callable[[], None]) -> bool:
        """Wait on all ranks until a step is asked for; return False once no more will be.

        ``step``: number of the step, from 0; ``group``: ranks; the first one looks; ``quiet``: called on rank 0 where the loop takes its
        time, again and again, and at the end.
        """
        while True:
            seen = self._look(step, quiet) if group.rank == 0 else WAIT
            word = float(group.broadcast(torch.tensor([seen], device=group.device)))
            if word != WAIT:
                return word == GO

    def _look(self, step: int, quiet: Callable[[], None]) -> float:
        began = time.monotonic()
        while (spent := time.monotonic() - began) < WORD_SECONDS:
            if self._ended.exists():
                quiet()
                return END
            if self.path.exists() and self.path.stat().st_size > step:
                return GO
            if spent > QUIET_SECONDS:
                quiet()
            time.sleep(LOOK_SECONDS)
        return WAIT

    @property
    def _ended(self) -> Path:
        return self.path.with_suffix(".end")


CurveRow = dict[str, float]


def write_curve(path: Path, step: int, rows: Sequence[CurveRow], *, is_awaited: bool = False) -> None:
    """Write the curve, for the driver to show; what is lost of it is recorded again, unless a loop waits for it."""
    with nullcontext() if is_awaited else suppress(OSError):
        DISK.write_file(path, [json.dumps({"step": step, "rows": rows}).encode()], sync=False)


def read_curve(path: Path) -> tuple[int, list[CurveRow]]:
    """The number of steps that are done and the rows of the curve; 0 and none where nothing was recorded."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # it is replaced as a whole
        return 0, []
    return int(content["step"]), list(content["rows"])


_received = [0]


def received_bytes() -> int:
    """Return the bytes that this process has received from other ranks in the steps of trainings."""
    return _received[0]


def count_received(size_bytes: int) -> None:
    """Count more received bytes."""
    _received[0] += size_bytes
