"""The planner of reconstructions: a job's operators, prior and solver as a problem, its sizes decided or refused."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DiskRefused, InputError, MemoryRefused
from halotile.graphs.agreement import check_reconstruction
from halotile.graphs.amounts import bytes_text
from halotile.graphs.cutting import overlap_pays
from halotile.graphs.forms import Form, choose_form
from halotile.graphs.further import identity_of, note_of
from halotile.graphs.identity import code_versions, differences, fingerprint
from halotile.graphs.iterate import Target
from halotile.graphs.job import DenoiserChoice, Output, Reconstruction, Run, parse_bytes
from halotile.graphs.memory import IMPORTS_BYTES, MIB
from halotile.graphs.paths import with_whole_paths
from halotile.graphs.plan import existing_parent, run_directory_of
from halotile.graphs.priors import cut_for_prior, denoiser_of, describe_prior, reach_of_prior
from halotile.graphs.resolve import check_paths, describe_denoiser
from halotile.graphs.sizes import (
    Geometry,
    block_unit,
    candidate_blocks,
    check_block,
    choose_chunk,
    choose_shard,
)
from halotile.graphs.solvers.base import Problem, Solver
from halotile.graphs.stack import (
    describe_operator,
    files_of,
    image_shape,
    make_operators,
    make_terms,
    notes_of,
    open_measurements,
    written,
)
from halotile.graphs.summary import summary_of
from halotile.registry import find
from halotile.storage.arrays import Source, open_source
from halotile.storage.grid import Grid
from halotile.storage.output import Layout
from halotile.storage.place import check_parents
from halotile.storage.rim import Readable
from halotile.storage.rundir import RunDirectory
from halotile.storage.vectors import Vectors
from halotile.storage.views import Constant
from halotile.tasks.operators.base import working_dtype
from halotile.tasks.priors import Prior
from halotile.tasks.roles import Roles

WINDOWS_AT_ONCE = 10
"""Images of a block's window that a step holds at once, besides the stored ones: an estimate, with the operators' scratch."""
NORM_ITERATIONS = 15
"""Sweeps that find the step size."""


@dataclass(frozen=True)
class ReconstructionPlan:
    """A reconstruction that can start."""

    job: Reconstruction
    form: Form
    prior: Prior
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
    files: tuple[Path, ...]
    free_disk_bytes: int
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
    def reach(self) -> int:
        """How far, in pixels, the operators look, there and back."""
        return self.form.reach

    @property
    def halo(self) -> int:
        """How far, in pixels, a step looks."""
        return self.prior.reach() + self.reach

    @property
    def overlap(self) -> bool:
        """Whether reading and writing go on beside the computation."""
        return overlap_pays(self.run)

    @property
    def finds_step(self) -> bool:
        """Whether the step size has to be found out first."""
        return self.job.solver.step == "auto" and self.solver.name != "cg"

    @property
    def sweeps(self) -> int:
        """The iterations, those that find the step size, and the writing of the output."""
        return self.before_iterations + self.job.solver.iterations + 1

    @property
    def before_iterations(self) -> int:
        """Sweeps that come before the first iteration."""
        return NORM_ITERATIONS * self.finds_step + (self.form.folded is not None)

    @property
    def state_layout(self) -> Layout:
        """That of the solver's images: as they are computed."""
        dtype = str(working_dtype(np.result_type(*(term.measurement.dtype for term in self.form.terms))))
        return replace(self.layout, dtype=dtype, ome=False, omero=None, name=None, translation=())

    def vectors(self, solver: Solver, folder: str) -> Vectors:
        """Where a solver's images lie."""
        return Vectors(
            RunDirectory(self.run_directory).state_path / folder, self.state_layout, solver.vectors
        )

    @property
    def output_bytes(self) -> int:
        """The most that the output can take."""
        return self.layout.size_bytes

    @property
    def scratch_bytes(self) -> int:
        """The most that the solver's images take."""
        return self.vectors(self.solver, "").size_bytes

    @property
    def memory_bytes(self) -> int:
        """The projected peak of one worker."""
        window = math.prod(n + 2 * self.halo for n in self.grid.block[-2:]) * math.prod(self.grid.block[:-2])
        itemsize = np.dtype(self.state_layout.dtype).itemsize
        read = sum(self.solver.vectors.values()) - len(self.solver.vectors)
        images = read + len(self.solver.vectors) + WINDOWS_AT_ONCE
        return IMPORTS_BYTES + window * itemsize * images

    @property
    def fingerprint(self) -> str:
        """Digest of the identity."""
        return fingerprint(self.identity)

    def problem(
        self, step_size: float = 1.0, backprojection: Readable | None = None, misfit_of_zero: float = 0.0
    ) -> Problem:
        """What the solver works on; the normal form needs the backprojection, with the misfit that belongs to it."""
        form = self.form if backprojection is not None else replace(self.form, folded=None)
        return Problem(
            shape=self.grid.shape,
            dtype=np.dtype(self.state_layout.dtype),
            gradient=lambda image: form.gradient(image, backprojection),
            normal=self.form.normal,
            prior=self.prior,
            start=self.start,
            step_size=step_size,
            misfit_of_zero=misfit_of_zero,
        )

    def check_fits(self) -> None:
        """Refuse a plan that needs more memory or disk than there is.

        Raises
        ------
        MemoryRefused, DiskRefused
            With the figures, and what to write instead.
        """
        allowed = parse_bytes(self.job.run.memory_per_worker)
        if self.memory_bytes > allowed:
            raise MemoryRefused(
                f"run.memory_per_worker is {self.job.run.memory_per_worker}; one block of {list(self.grid.block)} needs "
                f"{bytes_text(self.memory_bytes)}. Write run.memory_per_worker: {-(-self.memory_bytes // MIB)}MiB, "
                "or a smaller tile.block or output.shard."
            )
        needed = self.output_bytes + self.scratch_bytes
        if not self.resumes and needed > self.free_disk_bytes:
            raise DiskRefused(
                f"the output takes up to {bytes_text(self.output_bytes)} and the solver's images {bytes_text(self.scratch_bytes)}; "
                f"{existing_parent(self.output)} has {bytes_text(self.free_disk_bytes)} free. "
                "Write output.path on a larger disk."
            )

    def reads(self) -> Iterator[Path]:
        """The files that operators and the denoiser name."""
        yield from self.files

    def job_json(self) -> dict[str, Any]:
        """The job as a configuration: the same shape as the YAML, with an absolute output."""
        named = ("operators", "prior")
        plain = {f.name: getattr(self.job, f.name) for f in fields(self.job) if f.name not in named}
        parts = {name: _plainly(part) for name, part in plain.items()}
        parts["output"]["path"] = str(self.output)
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
        return job

    def to_json(self) -> dict[str, Any]:
        """What the run directory keeps of the plan."""
        return {
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "same_inputs": [],
            "layout": self.layout.to_json(),
            "block": list(self.grid.block),
            "summary": self.summary(),
        }

    def summary(self) -> dict[str, Any]:
        """The figures of the plan, for people and for ``--json``."""
        return summary_of(self)


