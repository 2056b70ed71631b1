"""The plan of simulated measurements: each opened and sized, then identified together."""

import math
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.costs import bytes_of_operator
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.reconstruct.measurements import (
    check_kernels,
    describe_operator,
    files_of,
    make_operators,
    sources_in,
    written,
)
from halotile.graphs.jobs.simulate.job import Simulation
from halotile.graphs.kinds import base
from halotile.graphs.kinds.sections import Output, parse_bytes
from halotile.graphs.plans.choices import check_decoding, check_whole, kept_bytes
from halotile.graphs.plans.cutting import Geometry, axes_like, block_unit, blocks_for, layout_like, overlap_pays
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import IMPORTS_BYTES, PROCESS
from halotile.graphs.plans.notes import note_of_packing
from halotile.graphs.plans.plan import place_job
from halotile.storage.arrays import Source, open_source, planes_last
from halotile.storage.grid import Grid
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.storage.views import checked
from halotile.tasks.image_task import ImageTask, Shared
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.noise.simulated import Simulated
from halotile.tasks.operators.base import Operator, with_engine, working_dtype

PHASE = "simulate"


@dataclass(frozen=True)
class SimulateWork(base.Work):
    """Measurements, each an output of its own."""

    measurements: tuple[tuple[base.OutputArray, Simulated], ...]
    overlap: bool

    @property
    def outputs(self) -> tuple[base.OutputArray, ...]:
        """The measurements."""
        return tuple(output for output, _ in self.measurements)

    @property
    def passes(self) -> tuple[base.PassCount, ...]:
        """One pass for each measurement."""
        return tuple(base.PassCount(PHASE, output.grid) for output in self.outputs)

    def run(self, at: base.RunView) -> Generator[base.Pass | base.Gather, base.Sums, None]:
        """Yield a pass for each measurement. Nothing is prefetched: an operator may read elsewhere than it writes."""
        for number, (output, simulated) in enumerate(self.measurements):
            task = ImageTask(
                grid=output.grid, images=((ShardWriter(output.path, output.layout), simulated),), overlap=self.overlap
            )
            title = f" while {output.path.name} was made"
            yield base.Pass(PHASE, task, output, number, title)


WINDOWS_AT_ONCE = 10  # images of a block's window that an operator and its noise hold at once: an estimate
SMALLER = "a smaller output.shard"


@dataclass(frozen=True)
class _Measurement:
    """One measurement, sized."""

    choice: OperatorChoice
    operator: Operator
    output: base.OutputArray
    simulated: Simulated
    needed_bytes: int

    @property
    def need(self) -> base.Need:
        """Memory that one worker holds during a block of it."""
        return base.Need(
            f"one block of {list(self.output.grid.block)} of {self.output.path}",
            {PROCESS: IMPORTS_BYTES, "the pixels": self.needed_bytes - IMPORTS_BYTES},
            SMALLER,
        )


def plan_simulation(job: Simulation, state: base.OutputState, request: base.PlanRequest) -> base.Planned:
    """Decide every size of the measurements."""
    placement = place_job(job, None)
    job = placement.job
    reference = planes_last(open_source(job.reference))
    check_whole(reference.path)
    check_decoding([reference], job.run)
    operators = make_operators(job.operators, job)
    check_kernels(operators, reference.shape)
    measurements = tuple(
        _measurement(job, number, operator, reference, state.previous) for number, operator in enumerate(operators)
    )
    work = SimulateWork(tuple((m.output, m.simulated) for m in measurements), overlap_pays(job.run))
    whole_paths = [written(replace(choice, data=os.path.abspath(choice.data))) for choice in job.operators]
    return base.Planned(
        placement=placement,
        work=work,
        sources=(reference, *(source for operator in operators for source in sources_in(operator))),
        files=tuple(files_of(job.operators)),
        identity=_identity(job, reference, measurements),
        needs=tuple(measurement.need for measurement in measurements),
        smaller=SMALLER,
        given={"operators": whole_paths},
        figures={
            "reference": job.reference,
            "shape": list(reference.shape),
            "dtype": measurements[0].output.layout.dtype,
            "noise": asdict(job.noise),
            "measurements": [
                f"{measurement.output.path}: {measurement.operator.name} with {job.noise.describe(float(measurement.choice.noise_sigma))}"
                for measurement in measurements
            ],
        },
        notes=(
            *reference.remarks,
            *note_of_packing(reference, "simulated", "The measurements are in them too, and name no packing"),
        ),
        discards_others=job.output.overwrite,
    )


