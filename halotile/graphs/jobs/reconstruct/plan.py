"""The planner of reconstructions: a job's operators, prior and solver as a problem, its sizes decided or refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct.continuation import identity_of, note_of
from halotile.graphs.jobs.reconstruct.forms import Form, choose_form
from halotile.graphs.jobs.reconstruct.memory import footprint_of_step
from halotile.graphs.jobs.reconstruct.operator_checks import (
    check_kernels,
    check_masks,
    note_of_passes,
    note_of_shape,
    notes_of,
    try_adjoints,
)
from halotile.graphs.jobs.reconstruct.operators import (
    check_made,
    describe_operator,
    files_of,
    image_shape,
    make_operators,
    make_terms,
    open_measurements,
    sources_in,
)
from halotile.graphs.jobs.reconstruct.plan_value import ReconstructionPlan
from halotile.graphs.jobs.reconstruct.prior import (
    cut_for_prior,
    denoised_of,
    denoiser_of,
    describe_prior,
    tried_prior,
    with_denoised,
)
from halotile.graphs.jobs.reconstruct.prior_trials import Cut, denoising_of
from halotile.graphs.jobs.reconstruct.traffic import comes_apart, computed_twice
from halotile.graphs.jobs.sections import Reconstruction, parse_bytes
from halotile.graphs.plans.cutting import allowed_bytes, overlap_pays
from halotile.graphs.plans.denoiser_trials import compared, expect_trial
from halotile.graphs.plans.devices import (
    check_device,
    cluster_for,
    device_of,
    io_threads_for,
    is_here,
    note_of_cluster,
)
from halotile.graphs.plans.gpu_trials import (
    ChosenTiles,
    as_it_went,
    choose_tiles,
    chosen_with_tiles,
    on_device,
    sized_as,
    trying,
)
from halotile.graphs.plans.memory import machine_bytes
from halotile.graphs.plans.notes import note_of_files, note_of_locks
from halotile.graphs.plans.opening import check_paths, computed_by
from halotile.graphs.plans.plan import existing_parent, run_directory_of
from halotile.graphs.plans.sizes import (
    Geometry,
    axes_like,
    block_unit,
    candidate_blocks,
    check_block,
    layout_like,
)
from halotile.graphs.plans.worker_count import no_more_than, with_workers
from halotile.graphs.rules.combinations import check_reconstruction
from halotile.graphs.rules.paths import with_whole_paths
from halotile.graphs.runs.identity import code_versions, differences
from halotile.graphs.waiting import Report, no_report, report_if_slow
from halotile.registry import find
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.place import check_parents
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout
from halotile.storage.views import Constant
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.operators.base import working_dtype
from halotile.tasks.roles import Roles
from halotile.tasks.trials.gpu_findings import Tuned
from halotile.tasks.trials.provenance import seals_of


def make_reconstruction_plan(
    job: Reconstruction,
    *,
    fresh: bool = False,
    refuse: bool = True,
    probe: bool = False,
    report: Report = no_report,
) -> ReconstructionPlan:
    """Decide every size of a reconstruction and check that it fits.

    ``report`` is told in a line what is being done, where it takes a while. With ``probe``, the denoiser of the prior is tried
    on the device also where nothing is to be decided, in every precision: see :attr:`ReconstructionPlan.tuned`.

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
    previous = None if fresh else directory.read_valid_plan()
    operators = make_operators(job)
    check_made(operators)
    check_masks(operators)
    data = open_measurements(job.operators, operators)
    given, reference = (open_source(path) if path else None for path in (job.start, job.reference))
    images = {key: image for key, image in (("start", given), ("reference", reference)) if image}
    shape = image_shape(operators, data, job.shape, (image.shape for image in images.values()))
    check_kernels(operators, shape)
    with report_if_slow(report, "comparing adjoints with forwards"):
        untried = try_adjoints(operators, shape, job.run)
    inferred = job.shape == "auto" and all(image.shape != shape for image in images.values())
    for key, other in images.items():
        _check_image(other, key, shape)
    image = Constant(shape, working_dtype(np.result_type(*(source.dtype for source in data))))
    for source in (*data, given, reference):
        if source is not None:
            check_paths(source, output)
    denoiser = denoiser_of(job)
    expect_trial(denoiser)
    device, precision, ignored = _computed_by(job, denoiser)
    cluster = cluster_for(job.cluster, device)
    job, requested = with_workers(job, cluster, device)
    roles = _roles(data[0], shape)
    own_code, reach = tried_prior(job, denoiser, shape[-2:], previous, report)
    seals = seals_of(denoiser, own_code) if denoiser else {}
    geometry = Geometry(shape, shape, roles, 1, reach.align)
    memory = parse_bytes(job.run.memory_per_worker)
    layout = layout_like(data[0], job.output, geometry, image.dtype, memory, previous)
    job, requested = no_more_than(job, requested, shape, block_unit(geometry, layout.shard))
    terms = make_terms(job.operators, operators, data, job.fidelity, given)
    form = choose_form(terms, image.dtype, exact=job.exact, per_sweep=job.solver.checkpoint_every)
    _check_per_sweep(form)
    solver = find("solvers", job.solver.name).SOLVER()
    machine = machine_bytes() if is_here(cluster) else None
    allowed, overlap = allowed_bytes(job.run, machine), overlap_pays(job.run)
    state = replace(layout, dtype=str(image.dtype))
    io_threads = io_threads_for(job.run, cluster, device)

    def choose(known: Tuned | None) -> Cut:
        for block in _blocks(job, geometry, layout, previous):
            prior, grid = cut_for_prior(
                job, denoiser, image, geometry, reach, block, device, precision, seals
            )
            cut = Cut(prior, grid, replace(form, apart=comes_apart(job.fuse, form, prior, grid, solver)))
            if fits(cut, known):
                break  # or else the smallest, which the plan refuses
        return cut

    def settled(cut: Cut) -> ChosenTiles | None:
        task = denoising_of(cut, state, [given, *data] if given else data, output)
        if task is None:
            if probe:
                raise ConfigError(
                    f"--probe tries a denoiser, and prior.name is {job.prior.name}: leave it out."
                )
            return None
        with report_if_slow(report, trying(task)):
            return choose_tiles(job, task, geometry, previous, probe=probe)

    def fits(cut: Cut, tuned: Tuned | None) -> bool:
        measured = tuned.host_bytes if tuned else None
        needed = footprint_of_step(
            cut.grid,
            cut.form,
            cut.prior,
            solver,
            state,
            overlap=overlap,
            io_threads=io_threads,
            measured=measured,
        )
        return needed.total_bytes <= allowed

    is_free = device != "cpu" and job.tile.block == "auto" and previous is None
    cut, made = chosen_with_tiles(choose, settled, lambda cut, made: fits(cut, made.tuned), is_free=is_free)
    prior, tuned = cut.prior, made.tuned if made else None
    if made is not None:
        prior = with_denoised(prior, partial(sized_as, task=made.task))
    denoised = denoised_of(prior)
    reach = compared(
        reach, denoising_of(cut, state, (), output), job.tile, previous, run=job.run, report=report
    )
    identity = {
        "operators": {
            str(number): describe_operator(operator)
            | {"data": source.fingerprint(), "noise_sigma": choice.noise_sigma}
            for number, (operator, source, choice) in enumerate(
                zip(operators, data, job.operators, strict=True)
            )
        },
        "fidelity": asdict(job.fidelity),
        "prior": describe_prior(job.prior, denoiser, reach, seals),
        "probed": list(reach.probed) if reach.probed else None,
        "solver": identity_of(asdict(job.solver)),
        "start": given.fingerprint() if given else None,
        "reference": reference.fingerprint() if reference else None,
        "precision": precision if denoiser else job.run.precision,
        **(on_device(denoised, previous) if denoised else {}),
        "exact": job.exact,
        "layout": layout.to_json(),
        "block": list(cut.grid.block),
        "code": {**code_versions(), **own_code},
    }
    differs = tuple(differences(previous["identity"], identity)) if previous else ()
    resumes = previous is not None and not differs
    plan = ReconstructionPlan(
        job=job,
        cluster=cluster,
        form=cut.form,
        io_threads=io_threads,
        prior=with_denoised(prior, lambda denoised: as_it_went(denoised, previous)),
        tuned=tuned,
        solver=solver,
        start=given or image,
        target=Target(reference, _peak(reference)),
        grid=cut.grid,
        layout=layout,
        output=output,
        run_directory=run_directory_of(output),
        identity=identity,
        differs=differs,
        resumes=resumes,
        fresh=fresh,
        sources=(*data, *images.values(), *(source for each in operators for source in sources_in(each))),
        files=(*files_of(job.operators), *(denoiser.files() if denoiser else ())),
        free_disk_bytes=shutil.disk_usage(existing_parent(output)).free,
        machine_bytes=machine,
        requested=requested,
        notes=(
            *reach.remarks,
            *((made.note,) if made and made.note else ()),
            *notes_of(operators),
            *untried,
            *(note_of_shape(shape, [source.shape for source in data]) if inferred else ()),
            *note_of_passes(form.per_sweep, computed_twice(cut.grid, layout.shard, cut.form, prior)),
            *(note_of(directory, job.solver) if resumes else ()),
            *ignored,
            *note_of_cluster(job, cluster, device),
            *note_of_files(layout, job.output, roles),
            *note_of_locks(output),
        ),
    )
    if refuse:
        plan.check_fits()
    return plan