def make_reconstruction_plan(
    job: Reconstruction, *, fresh: bool = False, refuse: bool = True
) -> ReconstructionPlan:
    """Decide every size of a reconstruction and check that it fits.

    Raises
    ------
    ConfigError, InputError, WeightsError
        When the job cannot be run as it is written.
    MemoryRefused, DiskRefused
        When it does not fit.
    """
    check_reconstruction(job)
    job = with_whole_paths(job)
    output = Path(os.path.abspath(job.output.path))
    check_parents(output)
    directory = RunDirectory(run_directory_of(output))
    previous = None if fresh else directory.whole_plan()
    operators = make_operators(job.operators)
    data = open_measurements(job.operators)
    given, reference = (open_source(path) if path else None for path in (job.start, job.reference))
    images = {key: image for key, image in (("start", given), ("reference", reference)) if image}
    shape = image_shape(operators, data, job.shape, (image.shape for image in images.values()))
    for key, other in images.items():
        _check_image(other, key, shape)
    image = Constant(shape, working_dtype(np.result_type(*(source.dtype for source in data))))
    for source in (*data, given, reference):
        if source is not None:
            check_paths(source, output)
    denoiser = denoiser_of(job)
    roles = _roles(data[0], shape)
    reach = reach_of_prior(job, denoiser, len(roles.spatial), previous)
    geometry = Geometry(shape, shape, roles, 1, reach.align)
    layout = _layout(job, data[0], geometry, image.dtype)
    block = _block(job, geometry, layout, previous)
    prior, grid = cut_for_prior(job, denoiser, image, geometry, reach, block)
    identity = {
        "operators": {
            str(number): describe_operator(operator)
            | {"data": source.fingerprint(), "noise_sigma": choice.noise_sigma}
            for number, (operator, source, choice) in enumerate(
                zip(operators, data, job.operators, strict=True)
            )
        },
        "fidelity": asdict(job.fidelity),
        "prior": describe_prior(job.prior, denoiser, reach),
        "probed": list(reach.probed) if reach.probed else None,
        "solver": identity_of(asdict(job.solver)),
        "start": given.fingerprint() if given else None,
        "reference": reference.fingerprint() if reference else None,
        "precision": job.run.precision,
        "exact": job.exact,
        "layout": layout.to_json(),
        "block": list(grid.block),
        "code": {**code_versions(), **(denoiser.check() if denoiser else {})},
    }
    differs = tuple(differences(previous["identity"], identity)) if previous else ()
    resumes = previous is not None and not differs
    plan = ReconstructionPlan(
        job=job,
        form=choose_form(
            make_terms(job.operators, operators, data, job.fidelity), image.dtype, exact=job.exact
        ),
        prior=prior,
        solver=find("solvers", job.solver.name).SOLVER(),
        start=given or image,
        target=Target(reference, _peak(reference)),
        grid=grid,
        layout=layout,
        output=output,
        run_directory=run_directory_of(output),
        identity=identity,
        differs=differs,
        resumes=resumes,
        fresh=fresh,
        files=(*files_of(job.operators), *(denoiser.files() if denoiser else ())),
        free_disk_bytes=shutil.disk_usage(existing_parent(output)).free,
        notes=(*notes_of(operators), *(note_of(directory, job.solver) if resumes else ())),
    )
    if refuse:
        plan.check_fits()
    return plan


