"""The plan of a reconstruction, in stages: opened, sized, settled, identified."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct import costs, inversion, measurements
from halotile.graphs.jobs.reconstruct.job import Reconstruction, identity_of, note_of, with_whole_paths
from halotile.graphs.kinds.base import Need, OutputArray, OutputState, Placement, Planned, PlanRequest, Requested
from halotile.graphs.kinds.sections import NamedChoice, parse_bytes
from halotile.graphs.plans import cutting
from halotile.graphs.plans.choices import describe_denoiser, describe_options, kept_bytes, make_part
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import DECODED, io_threads_for, no_more_than
from halotile.graphs.plans.notes import note_of_files, notes_of_place
from halotile.graphs.plans.plan import place_job
from halotile.graphs.plans.trials import gpu_trials
from halotile.graphs.plans.trials.denoiser_trials import DenoiserTrial, compare_tiles, expect_trial, try_denoiser
from halotile.graphs.solvers._subsets import SubsetSolver
from halotile.graphs.solvers.base import Solver
from halotile.graphs.subsets import ordered_subset
from halotile.graphs.waiting import report_if_slow
from halotile.storage.arrays import Source, open_source, planes_last
from halotile.storage.grid import Grid
from halotile.storage.sharded.output import Layout
from halotile.storage.views import Constant
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.image_task import Denoised
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.operators.base import Operator, working_dtype
from halotile.tasks.priors.base import DenoisingPrior, Prior, denoised_of
from halotile.tasks.trials.gpu_trial import Tuned
from halotile.tasks.trials.provenance import seals_of


def given_parts(job: Reconstruction) -> dict[str, Any]:
    """Return the parts that a job file writes differently: objects that only a script can pass are described."""
    options = {key: _given(value) for key, value in job.prior.options.items()}
    prior = {"name": job.prior.name, **options}
    return {"operators": [measurements.written(choice) for choice in job.operators], "prior": prior}


def _given(value: Any) -> Any:
    """Return an option of a prior; a denoiser from a script as the mapping that a file has."""
    if isinstance(value, NamedChoice):
        return {"name": value.name, **value.options}
    return describe_denoiser(value) if hasattr(value, "build") else value


def decided_parts(work: inversion.Inversion) -> dict[str, Any]:
    """Return the keys whose values were decided; with them the job makes the same output."""
    layout = work.output.layout
    shard, block = (list(sizes[-2:]) for sizes in (layout.shard, work.grid.block))
    tile = {"block": [-(-b // s) * s for b, s in zip(block, shard, strict=True)]}
    denoised = denoised_of(work.prior)
    return {
        "shape": list(work.grid.shape),
        "output": {"shard": shard, "chunk": list(layout.chunk[-2:]), "dtype": layout.dtype},
        "tile": tile | (gpu_trials.written_tiles(denoised) if denoised else {}),
    }


def figures_of(work: inversion.Inversion) -> dict[str, Any]:
    """Return the figures of an inversion, by name."""
    job, form, grid, choice = work.job, work.form, work.grid, work.job.solver
    seen, denoised = form, denoised_of(work.prior)
    if isinstance(work.solver, SubsetSolver):
        count = len(form.terms)
        seen = form.subset(ordered_subset(count, work.solver.count(count), 0))
    traffic = costs.traffic_of(grid, seen, work.prior, work.solver, np.dtype(work.state_layout.dtype))
    read = costs.pixels_read(grid, form.view(work.prior.reach())) / math.prod(grid.shape)
    return {
        "shape": list(grid.shape),
        "dtype": work.output.layout.dtype,
        "operators": [operator.name for operator in job.operators],
        "data": [operator.data for operator in job.operators],
        "form": form.describe(),
        "fidelity": job.fidelity.name,
        "prior": job.prior.name,
        "denoiser": denoised.denoiser.name if denoised and "denoiser" in job.prior.options else None,
        **(gpu_trials.tile_figures(denoised, work.tuned) if denoised else {}),
        "solver": work.solver.name,
        "step": choice.step,
        "iterations": choice.iterations,
        "passes_before": work.before_iterations,
        "total_passes": work.before_iterations + choice.iterations // form.per_pass + work.judges + 1,
        "halo": work.halo,
        "read_amplification": round(read, 4),
        "passes": 2 if form.apart else 1,
        "per_pass": form.per_pass,
        "computed_twice": round(costs.computed_twice(grid, work.output.layout.shard, form, work.prior), 4),
        "iteration_bytes": (traffic.unfused or traffic.fused) if form.apart else traffic.fused,
        "iteration_bytes_fused": traffic.fused,
        "iteration_bytes_unfused": traffic.unfused,
    }


SMALLER = "a smaller tile.size, tile.block or output.shard"


def needs_of(work: inversion.Inversion, kept: int, smaller: str = SMALLER) -> Iterator[Need]:
    """Yield the memory of a block, and of each operator that sees the whole image; ``kept`` bytes of inputs stay decoded."""
    decoded = {DECODED: kept}
    yield Need(f"one block of {list(work.grid.block)}", {**work.step_footprint(), **decoded}, smaller)
    for term, footprint in zip(work.form.whole, work.operator_footprints(), strict=True):
        number = next(n for n, other in enumerate(work.form.terms) if other is term)
        what = f"operators[{number}] ({term.operator.name}) sees the whole image of {list(work.grid.shape)}, and"
        yield Need(what, {**footprint, **decoded}, "an operator that looks a few pixels far")


def plan_reconstruction(job: Reconstruction, state: OutputState, request: PlanRequest) -> Planned:
    """Decide every size of a reconstruction."""
    opened = _open(with_whole_paths(job), state, request)
    sized = _size(opened, request)
    settled = _settle(sized, request)
    return _identify(settled)


@dataclass(frozen=True)
class _Opened:
    """Operators, measurements and images, opened."""

    state: OutputState
    placement: Placement[Reconstruction]
    operators: tuple[Operator, ...]
    data: tuple[Source, ...]
    levels: tuple[Source | float, ...]  # noise levels of the measurements, or maps of them
    images: Mapping[str, Source]  # start and reference, where the job has them
    image: Constant  # an image of zeros, with the shape and type of the result
    prior: Prior
    denoiser: Denoiser | None  # denoiser of the prior
    notes: tuple[str, ...]

    @property
    def start(self) -> Source | None:
        """The image to start from."""
        return self.images.get("start")

    @property
    def job(self) -> Reconstruction:
        return self.placement.job

    @property
    def sources(self) -> tuple[Source, ...]:
        """Measurements, start, reference, and the images that operators read."""
        operator_sources = (source for operator in self.operators for source in measurements.sources_in(operator))
        maps = (level for level in self.levels if not isinstance(level, float))
        return (*self.data, *maps, *self.images.values(), *operator_sources)


def _open(job: Reconstruction, state: OutputState, request: PlanRequest) -> _Opened:
    images = {k: planes_last(open_source(p)) for k, p in (("start", job.start), ("reference", job.reference)) if p}
    packed = "reconstructed", "The image is in them too, and names no packing"
    stack = measurements.open_stack(job, state.output, tuple(images.values()), packed, request.report)
    for key, image in images.items():
        _check_image(image, key, stack.shape)
    dtype = working_dtype(np.result_type(*(source.dtype for source in stack.data)))
    zeros = Constant(stack.shape, dtype)
    prior: Prior = make_part("prior", job.prior, job)
    denoiser = prior.computed_by()
    expect_trial(denoiser)
    placement = place_job(job, denoiser)
    sigmas = [choice.noise_sigma for choice in job.operators]
    levels = tuple(map(measurements.open_level, range(len(sigmas)), sigmas, stack.data))
    return _Opened(state, placement, stack.operators, stack.data, levels, images, zeros, prior, denoiser, stack.notes)


TILE = 512


TILE = 512


@dataclass(frozen=True)
class _Sized:
    """The geometry of the image, and the form in which its gradient is computed."""

    opened: _Opened
    job: Reconstruction
    requested: Requested
    own_code: Mapping[str, str]
    seals: Mapping[str, str]
    halo: cutting.Halo
    geometry: cutting.Geometry
    layout: Layout
    form: costs.Form
    fidelity: Fidelity
    solver: Solver
    io_threads: int

    @property
    def state_layout(self) -> Layout:
        """Layout of the solver's images."""
        return replace(self.layout.as_plain_array(), dtype=str(self.opened.image.dtype))

    def cut(self, block: tuple[int, ...]) -> inversion.CutImage:
        """Return the image cut into super-blocks of this size, with the halo and the tiles that the prior needs."""
        opened, geometry, tile = self.opened, self.geometry, self.job.tile
        prior, denoiser, device, precision = (
            opened.prior,
            opened.denoiser,
            opened.placement.device,
            opened.placement.precision,
        )
        edges = tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True))
        grid = Grid(geometry.shape, edges, ((0, 0),) * len(edges))
        if denoiser is not None:
            if self.halo.probed:
                denoiser = denoiser.probed(*self.halo.probed)
            size = TILE if tile.size == "auto" else tile.size
            tiling = cutting.tiling_of(tile, denoiser, self.halo, geometry, size, block, opened.image.dtype)
            grid = cutting.grid_of(geometry, self.halo, block, tiling)
            last = (
                denoiser.convolutional and geometry.dims == 2 and gpu_trials.channels_last_of(tile, device, precision)
            )
            denoised = Denoised(
                opened.image,
                denoiser,
                tiling,
                geometry.roles,
                grid,
                cutting.rim_of(tile, denoiser, geometry.roles),
                device=device,
                precision=precision,
                channels_last=last,
                seals=self.seals,
            )
            assert isinstance(prior, DenoisingPrior)
            prior = replace(prior, denoised=denoised)
        is_apart = costs.comes_apart(self.job.fuse, self.form, prior, grid, self.solver)
        return inversion.CutImage(prior, grid, replace(self.form, apart=is_apart))

    def work_of(self, cut: inversion.CutImage, tuned: Tuned | None) -> inversion.ReconstructWork:
        """Return the inversion on these blocks."""
        opened, output = self.opened, self.job.output
        reference = opened.images.get("reference")
        layout = self.layout.in_levels(cut.grid.block, output.levels)
        return inversion.ReconstructWork(
            self.job,
            OutputArray(opened.state.output, layout, cut.grid, output.overwrite),
            cut.form,
            cut.prior,
            self.solver,
            opened.start or opened.image,
            Target(reference),
            self.io_threads,
            tuned,
        )


