"""The plan of a reconstruction: what is computed how, in which blocks, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError, DiskRefused, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.iterations.iterate import COPIES_TO_GO_BACK, Target
from halotile.graphs.jobs.reconstruct.forms import Form
from halotile.graphs.jobs.reconstruct.memory import StepFootprint, footprint_of_operator, footprint_of_step
from halotile.graphs.jobs.reconstruct.operators import written
from halotile.graphs.jobs.reconstruct.prior import denoised_of
from halotile.graphs.jobs.reconstruct.traffic import BESIDE, computed_twice, pixels_read, traffic_of
from halotile.graphs.jobs.sections import Cluster, DenoiserChoice, Output, Reconstruction, Run, parse_bytes
from halotile.graphs.plans.cutting import overlap_pays
from halotile.graphs.plans.gpu_trials import written_tiles
from halotile.graphs.plans.memory import MIB, check_share
from halotile.graphs.plans.opening import describe_denoiser
from halotile.graphs.plans.plan import check_inodes, existing_parent, free_inodes
from halotile.graphs.plans.worker_count import Requested, check_allocation
from halotile.graphs.runs.identity import fingerprint
from halotile.graphs.solvers.base import Problem, Solver
from halotile.storage.arrays import Source
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout
from halotile.storage.sharded.vectors import Vectors
from halotile.tasks.operators.base import working_dtype
from halotile.tasks.priors import Prior
from halotile.tasks.trials.gpu_findings import Tuned

SMALLER = "a smaller tile.size, tile.block or output.shard"
"""What needs less memory."""
NORM_ITERATIONS = 15
"""Sweeps that find the step size."""


@dataclass(frozen=True)
class ReconstructionPlan:
    """A reconstruction that can start."""

    job: Reconstruction
    cluster: Cluster
    """Where its workers live: that of the job, or what is better for it where the job leaves that open."""
    form: Form
    prior: Prior
    io_threads: int
    """Threads of a worker that read and write the pieces of a block side by side."""
    tuned: Tuned | None
    """What a trial of the device found for the prior, where there was one."""
    solver: Solver
    start: Readable
    target: Target
    grid: Grid
    layout: Layout
    output: Path
    run_directory: Path
    identity: dict[str, Any]
    differs: tuple[str, ...]
    resumes: bool
    fresh: bool
    sources: tuple[Source, ...]
    """Measurements, start, reference, and the images that operators read."""
    files: tuple[Path, ...]
    free_disk_bytes: int
    machine_bytes: int | None
    """Memory that the workers share; None where they run on other machines."""
    requested: Requested
    """How many workers the job asks for."""
    notes: tuple[str, ...] = ()
    same_inputs: tuple[dict[str, Any], ...] = ()

    @property
    def wanted(self) -> Output:
        """The output as it was asked for."""
        return self.job.output

    @property
    def run(self) -> Run:
        """How it is run."""
        return self.job.run

    @property
    def halo(self) -> int:
        """How far, in pixels, the sweep of a step looks."""
        return self.form.per_sweep * (self.prior.reach() + self.form.fused_reach)

    @property
    def overlap(self) -> bool:
        """Whether reading and writing go on beside the computation."""
        return overlap_pays(self.run)

    @property
    def finds_step(self) -> bool:
        """Whether the step size has to be found out first."""
        return self.job.solver.step == "auto" and self.takes_steps

    @property
    def takes_steps(self) -> bool:
        """Whether the solver follows slopes, by steps that can be too long."""
        return self.solver.name != "cg"

    @property
    def sweeps(self) -> int:
        """The iterations, those that find the step size, and the writing of the output."""
        return self.before_iterations + self.job.solver.iterations // self.form.per_sweep + 1

    @property
    def before_iterations(self) -> int:
        """Sweeps that come before the first iteration."""
        return self.before_solver + self.solver.sweeps_before

    @property
    def before_solver(self) -> int:
        """Sweeps that come before those of the solver."""
        return NORM_ITERATIONS * self.finds_step + (self.form.folded is not None)

    @property
    def state_layout(self) -> Layout:
        """That of the solver's images: as they are computed."""
        dtype = str(working_dtype(np.result_type(*(term.measurement.dtype for term in self.form.terms))))
        return replace(self.layout, dtype=dtype, ome=False, omero=None, name=None, translation=())

    def vectors(self, solver: Solver, folder: str) -> Vectors:
        """Where a solver's images lie: of an image that may diverge as many copies as it takes to go back."""
        copies = dict(solver.vectors)
        if "x" in copies and self.takes_steps:
            copies["x"] = max(copies["x"], COPIES_TO_GO_BACK)
        return Vectors(RunDirectory(self.run_directory).state_path / folder, self.state_layout, copies)

    @property
    def output_bytes(self) -> int:
        """The most that the output can take."""
        return self.layout.size_bytes

    @property
    def scratch_bytes(self) -> int:
        """The most that the solver's images take."""
        staged = self.state_layout.size_bytes if self.form.apart or self.form.whole else 0
        aside = self.state_layout.size_bytes if self.takes_steps else 0
        return self.vectors(self.solver, "").size_bytes + aside + staged

    @property
    def inodes(self) -> int:
        """Files and folders, those of the solver's images included."""
        return self.layout.inodes * (1 + self.scratch_bytes // self.state_layout.size_bytes)

    @property
    def footprint(self) -> StepFootprint:
        """What one worker holds at once, where it holds most: a block of a sweep, or an operator that sees everything."""
        return max(self.footprints(), key=lambda footprint: footprint.total_bytes)

    def footprints(self) -> Iterator[StepFootprint]:
        """What one worker holds in each kind of task."""
        step = footprint_of_step(
            self.grid,
            self.form,
            self.prior,
            self.solver,
            self.state_layout,
            overlap=self.overlap,
            io_threads=self.io_threads,
            measured=self.tuned.host_bytes if self.tuned else None,
        )
        yield step
        denoised, dtype = denoised_of(self.prior), np.dtype(self.state_layout.dtype)
        on_gpu = denoised is not None and denoised.device != "cpu"
        for term in self.form.whole:
            yield footprint_of_operator(term, self.grid.shape, dtype, step, on_gpu=on_gpu)

    @property
    def memory_bytes(self) -> int:
        """The projected peak of one worker."""
        return self.footprint.total_bytes

    @property
    def fingerprint(self) -> str:
        """Digest of the identity."""
        return fingerprint(self.identity)

    def step_for(self, square: float) -> float:
        """A step size that does not diverge, where ``|A|²``, weighted by the curvature of the fidelity, is this.

        Solvers that follow the slope of the prior beside that of the fidelity go more slowly for it. The curvature of other
        fidelities than squares is that at the start, and grows where the image falls below it: the step is half as long.

        Raises
        ------
        ConfigError
            When the operators give nothing of any image.
        """
        if square <= 0:
            raise ConfigError(
                "|A|² is 0: the operators give 0 for every image, so the data tell nothing of it. Look at their masks and "
                "weights, and write operators that see something."
            )
        steepness = self.prior.steepness() if self.solver.name in BESIDE else 0.0
        is_square = all(term.at is None for term in self.form.terms)
        return (1.0 if is_square else 0.5) / (square + steepness)

    def problem(
        self, step_size: float = 1.0, backprojection: Readable | None = None, misfit_of_zero: float = 0.0
    ) -> Problem:
        """What the solver works on; the normal form needs the backprojection, with the misfit that belongs to it."""
        needs_it = self.form.folded is not None
        form = replace(self.form, folded=None) if needs_it and backprojection is None else self.form
        untold = form.map("gradient", backprojection, told=False) if form.per_sweep > 1 else None
        return Problem(
            shape=self.grid.shape,
            dtype=np.dtype(self.state_layout.dtype),
            gradient=form.map("gradient", backprojection),
            normal=self.form.map("normal"),
            prior=self.prior,
            start=self.start,
            step_size=step_size,
            misfit_of_zero=misfit_of_zero,
            reach=form.fused_reach,
            tol=self.job.solver.tol,
            per_sweep=form.per_sweep,
            untold=untold,
        )

    def check_fits(self) -> None:
        """Refuse a plan that needs more memory or disk than there is.

        Raises
        ------
        MemoryRefused, DiskRefused
            With the figures, and what to write instead.
        """
        allowed = parse_bytes(self.job.run.memory_per_worker)
        step, *operators = self.footprints()
        if step.total_bytes > allowed:
            raise MemoryRefused(
                f"run.memory_per_worker is {self.job.run.memory_per_worker}; one block of {list(self.grid.block)} needs "
                f"{bytes_text(step.total_bytes)}, of which {step.describe()}. Write {self._enough(step)}, or {SMALLER}."
            )
        for term, needed in zip(self.form.whole, operators, strict=True):
            if needed.total_bytes > allowed:
                number = next(n for n, other in enumerate(self.form.terms) if other is term)
                raise MemoryRefused(
                    f"run.memory_per_worker is {self.job.run.memory_per_worker}; operators[{number}] ({term.operator.name}) "
                    f"sees the whole image of {list(self.grid.shape)}, and needs {bytes_text(needed.total_bytes)}, "
                    f"of which {needed.describe()}. Write {self._enough(needed)}, or an operator that looks a few pixels far."
                )
        check_allocation(self.run, self.cluster)
        check_share(self.run.count, self.machine_bytes, self.memory_bytes, self.footprint.describe(), SMALLER)
        if not self.resumes:
            check_inodes(self.inodes, existing_parent(self.output))
        taken = self.output_bytes + self.scratch_bytes
        if not self.resumes and taken > self.free_disk_bytes:
            raise DiskRefused(
                f"the output takes up to {bytes_text(self.output_bytes)} and the solver's images {bytes_text(self.scratch_bytes)}; "
                f"{existing_parent(self.output)} has {bytes_text(self.free_disk_bytes)} free. "
                "Write output.path on a larger disk."
            )

    @staticmethod
    def _enough(needed: StepFootprint) -> str:
        return f"run.memory_per_worker: {-(-needed.total_bytes // MIB)}MiB"

    def reads(self) -> Iterator[Path]:
        """The files that operators and the denoiser name."""
        yield from self.files

    def job_json(self) -> dict[str, Any]:
        """The job as a configuration: the same shape as the YAML, with an absolute output."""
        named = ("operators", "prior")
        plain = {f.name: getattr(self.job, f.name) for f in fields(self.job) if f.name not in named}
        parts = {name: _plainly(part) for name, part in plain.items()}
        parts["output"]["path"] = str(self.output)
        parts["run"]["workers"] = self.requested.workers
        parts["operators"] = [written(choice) for choice in self.job.operators]
        parts["prior"] = {f.name: getattr(self.job.prior, f.name) for f in fields(self.job.prior)}
        denoiser = self.job.prior.denoiser
        if isinstance(denoiser, DenoiserChoice):
            parts["prior"]["denoiser"] = {"name": denoiser.name, **denoiser.options}
        elif denoiser is not None:
            parts["prior"]["denoiser"] = describe_denoiser(denoiser)
        return {"version": 1, "job": "reconstruct", **parts}

    def resolved_json(self) -> dict[str, Any]:
        """The job as a configuration in which every size is decided; it makes the same output."""
        job = self.job_json()
        del job["allow_import"], job["import_folder"]
        shard, block = (list(sizes[-2:]) for sizes in (self.layout.shard, self.grid.block))
        job["shape"] = list(self.grid.shape)
        job["output"] |= {"shard": shard, "chunk": list(self.layout.chunk[-2:]), "dtype": self.layout.dtype}
        job["tile"] |= {"block": [-(-b // s) * s for b, s in zip(block, shard, strict=True)]}
        if denoised := denoised_of(self.prior):
            job["tile"] |= written_tiles(denoised)
        return job

    def summary(self) -> dict[str, Any]:
        """The figures of the plan, for people and for ``--json``."""
        dtype = np.dtype(self.state_layout.dtype)
        traffic = traffic_of(self.grid, self.form, self.prior, self.solver, dtype)
        return {
            "output": str(self.output),
            "shape": list(self.grid.shape),
            "dtype": self.layout.dtype,
            "operators": [term.operator.name for term in self.form.terms],
            "data": [choice.data for choice in self.job.operators],
            "form": self.form.describe(),
            "fidelity": self.job.fidelity.name,
            "prior": self.job.prior.name,
            "denoiser": self._denoiser,
            **self._tiles(),
            "solver": self.solver.name,
            "step": self.job.solver.step,
            "iterations": self.job.solver.iterations,
            "sweeps_before": self.before_iterations,
            "sweeps": self.sweeps,
            "blocks": len(self.grid),
            "block": list(self.grid.block),
            "shard": list(self.layout.shard),
            "chunk": list(self.layout.chunk),
            "codec": self.layout.codec,
            "halo": self.halo,
            "read_amplification": round(
                pixels_read(self.grid, self.form.view(self.prior.reach())) / math.prod(self.grid.shape), 4
            ),
            "passes": 2 if self.form.apart else 1,
            "per_sweep": self.form.per_sweep,
            "computed_twice": round(computed_twice(self.grid, self.layout.shard, self.form, self.prior), 4),
            "iteration_bytes": (traffic.unfused or traffic.fused) if self.form.apart else traffic.fused,
            "iteration_bytes_fused": traffic.fused,
            "iteration_bytes_unfused": traffic.unfused,
            "peak_memory_per_worker_bytes": self.memory_bytes,
            "memory_per_worker_bytes": parse_bytes(self.job.run.memory_per_worker),
            "output_bytes": self.output_bytes,
            "scratch_bytes": self.scratch_bytes,
            "free_disk_bytes": self.free_disk_bytes,
            "files": self.layout.files,
            "inodes": self.inodes,
            "free_inodes": free_inodes(existing_parent(self.output)),
            "workers": self.job.run.count,
            "workers_from": self.requested.why,
            "resumes": self.resumes,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }

    def _tiles(self) -> dict[str, Any]:
        """How the prior denoises, where it does."""
        denoised = denoised_of(self.prior)
        if denoised is None:
            return {}
        return {
            "device": denoised.device,
            "precision": denoised.precision,
            "tile": list(denoised.tiling.tile),
            "batch": denoised.tiling.batch,
            "device_memory_bytes": self.tuned.device_bytes
            if self.tuned and denoised.device != "cpu"
            else None,
            "tuned": self.tuned.to_json() if self.tuned else None,
        }

    @property
    def _denoiser(self) -> str | None:
        """The denoiser of the prior, in a word; None where there is none."""
        choice = self.job.prior.denoiser
        return getattr(choice, "name", type(choice).__name__) if choice is not None else None


def _plainly(part: Any) -> Any:
    """A section as a mapping, anything else as it is."""
    return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part
