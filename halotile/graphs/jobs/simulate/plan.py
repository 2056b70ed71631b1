"""The planner of simulated measurements: what each operator of a job is to measure, how it is cut, where it goes."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError, DiskRefused, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.jobs.reconstruct.memory import bytes_of_operator
from halotile.graphs.jobs.reconstruct.operator_checks import check_kernels
from halotile.graphs.jobs.reconstruct.operators import describe_operator, make_operators, sources_in
from halotile.graphs.jobs.sections import Cluster, OperatorChoice, Output, Reconstruction, Run, parse_bytes
from halotile.graphs.jobs.simulate.noise import NoiseChoice
from halotile.graphs.plans.cutting import overlap_pays
from halotile.graphs.plans.devices import cluster_for
from halotile.graphs.plans.memory import IMPORTS_BYTES, MIB
from halotile.graphs.plans.plan import check_inodes, existing_parent, run_directory_of
from halotile.graphs.plans.sizes import Geometry, axes_like, block_unit, candidate_blocks, layout_like
from halotile.graphs.plans.worker_count import check_allocation, with_workers
from halotile.graphs.rules.combinations import check_reconstruction
from halotile.graphs.runs.identity import code_versions, fingerprint
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.noise.simulated import Simulated
from halotile.tasks.operators.base import Operator, with_engine, working_dtype
from halotile.tasks.roles import Roles
from halotile.tasks.shared import Shared
from halotile.tasks.step import StepTask, View

MAKING = ".making"
"""What is added to the name of a measurement until it is whole."""
WINDOWS_AT_ONCE = 10
"""Images of a block's window that an operator and its noise hold at once: an estimate."""
OTHER_FORMATS = (".npy", ".tif", ".tiff", ".h5", ".hdf5", ".png")


@dataclass(frozen=True)
class SimulationPlan:
    """One measurement that can be made: a run whose output gets its name when it is whole."""

    measured: Simulated
    sources: tuple[Source, ...]
    """The true image, and what the operator reads."""
    data: Path
    told: str
    """The measurement in words."""
    grid: Grid
    layout: Layout
    run: Run
    cluster: Cluster
    """Where its workers live."""
    identity: dict[str, Any]
    fresh: bool
    window_bytes: int
    """The most that one block takes."""
    overwrite: bool = False
    """Whether measurements that are there may go."""

    sweeps = 1
    same_inputs = ()

    @property
    def output(self) -> Path:
        """Where it lies until it is whole."""
        return self.data.with_name(self.data.name + MAKING)

    @property
    def wanted(self) -> Output:
        """The output as it is asked for: what an earlier call was about to make may go."""
        return Output(path=str(self.output), overwrite=RunDirectory(self.run_directory).claims_output())

    @property
    def run_directory(self) -> Path:
        """The directory beside it, until then."""
        return run_directory_of(self.output)

    @property
    def fingerprint(self) -> str:
        """Digest of the identity."""
        return fingerprint(self.identity)

    @property
    def output_bytes(self) -> int:
        """The most that it can take."""
        return self.layout.size_bytes

    @property
    def task(self) -> StepTask:
        """What a worker does with a block. Nothing is read ahead: an operator may look elsewhere than it writes."""
        return StepTask(
            grid=self.grid,
            images=((ShardWriter(self.output, self.layout), self.measured),),
            sums=(),
            stored=(),
            view=View(),
            denoised=(),
            overlap=overlap_pays(self.run),
        )

    def check_fits(self) -> None:
        """Refuse a block that needs more memory than a worker may use.

        Raises
        ------
        MemoryRefused
            With the figures, and what to write instead.
        """
        if self.window_bytes > parse_bytes(self.run.memory_per_worker):
            raise MemoryRefused(
                f"run.memory_per_worker is {self.run.memory_per_worker}; one block of {list(self.grid.block)} of "
                f"{self.data} needs {bytes_text(self.window_bytes)}. Write run.memory_per_worker: "
                f"{-(-self.window_bytes // MIB)}MiB, or a smaller output.shard."
            )

    def reads(self) -> Iterator[Path]:
        """Nothing that the planner has not looked after."""
        yield from ()

    def job_json(self) -> dict[str, Any]:
        """What is made."""
        return {"simulate": self.identity}

    def resolved_json(self) -> dict[str, Any]:
        """What is made."""
        return self.job_json()

    def summary(self) -> dict[str, Any]:
        """The figures of the plan."""
        return {
            "output": str(self.data),
            "shape": list(self.grid.shape),
            "dtype": self.layout.dtype,
            "blocks": len(self.grid),
            "block": list(self.grid.block),
            "noise": self.identity["noise"],
        }


def make_simulation_plans(
    job: Reconstruction, noise: NoiseChoice, *, overwrite: bool = False
) -> tuple[SimulationPlan, ...]:
    """Decide how the measurements of a job are made from its ``reference``.

    Raises
    ------
    ConfigError, InputError
        When the job cannot be simulated as it is written.
    OutputRefused
        When something stands where a measurement is to go, or must not be replaced.
    MemoryRefused, DiskRefused
        When it does not fit.
    """
    check_reconstruction(job)
    job, _ = with_workers(job, cluster_for(job.cluster, "cpu"), "cpu")
    if job.reference is None:
        raise ConfigError(
            "reference is not there: measurements are simulated from the true image. Write reference: truth.zarr."
        )
    _check_places(job, overwrite=overwrite)
    reference = open_source(job.reference)
    operators = make_operators(job)
    check_kernels(operators, reference.shape)
    plans = tuple(
        replace(_plan_of(job, noise, number, operator, reference), overwrite=overwrite)
        for number, operator in enumerate(operators)
    )
    for plan in plans:
        check_allocation(plan.run, plan.cluster)
        plan.check_fits()
    _check_disk(plans)
    return plans