def _size(opened: _Opened, request: PlanRequest) -> _Sized:
    placement, previous = opened.placement, opened.state.previous
    job, denoiser, shape = placement.job, opened.denoiser, opened.image.shape
    roles = roles_of(opened.data[0], shape)
    own_code, halo = DenoiserTrial({}, cutting.Halo(((0, 0),) * 2, 1, "no denoiser"))
    if denoiser is not None:
        own_code, halo = try_denoiser(denoiser, job.tile, shape[-2:], previous, run=job.run, report=request.report)
    geometry = cutting.Geometry(shape, shape, roles, 1, halo.align)
    memory = parse_bytes(job.run.memory_per_worker)
    layout = cutting.layout_like(opened.data[0], job.output, geometry, opened.image.dtype, memory, previous)
    job, requested = no_more_than(job, placement.requested, shape, cutting.block_unit(geometry, layout.shard))
    fidelity: Fidelity = make_part("fidelity", job.fidelity, job)
    solver: Solver = make_part("solver", job.solver, job)
    if solver.traits.multiplies:
        measurements.check_signs(opened.operators)
    terms = measurements.make_terms(opened.levels, opened.operators, opened.data, fidelity, opened.start)
    per_pass, by_subsets = job.solver.checkpoint_every, solver.traits.by_subsets
    form = costs.choose_form(terms, opened.image.dtype, exact=job.exact, per_pass=per_pass, by_subsets=by_subsets)
    costs.check_per_pass(form)
    return _Sized(
        opened,
        job,
        requested,
        own_code,
        seals_of(denoiser, own_code) if denoiser else {},
        halo,
        geometry,
        layout,
        form,
        fidelity,
        solver,
        io_threads_for(job.run, placement.cluster, placement.device),
    )


