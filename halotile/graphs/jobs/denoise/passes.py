"""The passes of a denoising job: one, over all blocks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from halotile.graphs.jobs.denoise.residual_check import inspect_residual
from halotile.graphs.kinds.base import Gather, Inspection, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.trials.gpu_findings import Tuned

PHASE = "denoise"
GPU_TASK_SECONDS = 10.0
"""Minimum duration of a task on a GPU, which is idle between the blocks of two tasks; a kill loses one task."""


@dataclass(frozen=True)
class DenoiseWork(Work):
    """A denoiser applied to every block of an image."""

    output: OutputArray
    task: DenoiseTask
    tuned: Tuned | None = None

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The denoised image."""
        return (self.output,)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """One pass over every block."""
        return (PassCount(PHASE, self.task.grid),)

    def inspect(self) -> Inspection:
        """Compare a few places of the result with the image."""
        return inspect_residual(self.task, self.output.path)

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        """Yield the one pass."""
        yield Pass(
            PHASE,
            self.task,
            self.output,
            task_seconds=None if self.task.device == "cpu" else GPU_TASK_SECONDS,
            seconds_per_block=self.tuned.seconds_per_block if self.tuned else None,
        )