def _plainly(part: Any) -> Any:
    """A section as a mapping, anything else as it is."""
    return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part


def _check_image(source: Source, key: str, shape: tuple[int, ...]) -> None:
    """Refuse an image of another shape than the one that is looked for."""
    if source.shape != shape:
        raise InputError(
            f"{key}: {source.path} has shape {list(source.shape)}, and the image has {list(shape)}. "
            "Give one of that shape."
        )


def _roles(source: Source, shape: tuple[int, ...]) -> Roles:
    """The last two axes are tiled: operators work on planes."""
    if len(shape) < 2:
        raise InputError(f"the image has shape {list(shape)}: operators work on planes, two axes at least.")
    return Roles(source.axes, (len(shape) - 2, len(shape) - 1), None)


def _layout(job: Reconstruction, source: Source, geometry: Geometry, dtype: np.dtype[Any]) -> Layout:
    chunk = choose_chunk(geometry, job.output.chunk)
    known = source.shape == geometry.shape
    axes = len(geometry.shape)
    return Layout(
        shape=geometry.shape,
        dtype=str(dtype) if job.output.dtype == "auto" else job.output.dtype,
        shard=choose_shard(geometry, job.output.shard, chunk),
        chunk=chunk,
        codec=job.output.codec,
        axes=geometry.roles.axes,
        scale=tuple(source.scale) if known else (1.0,) * axes,
        units=tuple(source.units) if known else (None,) * axes,
        ome=False,
    )


def _block(
    job: Reconstruction, geometry: Geometry, layout: Layout, previous: dict[str, Any] | None
) -> tuple[int, ...]:
    """The super-block: a resumed run keeps its own."""
    unit = block_unit(geometry, layout.shard)
    if job.tile.block != "auto":
        return check_block(geometry, job.tile.block, unit)
    if previous is not None:
        return tuple(previous["block"])
    return candidate_blocks(geometry, unit, job.run.workers)[0]


def _peak(reference: Source | None) -> float:
    """What a PSNR is measured against: the range of the type, 1 of floats."""
    integer = reference is not None and reference.dtype.kind in "iu"
    return float(np.iinfo(str(reference.dtype)).max) if integer and reference is not None else 1.0