@dataclass(frozen=True)
class _Settled:
    """The blocks, and the tiles that compute the prior on them."""

    sized: _Sized
    work: inversion.ReconstructWork
    note: str
    halo: cutting.Halo


def _settle(sized: _Sized, request: PlanRequest) -> _Settled:
    opened, placement, job = sized.opened, sized.opened.placement, sized.job
    previous, output = opened.state.previous, opened.state.output
    allowed = cutting.allowed_bytes(job.run, placement.machine_bytes)

    def choose(known: Tuned | None) -> inversion.CutImage:
        earlier = previous["identity"]["block"] if previous else None
        unit = cutting.block_unit(sized.geometry, sized.layout.shard)
        for block in cutting.blocks_for(sized.geometry, unit, job.run.count, earlier, given=job.tile.block):
            cut = sized.cut(block)
            if fits(cut, known):
                break  # otherwise the smallest, which the plan refuses
        return cut

    def settle(cut: inversion.CutImage) -> gpu_trials.ChosenTiles | None:
        images = [*([opened.start] if opened.start else []), *opened.data]
        task = inversion.denoising_of(cut, sized.state_layout, images, output)
        if task is None:
            if request.probe:
                raise ConfigError(f"--probe tries a denoiser, and prior.name is {job.prior.name}: leave it out.")
            return None
        with report_if_slow(request.report, gpu_trials.trial_text(task)):
            return gpu_trials.choose_tiles(job, task, sized.geometry, previous, probe=request.probe)

    def fits(cut: inversion.CutImage, tuned: Tuned | None) -> bool:
        return sum(sized.work_of(cut, tuned).step_footprint().values()) <= allowed

    is_free = placement.on_gpu and job.tile.block == "auto" and previous is None
    cut, tiles = gpu_trials.chosen_with_tiles(
        choose, settle, lambda cut, tiles: fits(cut, tiles.tuned), is_free=is_free
    )
    trial = inversion.denoising_of(cut, sized.state_layout, (), output)
    halo = compare_tiles(sized.halo, trial, job, previous, request.report)
    if tiles is not None:
        cut = replace(cut, prior=cut.prior.with_denoised(partial(gpu_trials.sized_as, task=tiles.task)))
    tuned, note = (tiles.tuned, tiles.note) if tiles else (None, "")
    return _Settled(sized, sized.work_of(cut, tuned), note, halo)