def _check_places(job: Reconstruction, *, overwrite: bool) -> None:
    """Refuse paths where no measurement can be made; nothing is touched."""
    taken: dict[str, str] = {os.path.realpath(str(job.reference)): "the reference"}
    for number, choice in enumerate(job.operators):
        key = f"operators[{number}].data"
        if "://" in choice.data or Path(choice.data).suffix.lower() in OTHER_FORMATS:
            better = Path(choice.data).with_suffix(".zarr").name
            raise ConfigError(
                f"{key} is {choice.data}: measurements are written as Zarr on a disk of this machine. Write {better}, say."
            )
        check_place(choice.data, overwrite=overwrite, key=key, remedy="add --overwrite")
        place = os.path.realpath(choice.data)
        if place in taken:
            raise ConfigError(f"{key} is {choice.data}, and so is {taken[place]}. Write another path.")
        taken[place] = key


def _check_disk(plans: tuple[SimulationPlan, ...]) -> None:
    needed = sum(plan.output_bytes for plan in plans)
    place = existing_parent(plans[0].data)
    check_inodes(sum(plan.layout.inodes for plan in plans), place)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DiskRefused(
            f"the measurements take up to {bytes_text(needed)} and {place} has {bytes_text(free)} free. "
            "Write their data on a larger disk."
        )


def _plan_of(
    job: Reconstruction, noise: NoiseChoice, number: int, operator: Operator, reference: Source
) -> SimulationPlan:
    choice = job.operators[number]
    dtype = working_dtype(reference.dtype)
    shape = _measured(operator, number, reference)
    tiled = range(max(0, len(shape) - 2), len(shape))
    roles = Roles(axes_like(reference, len(shape)), tuple(tiled), None)
    geometry = Geometry(shape, shape, roles, 1, 1)
    wanted = replace(job.output, dtype="auto")
    if len(tiled) == 1:  # the sizes of the job are those of planes
        wanted = replace(wanted, shard="auto", chunk="auto")
    layout = layout_like(reference, wanted, geometry, dtype, parse_bytes(job.run.memory_per_worker))
    block, window_bytes = _block(job, geometry, layout, operator, reference)
    measured = _simulated(job, noise, number, with_engine(operator, dtype, job.exact), reference)
    data = Path(os.path.abspath(choice.data))
    identity = {
        "operator": describe_operator(operator),
        "number": number,
        "reference": reference.fingerprint(),
        "noise": asdict(noise) | {"level": measured.level, "background": measured.background},
        "exact": job.exact,
        "layout": layout.to_json(),
        "block": list(block),
        "code": code_versions(),
    }
    making = data.with_name(data.name + MAKING)
    before = RunDirectory(run_directory_of(making)).read_valid_plan() if making.exists() else None
    return SimulationPlan(
        measured=measured,
        sources=(reference, *sources_in(operator)),
        data=data,
        told=f"{data}: {operator.name} with {noise.describe(choice.noise_sigma)}",
        grid=Grid(shape, block, ((0, 0),) * len(block)),
        layout=layout,
        run=job.run,
        cluster=cluster_for(job.cluster, "cpu"),
        identity=identity,
        fresh=before is None or before.get("fingerprint") != fingerprint(identity),
        window_bytes=window_bytes,
    )


def _simulated(
    job: Reconstruction, noise: NoiseChoice, number: int, operator: Operator, reference: Source
) -> Simulated:
    choice: OperatorChoice = job.operators[number]
    poisson = noise.name == "poisson"
    return Simulated(
        operator.forward(Shared(reference, operator.reach)),
        noise.name,
        level=noise.gain if poisson else choice.noise_sigma,
        background=job.fidelity.background if poisson else 0.0,
        seed=noise.seed,
        operator=number,
    )


def _measured(operator: Operator, number: int, reference: Source) -> tuple[int, ...]:
    """The shape of a measurement of the reference."""
    try:
        return operator.measured(reference.shape)
    except ConfigError as error:
        raise ConfigError(f"operators[{number}]: {error}") from None


def _block(
    job: Reconstruction, geometry: Geometry, layout: Layout, operator: Operator, reference: Source
) -> tuple[tuple[int, ...], int]:
    """The largest block that fits the memory of a worker, or the smallest there is, and what it takes.

    An operator that sees the whole image measures in one block: it would see all of it again for each.
    """
    if operator.kind == "whole":
        size = np.dtype(layout.dtype).itemsize
        image, measured = size * math.prod(reference.shape), size * math.prod(geometry.shape)
        needed = bytes_of_operator(operator, reference.shape, size, measured)
        return geometry.shape, IMPORTS_BYTES + image + needed + 2 * measured
    unit = block_unit(geometry, layout.shard)
    sized = [
        (block, _bytes_of(block, layout, operator))
        for block in candidate_blocks(geometry, unit, job.run.count)
    ]
    allowed = parse_bytes(job.run.memory_per_worker)
    block, window_bytes = next(((b, size) for b, size in sized if size <= allowed), sized[-1])
    return tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)), window_bytes


def _bytes_of(block: tuple[int, ...], layout: Layout, operator: Operator) -> int:
    """What one block takes: an operator that makes images smaller sees more of them than it writes."""
    factor = getattr(operator, "factor", 1)
    window = math.prod(n * factor + 2 * operator.reach for n in block[-2:]) * math.prod(block[:-2])
    return IMPORTS_BYTES + window * np.dtype(layout.dtype).itemsize * WINDOWS_AT_ONCE