def _measurement(
    job: Simulation, number: int, operator: Operator, reference: Source, previous: Mapping[str, Any] | None
) -> _Measurement:
    choice = job.operators[number]
    dtype = working_dtype(reference.dtype)
    try:
        shape = operator.measured(reference.shape)
    except ConfigError as error:
        raise ConfigError(f"operators[{number}]: {error}") from None
    tiled = range(max(0, len(shape) - 2), len(shape))
    roles = Roles(axes_like(reference, len(shape)), tuple(tiled), None)
    geometry = Geometry(shape, shape, roles, 1, 1)
    path = Path(os.path.abspath(choice.data))
    cut = job.output
    storage = Output(path=str(path), format="zarr", shard=cut.shard, chunk=cut.chunk, codec=cut.codec)
    if len(tiled) == 1:  # the sizes in the job are for planes
        storage = replace(storage, shard="auto", chunk="auto")
    layout = layout_like(reference, storage, geometry, dtype, parse_bytes(job.run.memory_per_worker))
    known = previous["identity"]["operators"].get(str(number), {}) if previous else {}
    block, needed = _block(job, geometry, layout, operator, reference, known.get("block"))
    poisson = job.noise.name == "poisson"
    simulated = Simulated(
        with_engine(operator, dtype, job.exact).forward(Shared(checked(reference, "reference"), operator.reach)),
        job.noise.name,
        level=job.noise.gain if poisson else float(choice.noise_sigma),
        background=job.noise.background if poisson else 0.0,
        seed=job.noise.seed,
        operator=number,
    )
    grid = Grid(shape, block, ((0, 0),) * len(block))
    output = base.OutputArray(path, layout, grid, job.output.overwrite, key=f"operators[{number}].data")
    return _Measurement(choice, operator, output, simulated, needed + 2 * kept_bytes([reference]))


def _block(
    job: Simulation,
    geometry: Geometry,
    layout: Layout,
    operator: Operator,
    reference: Source,
    earlier: Sequence[int] | None,
) -> tuple[tuple[int, ...], int]:
    """Return the largest block that fits the memory of a worker, or the smallest there is, with the memory it needs.

    A resumed run keeps its block, ``earlier``. An operator that sees the whole image measures in one block: otherwise it would read the whole image for
    each block.
    """
    if operator.kind == "whole":
        size = np.dtype(layout.dtype).itemsize
        image, measured = size * math.prod(reference.shape), size * math.prod(geometry.shape)
        needed = bytes_of_operator(operator, reference.shape, size, measured)
        return geometry.shape, IMPORTS_BYTES + image + needed + 2 * measured
    unit = block_unit(geometry, layout.shard)
    sized = [
        (block, _bytes_of(block, layout, operator)) for block in blocks_for(geometry, unit, job.run.count, earlier)
    ]
    allowed = parse_bytes(job.run.memory_per_worker)
    block, needed = next(((b, size) for b, size in sized if size <= allowed), sized[-1])
    return tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)), needed


def _bytes_of(block: tuple[int, ...], layout: Layout, operator: Operator) -> int:
    """Return the memory of one block: an operator that reduces images reads more of them than it writes."""
    factor = getattr(operator, "factor", 1)
    window = math.prod(n * factor + 2 * operator.reach for n in block[-2:]) * math.prod(block[:-2])
    return IMPORTS_BYTES + window * np.dtype(layout.dtype).itemsize * WINDOWS_AT_ONCE


def _identity(job: Simulation, reference: Source, measurements: tuple[_Measurement, ...]) -> dict[str, Any]:
    """Return everything that can change a bit of the measurements."""
    return {
        "operators": {
            str(number): describe_operator(measurement.operator)
            | {
                "noise_sigma": measurement.choice.noise_sigma,
                "layout": measurement.output.layout.to_json(),
                "block": list(measurement.output.grid.block),
            }
            for number, measurement in enumerate(measurements)
        },
        "reference": reference.fingerprint(),
        "noise": asdict(job.noise),
        "exact": job.exact,
        "code": code_versions(),
    }
