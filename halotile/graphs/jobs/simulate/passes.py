"""The passes of a simulation: one for each measurement."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from halotile.graphs.kinds.base import Gather, OutputArray, Pass, PassCount, RunView, Sums, Work
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.image_task import ImageTask
from halotile.tasks.noise.simulated import Simulated

PHASE = "simulate"


@dataclass(frozen=True)
class SimulateWork(Work):
    """Measurements, each an output of its own."""

    measurements: tuple[tuple[OutputArray, Simulated], ...]
    overlap: bool

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The measurements."""
        return tuple(output for output, _ in self.measurements)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """One pass for each measurement."""
        return tuple(PassCount(PHASE, output.grid) for output in self.outputs)

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        """Yield a pass for each measurement. Nothing is prefetched: an operator may read elsewhere than it writes."""
        for number, (output, simulated) in enumerate(self.measurements):
            task = ImageTask(
                grid=output.grid,
                images=((ShardWriter(output.path, output.layout), simulated),),
                overlap=self.overlap,
            )
            title = f" while {output.path.name} was made"
            yield Pass(PHASE, task, output, number, title)