def _computed_by(job: Reconstruction, denoiser: Denoiser | None) -> tuple[str, str, tuple[str, ...]]:
    """What computes the denoiser, how exactly, and what is to be said of that; operators are for CPUs."""
    requested = job.run.precision
    if denoiser is None:
        ignored = (f"run.precision is {requested}, which is for networks: this job has none",)
        return "cpu", "float32", ignored if requested != "float32" else ()
    found = computed_by(denoiser, device_of(job.run, job.cluster), requested)
    check_device(job.run, job.cluster, found[0])
    return found


def _check_per_sweep(form: Form) -> None:
    """Refuse several iterations in a sweep where operators need the image between them."""
    if form.per_sweep > 1 and form.whole:
        number = next(n for n, term in enumerate(form.terms) if term is form.whole[0])
        raise ConfigError(
            f"solver.checkpoint_every is {form.per_sweep}, and operators[{number}] ({form.whole[0].operator.name}) sees the "
            "whole image, which there is only where every iteration is stored. Write checkpoint_every: 1."
        )


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
    return Roles(axes_like(source, len(shape)), (len(shape) - 2, len(shape) - 1), None)


def _blocks(
    job: Reconstruction, geometry: Geometry, layout: Layout, previous: dict[str, Any] | None
) -> list[tuple[int, ...]]:
    """The super-blocks to choose from, the best first: a resumed run keeps its own."""
    unit = block_unit(geometry, layout.shard)
    if job.tile.block != "auto":
        return [check_block(geometry, job.tile.block, unit)]
    if previous is not None:
        return [tuple(previous["block"])]
    return candidate_blocks(geometry, unit, job.run.count)


def _peak(reference: Source | None) -> float:
    """What a PSNR is measured against: the range of the type, 1 of floats."""
    integer = reference is not None and reference.dtype.kind in "iu"
    return float(np.iinfo(str(reference.dtype)).max) if integer and reference is not None else 1.0
