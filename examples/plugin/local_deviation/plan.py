"""The plan of the job, and its passes: squares into a scratch array, the deviation, the overview."""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy

from halotile.errors import InputError
from halotile.graphs.kinds.base import (
    Gather,
    Need,
    OutputArray,
    OutputState,
    Pass,
    PassCount,
    Planned,
    PlanRequest,
    Records,
    RunView,
    Sums,
    Work,
)
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.choices import check_paths
from halotile.graphs.plans.cutting import Geometry, block_unit, blocks_for, layout_like
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import IMPORTS_BYTES, PROCESS
from halotile.graphs.plans.plan import place_job
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout, ShardWriter, Vectors
from halotile.tasks.image_task import ImageTask, View
from halotile.tasks.inner_tiles import Roles
from local_deviation import LocalDeviation
from local_deviation.images import Deviation, Halved, Squares

SMALLER = "a smaller output.shard"
HELD = 8
"""Images of a block, in double precision, that a worker holds at once: an estimate."""


def plan(job: LocalDeviation, state: OutputState, request: PlanRequest) -> Planned:
    """Decide the sizes of a job."""
    placement = place_job(job, None)
    source = open_source(job.input.path, level=job.input.level, dataset=job.input.dataset, axes=job.input.axes)
    if len(source.shape) != 2:
        raise InputError(f"input.path is {job.input.path}, of {len(source.shape)} axes. Give an image of two.")
    halved = tuple(-(-n // 2) for n in source.shape)
    blocks = state.previous["identity"]["blocks"] if state.previous else (None, None)
    deviation, overview = (
        _output(path, key, placement.job, source, shape, earlier)
        for path, key, shape, earlier in zip(
            (state.output, Path(os.path.abspath(job.overview))),
            ("output.path", "overview"),
            (source.shape, halved),
            blocks,
            strict=True,
        )
    )
    for output in (deviation, overview):
        check_paths(source.path, output.path, output.key)
    work = DeviationWork(source, deviation, overview, job.radius)
    identity = {
        "input": source.fingerprint(),
        "radius": job.radius,
        "outputs": [each.layout.to_json() for each in work.outputs],
        "blocks": [list(each.grid.block) for each in work.outputs],
        "code": code_versions() | {"scipy": scipy.__version__},
    }
    pixels = 8 * HELD * math.prod(n + 2 * job.radius for n in deviation.grid.block)
    parts = {PROCESS: IMPORTS_BYTES, "its pixels": pixels}
    return Planned(
        placement=placement,
        work=work,
        sources=(source,),
        identity=identity,
        needs=(Need(f"one block of {list(deviation.grid.block)}", parts, SMALLER),),
        smaller=SMALLER,
        scratch_bytes=work.scratch.size_bytes,
        scratch_inodes=deviation.layout.inodes,
        figures={"input": job.input.path, "radius": job.radius},
    )


def _output(
    path: OutputPath, key: str, job: LocalDeviation, source: Source, shape: tuple[int, ...], earlier: list[int] | None
) -> OutputArray:
    """Return an output of this shape, in the blocks of an earlier run or the largest that keep all workers busy."""
    geometry = Geometry(shape, shape, Roles(source.axes, (0, 1), None), 1, 1)
    wanted = replace(job.output, path=str(path))
    memory = parse_bytes(job.run.memory_per_worker)
    layout = layout_like(source, wanted, geometry, np.dtype("float32"), memory)
    block = blocks_for(geometry, block_unit(geometry, layout.shard), job.run.count, earlier)[0]
    grid = Grid(shape, tuple(map(min, block, shape)), ((0, 0),) * 2)
    return OutputArray(path, layout, grid, job.output.overwrite, key)


@dataclass(frozen=True)
class DeviationWork(Work):
    """The outputs and passes of a job."""

    source: Source
    deviation: OutputArray
    overview: OutputArray
    radius: int

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The deviation, and its overview."""
        return (self.deviation, self.overview)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """Three, the last over another grid."""
        grids = {"squares": self.deviation.grid, "deviation": self.deviation.grid, "overview": self.overview.grid}
        return tuple(PassCount(phase, grid) for phase, grid in grids.items())

    @property
    def scratch(self) -> Vectors:
        """The squares, stored between two passes."""
        layout = Layout.from_json(self.deviation.layout.to_json() | {"dtype": "float64"})
        folder = RunDirectory.beside(self.deviation.path).state_path
        return Vectors(folder / "squares", layout, {"squares": 1})

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        """Yield the three passes."""
        scratch = self.scratch
        scratch.create()
        records = Records(scratch.folder, "squares", (scratch.path("squares", 0),), scratch.layout)
        squares = Squares(self.source)
        yield Pass("squares", _writing(scratch.writer("squares", 0), squares, self.deviation.grid), records)
        deviation = Deviation(self.source, scratch.open("squares", 0), self.radius)
        for output, image in ((self.deviation, deviation), (self.overview, Halved(deviation))):
            phase = "deviation" if output is self.deviation else "overview"
            yield Pass(phase, _writing(ShardWriter(output.path, output.layout), image, output.grid), output)


def _writing(writer: ShardWriter, image: Readable, grid: Grid) -> ImageTask:
    """Return the task that writes an image block by block."""
    return ImageTask(grid=grid, images=((writer, image),), sums=(), stored=(), view=View(), denoised=(), overlap=False)