def _identify(settled: _Settled) -> Planned:
    sized, opened, work = settled.sized, settled.sized.opened, settled.work
    job, state, denoiser = sized.job, opened.state, opened.denoiser
    begun_prior = work.prior.with_denoised(lambda denoised: gpu_trials.with_reduced_batch(denoised, state.previous))
    return Planned(
        placement=replace(opened.placement, job=job, requested=sized.requested),
        work=replace(work, prior=begun_prior),
        sources=opened.sources,
        files=(*measurements.files_of(job.operators), *(denoiser.files() if denoiser else ())),
        identity=_identity(settled),
        needs=tuple(needs_of(work, kept_bytes(opened.sources))),
        smaller=SMALLER,
        scratch_bytes=work.scratch_bytes,
        scratch_inodes=work.scratch_inodes,
        given=given_parts(job),
        decided=decided_parts(work),
        figures=figures_of(work),
        notes=_notes(settled),
        notes_of_resumed=partial(note_of, state.directory, job.solver, sized.solver),
    )


def _notes(settled: _Settled) -> tuple[str, ...]:
    sized, opened, work = settled.sized, settled.sized.opened, settled.work
    twice = costs.computed_twice(work.grid, sized.layout.shard, work.form, work.prior)
    return (
        *settled.halo.remarks,
        *((settled.note,) if settled.note else ()),
        *opened.notes,
        *measurements.note_of_passes(work.form.per_pass, twice),
        *sized.solver.notes(),
        *note_of_files(work.output.layout, sized.job.output, sized.geometry.roles),
        *notes_of_place(opened.state.output, opened.state.directory),
    )


def _identity(settled: _Settled) -> dict[str, Any]:
    """Return everything that can change a bit of the image."""
    sized, opened = settled.sized, settled.sized.opened
    job, denoiser, images = sized.job, opened.denoiser, opened.images
    denoised = denoised_of(settled.work.prior)
    each = zip(opened.operators, opened.data, job.operators, opened.levels, strict=True)
    return {
        "operators": {
            str(number): measurements.describe_operator(operator)
            | {"data": source.fingerprint()}
            | {"noise_sigma": choice.noise_sigma if isinstance(level, float) else level.fingerprint()}
            for number, (operator, source, choice, level) in enumerate(each)
        },
        "fidelity": {"name": sized.fidelity.name, **describe_options(sized.fidelity)},
        "prior": inversion.describe_prior(opened.prior, denoiser, settled.halo, sized.seals),
        "probed": list(settled.halo.probed) if settled.halo.probed else None,
        "solver": identity_of(asdict(job.solver)) | {"options": describe_options(sized.solver)},
        "start": images["start"].fingerprint() if "start" in images else None,
        "reference": images["reference"].fingerprint() if "reference" in images else None,
        "precision": opened.placement.precision if denoiser else job.run.precision,
        **(inversion.describe_denoised(denoised, opened.state.previous) if denoised else {}),
        "exact": job.exact,
        "bounds": settled.work.bounds,
        "layout": settled.work.output.layout.to_json(),
        "block": list(settled.work.grid.block),
        "code": {**code_versions(), **sized.own_code},
    }


def _check_image(source: Source, key: str, shape: tuple[int, ...]) -> None:
    """Refuse an image of another shape than that of the result."""
    if source.shape != shape:
        raise InputError(
            f"{key}: {source.path} has shape {list(source.shape)}, and the image has {list(shape)}. "
            "Give one of that shape."
        )


def roles_of(source: Source, shape: tuple[int, ...]) -> Roles:
    """Return the roles of the axes: the last two are tiled, because operators work on planes."""
    if len(shape) < 2:
        raise InputError(f"the image has shape {list(shape)}: operators work on planes, two axes at least.")
    return Roles(cutting.axes_like(source, len(shape)), (len(shape) - 2, len(shape) - 1), None)
