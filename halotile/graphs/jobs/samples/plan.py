"""The plan of posterior samples."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct import measurements
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.jobs.reconstruct.inversion import ReconstructWork
from halotile.graphs.jobs.reconstruct.job import Reconstruction, SolverChoice, whole_choice
from halotile.graphs.jobs.reconstruct.plan import needs_of, roles_of
from halotile.graphs.jobs.samples.bootstrap import plan_bootstrap
from halotile.graphs.jobs.samples.job import Sampling
from halotile.graphs.jobs.samples.passes import SampleWork, WholeWork
from halotile.graphs.kinds.base import Need, OutputArray, OutputState, Planned, PlanRequest
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.choices import kept_bytes, make_part
from halotile.graphs.plans.cutting import Geometry, allowed_bytes, block_unit, blocks_for, layout_like, overlap_pays
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import DECODED, IMPORTS_BYTES, PROCESS, no_more_than
from halotile.graphs.plans.notes import note_of_files, notes_of_place
from halotile.graphs.plans.plan import place_job
from halotile.graphs.solvers.cg import ConjugateGradients
from halotile.graphs.waiting import report_if_slow
from halotile.graphs.words import counted
from halotile.storage.arrays import Source
from halotile.storage.disk.object_path import OutputPath, full_path
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import Layout
from halotile.storage.views import Constant, readable_parts
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.noise.estimate import as_square, plane_level, sample_regions
from halotile.tasks.operators.base import Operator, parts_of, with_engine, working_dtype
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.crop import Crop
from halotile.tasks.operators.sum import WeightedSum
from halotile.tasks.posterior.gaussian import BATCH, DOUBLE, SOLVED, NotSolved, Posterior, Solved
from halotile.tasks.priors.matern import SHORTEST, Excerpt, Likely, Matern, gain_of, likely, masks_nothing, transfer_of
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.terms import Measurement

FAR_FROM_ONE = 1e12  # noise level, or its inverse, from which on products of squares overflow in single precision
SMALLER = "a smaller tile.block, output.shard or posterior.halo"
# Images in double precision that a solution holds at once, for each right-hand side and each measurement: an estimate; and
# copies of a result that is written.
IMAGES_AT_ONCE, READ_AT_ONCE, COPIES = 9, 2, 3
LEAST_EDGE = 8  # edge in pixels of the smallest window that a prior comes from
MOST = 1024**2  # pixels of the window of a cell, where its halves are not smaller than the halo
# Edges of the windows that the prior is found from, where they have no holes, and their number.
EDGES, WINDOWS = (256, 128, 64, 32), 16
HALOS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FAR = 3  # ratio of noise levels from which on one of them is probably a mistake
MARGIN = 0.5  # share of the tolerance that a halo leaves where it is tried: other places leave more
# Edge and number of the blocks that halos are tried on, out of so many: small ones, as the edge of a cell may cut a
# hole.
TRIED, PLACES, SEEN = 16, 8, 256


def plan_samples(job: Sampling, state: OutputState, request: PlanRequest) -> Planned:
    """Decide every size of a job of samples."""
    if state.previous and ("input" in state.previous["identity"]) != bool(job.input):
        state = replace(state, previous=None)  # of the other method
    if job.input:
        return plan_bootstrap(job, state, request)
    opened = _open(job, state, request)
    return _planned(opened, *_method(opened, request))


@dataclass(frozen=True)
class _Opened:
    """The measurements, opened, with the prior that was decided."""

    job: Sampling
    state: OutputState
    data: tuple[Source, ...]
    levels: tuple[Source | float, ...]
    posterior: Posterior
    found: Likely
    notes: tuple[str, ...]

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(part.operator for part in self.posterior.measurements)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Measurements, maps of their noise, and the images that operators read."""
        maps = (level for level in self.levels if not isinstance(level, float))
        return (*self.data, *maps, *(s for operator in self.operators for s in measurements.sources_in(operator)))

    @property
    def draws(self) -> int:
        """Draws that an output needs."""
        return self.job.posterior.count if self.job.output.std or self.job.output.samples else 0

    @cached_property
    def std_error(self) -> float | None:
        """Relative error of the map of deviations."""
        return round(_map_error(self.posterior, self.draws, self.job.posterior.estimator), 4) if self.draws else None


def _open(job: Sampling, state: OutputState, request: PlanRequest) -> _Opened:
    job = replace(job, operators=tuple(whole_choice(choice) for choice in job.operators))  # type: ignore[misc]
    packed = "sampled", "The maps are in them too, and name no packing"
    stack = measurements.open_stack(job, state.output, (), packed, request.report)
    data = stack.data
    if job.posterior.method == "blocks" and (why := _sees_far(stack.operators)):
        raise ConfigError(
            f"{why}, and posterior.method: blocks solves each block with the pixels around it. Write method: cg, which takes many passes over the image; or "
            "boundary: reflect, replicate, zero or valid, where it is circular and the instrument is not."
        )
    previous = state.previous["identity"] if state.previous else {}
    fidelity: Fidelity = make_part("fidelity", job.fidelity, job)
    background = fidelity.background if isinstance(fidelity, Poisson) else None
    levels = tuple(
        _level(number, choice.noise_sigma, source, previous) if background is None else 0.0
        for number, (choice, source) in enumerate(zip(job.operators, data, strict=True))
    )
    dtype = working_dtype(np.result_type(*(source.dtype for source in data)))
    if not all(1 / FAR_FROM_ONE < level < FAR_FROM_ONE for level in levels if isinstance(level, float) and level):
        dtype = DOUBLE
    operators = tuple(with_engine(operator, dtype, job.exact) for operator in stack.operators)
    parts = tuple(map(measurements.weighted, range(len(data)), operators, data, levels, itertools.repeat(background)))
    given: Matern = make_part("prior", job.prior, job)
    found = _prior(given, parts, previous)
    posterior = Posterior(parts, found.prior, stack.shape, dtype, job.posterior.seed)
    notes_of_noise = _notes_of_noise(levels, data) if background is None else ()
    notes = (*stack.notes, *notes_of_noise, *_note_of_range(found.prior, stack.shape))
    return _Opened(job, state, data, levels, posterior, found, notes)


def _sees_far(operators: Sequence[Operator]) -> str:
    """Return why an image cannot be solved block by block; empty where it can."""
    for number, operator in enumerate(operators):
        for part in parts_of(operator):
            if part.kind != "local" and not isinstance(part, Crop | Composition | WeightedSum):
                return f"operators[{number}] ({part.name}) sees more than a neighbourhood of each pixel"
            if getattr(part, "boundary", "") == "circular":
                return f"operators[{number}] has boundary: circular, which joins opposite edges of the image"
    return ""


def _note_of_range(prior: Matern, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield a note on a range that an image of this shape says little about; refuse one beyond it."""
    edge, length = min(shape[-2:]), float(prior.range)
    if length < SHORTEST:
        raise ConfigError(
            f"prior.range is {length:.4g} pixels, so short that neighbouring pixels are hardly correlated. Write {SHORTEST} or more."
        )
    if length > edge:
        raise ConfigError(
            f"prior.range is {length:.4g} pixels, and the image has {edge}: it would be constant but for its mean. Write a smaller range."
        )
    if length > edge / 3:
        yield f"prior.range is {length:.3g} of {edge} pixels: few such lengths fit into the image, and standard deviations depend on the range."


def _level(number: int, given: float | str, source: Source, previous: Mapping[str, Any]) -> Source | float:
    """Return the noise level of a measurement, or the map of it."""
    if given == "auto":
        known = previous.get("operators", {}).get(str(number), {}).get("noise")
        if isinstance(known, float) and known > 0:
            return known
        if len(source.shape) < 2 or not (level := _estimated(source)) > 0:
            raise InputError(
                f"operators[{number}].noise_sigma is auto, and {source.path} shows no noise. Write its standard deviation."
            )
        return level
    return measurements.open_level(number, given, source)


def _estimated(source: Source) -> float:
    squares = [part for _, part in readable_parts(measurements.with_holes(source), _squares(source))]
    return float(plane_level([as_square(part, (part.ndim - 2, part.ndim - 1)) for part in squares]))


def _notes_of_noise(levels: Sequence[Source | float], data: Sequence[Source]) -> Iterator[str]:
    """Yield a note on each noise level that is far from the measurement's."""
    for number, (level, source) in enumerate(zip(levels, data, strict=True)):
        if (
            isinstance(level, float)
            and source.shape[1:]
            and not level / FAR < (seen := _estimated(source)) < level * FAR
        ):
            yield (
                f"operators[{number}].noise_sigma is {level:.4g}, and the measurement shows about {seen:.4g}: mean and standard deviation are only as "
                "right as it is. Write auto to use what is seen."
            )


def _squares(source: Readable, edge: int = 128, count: int = 16) -> list[Region]:
    axes = len(source.shape)
    return sample_regions(source.shape, count, (axes - 2, axes - 1), edge)


def _prior(given: Matern, parts: Sequence[Measurement], previous: Mapping[str, Any]) -> Likely:
    """Return the prior with what is auto decided: by the likelihood of windows of the first measurement that has some."""
    decided = previous.get("prior", {})
    given = replace(given, **{key: value for key, value in decided.items() if getattr(given, key) == "auto"})
    if "auto" not in (given.std, given.range, given.mean):
        return Likely(given, 0.0, 0.0)
    for part, edge in itertools.product(parts, EDGES):
        edge = min(edge, *part.data.shape[-2:])
        transfer = transfer_of(part.operator, edge) if edge >= LEAST_EDGE else None
        windows = list(_windows(part, edge)) if transfer is not None else []
        if transfer is not None and windows:
            return likely(windows, transfer, given, gain_of(part.operator))
    missing = " and ".join(f"prior.{key}" for key in ("std", "range", "mean") if getattr(given, key) == "auto")
    raise InputError(
        f"{missing}: auto comes from windows of a measurement without holes, of {LEAST_EDGE} × {LEAST_EDGE} pixels or more, by an operator that treats all pixels alike; there is none. "
        "Write numbers."
    )


def _windows(part: Measurement, edge: int) -> Iterator[Excerpt]:
    for region, weights in readable_parts(part.weight, _squares(part.data, edge, WINDOWS)):
        if weights.all() and masks_nothing(part.operator, region):
            pixels = np.asarray(part.data.read(region), np.float64).reshape(edge, edge)
            yield Excerpt(pixels, float(np.mean(1 / weights.astype(np.float64))))


def _method(opened: _Opened, request: PlanRequest) -> tuple[int | None, str]:
    """Return the halo of a block, None for conjugate gradients on the whole image; and why."""
    options, previous = opened.job.posterior, opened.state.previous
    if options.method == "cg" or (why := _sees_far(opened.operators)):
        return None, "as written" if options.method == "cg" else why
    if options.halo != "auto":
        return options.halo, "as written"
    if previous and (previous["identity"]["halo"] or options.method == "auto"):
        return previous["identity"]["halo"], "that of the run so far"
    with report_if_slow(request.report, "trying halos"), torch_threads():
        try:
            return _tried(opened), f"for errors below {options.tol:g} standard deviations"
        except (ConfigError, NotSolved) as error:
            if options.method == "blocks":
                raise
            return None, str(error).partition(". " if isinstance(error, NotSolved) else ":")[0]


def _tried(opened: _Opened) -> int:
    """Return the smallest halo that is wide enough on a few blocks, where the least is measured."""
    posterior, options = opened.posterior, opened.job.posterior
    blocks, tol = _squares(Constant(posterior.shape, posterior.dtype), TRIED, SEEN), options.tol * MARGIN
    weight = posterior.measurements[0].weight
    if weight.shape == posterior.shape:
        blocks = sorted(blocks, key=lambda block: float(np.sum(weight.read(block), dtype=np.float64)))
    blocks = blocks[:PLACES]
    most, reach, tried = max(posterior.shape[-2:]), 0.0, list[tuple[int, float]]()
    for halo in HALOS:
        if halo < reach and halo < most:
            continue
        solved = Solved(posterior, halo, (0, 1)[: opened.draws], options.tol, options.estimator)
        if halo >= most:
            return halo
        errors = ((float(np.abs(solved.solved(block)[1]).max()), block) for block in blocks)
        if (failed := next((each for each in errors if not each[0] <= tol), None)) is None:
            return halo
        error, block = failed
        tried = [*(tried if block is blocks[0] else []), (halo, error)]  # of one place
        blocks.sort(key=lambda each: each is not block)  # which is tried first at the next halo
        reach = _reach(tried, tol)
    raise ConfigError(
        f"no halo of up to {HALOS[-1]} pixels keeps the error below posterior.tol: {options.tol:g} standard deviations: the prior's range is "
        f"{posterior.prior.range:.3g} pixels, and little is measured. Write a larger tol, a smaller prior.range, posterior.halo, or posterior.method: cg."
    )


def _reach(tried: Sequence[tuple[int, float]], tol: float) -> float:
    """Return the least halo that may do, as the last errors fall with the halo; 0 where they do not."""
    if len(tried) < 2:
        return 0.0
    (near, larger), (far, smaller) = tried[-2:]
    fall = math.log(larger / smaller) / (far - near)
    return 0.0 if fall <= 0 else far + 0.8 * math.log(smaller / tol) / fall


def _planned(opened: _Opened, halo: int | None, halo_from: str) -> Planned:
    state, posterior, placement = opened.state, opened.posterior, place_job(opened.job, None)
    job = placement.job
    shape, count = posterior.shape, len(posterior.shape)
    roles = roles_of(opened.data[0], shape)
    geometry = Geometry(shape, shape, roles, 1, 1)
    layout = layout_like(
        opened.data[0], job.output, geometry, posterior.dtype, parse_bytes(job.run.memory_per_worker), state.previous
    )
    unit = block_unit(geometry, layout.shard)
    job, requested = no_more_than(job, placement.requested, shape, unit)
    kept, allowed = kept_bytes(opened.sources), allowed_bytes(job.run, placement.machine_bytes)
    cell = cell_of(layout.shard, shape, halo) if halo else ()
    draws, options, keeps = tuple(range(opened.draws)), job.posterior, job.output.samples is not None
    solved = Solved(posterior, halo or 0, draws, options.tol, options.estimator, cell, keeps)

    def needs(block: tuple[int, ...]) -> tuple[Need, ...]:
        if halo:
            return (_need(solved, block, kept),)
        return tuple(needs_of(_inversion(job, posterior, state.output, layout, block), kept, SMALLER))

    earlier = state.previous["identity"]["block"] if state.previous else None
    candidates = blocks_for(geometry, unit, job.run.count, earlier, given=job.tile.block)
    fits = (b for b in candidates if max(need.total_bytes for need in needs(b)) <= allowed)
    block = next(fits, candidates[-1])
    edges = tuple(min(b, n) for b, n in zip(block, shape, strict=True))
    grid = Grid(shape, edges, ((0, 0),) * count)
    layout = layout.in_levels(block, job.output.levels)
    maps = tuple(
        OutputArray(place, _titled(layout, title, opened), grid, job.output.overwrite, key)
        for key, place, title in _places(job, state.output)
    )
    work = SampleWork(maps, solved, overlap_pays(job.run))
    if not halo:
        work = WholeWork(maps, solved, work.overlap, _inversion(job, posterior, state.output, layout, edges))
    scratch = work.scratch if isinstance(work, WholeWork) else (0, 0)
    return Planned(
        placement=replace(placement, job=job, requested=requested),
        work=work,
        sources=opened.sources,
        files=tuple(measurements.files_of(job.operators)),
        identity=_identity(opened, solved, layout.to_json(), edges),
        needs=needs(edges),
        smaller=SMALLER,
        scratch_bytes=scratch[0],
        scratch_inodes=scratch[1],
        smaller_output="leave out output.samples" if job.output.samples else "",
        given={"operators": [measurements.written(choice) for choice in job.operators]},
        figures=_figures(opened, work, halo, halo_from),
        notes=(
            *opened.notes,
            *_note_of_halo(halo or 0, solved.cell, shape),
            *note_of_files(layout, job.output, roles),
            *notes_of_place(state.output, state.directory),
        ),
    )


def _figures(opened: _Opened, work: SampleWork, halo: int | None, halo_from: str) -> dict[str, Any]:
    job, cell = opened.job, work.solved.cell[-2:]
    return {
        "shape": list(opened.posterior.shape),
        "dtype": work.maps[0].layout.dtype,
        "std": job.output.std,
        "operators": [operator.name for operator in opened.operators],
        "data": [choice.data for choice in job.operators],
        "noise": [_noise_text(level) for level in opened.levels],
        "prior": prior_text(opened.found),
        "count": opened.draws,
        "estimator": job.posterior.estimator,
        "std_error": opened.std_error,
        "method": "blocks" if halo else "cg",
        "halo": halo,
        "halo_from": halo_from,
        "passes_each": None if halo else work.passes[0].times,
        "read_amplification": round(math.prod(c + 2 * (halo or 0) for c in cell) / math.prod(cell), 4),
    }


def _noise_text(level: Source | float) -> str:
    if isinstance(level, float):
        return f"{level:.4g}" if level else "of counts"
    return f"of {level.path}"


def _note_of_halo(halo: int, cell: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[str]:
    """Yield a note on a halo wider than what is solved with it."""
    if any(halo > c < n for c, n in zip(cell[-2:], shape[-2:], strict=False)):
        yield f"the halo of {halo} pixels is wider than what is solved with it, {' × '.join(map(str, cell[-2:]))}: a larger output.shard takes less time."


def cell_of(shard: tuple[int, ...], shape: tuple[int, ...], halo: int) -> tuple[int, ...]:
    """Return the edges of the parts that are solved each by itself: a plane of a shard, halved while its window is large.

    >>> cell_of((2, 2048, 512), (8, 4096, 4096), 64)
    (1, 1024, 512)
    """
    cell = tuple(min(s, n) for s, n in zip(shard[-2:], shape[-2:], strict=True))
    while math.prod(c + 2 * halo for c in cell) > MOST:
        halves = tuple(c // 2 if c % 2 == 0 and c > 2 * halo and c == max(cell) else c for c in cell)
        if halves == cell:
            break
        cell = halves
    return (*(1 for _ in shard[:-2]), *cell)


def _inversion(
    job: Sampling, posterior: Posterior, output: OutputPath, layout: Layout, block: tuple[int, ...]
) -> ReconstructWork:
    """Return the storage and the cost of a solution on the whole domain, in the blocks of the output."""
    shape, condition = posterior.domain.shape, 1 + 8 / posterior.prior.kappa2
    whole = tuple(n if b >= f else b for b, n, f in zip(block, shape, posterior.shape, strict=True))
    plain = replace(layout.as_plain_array(), shape=shape, attributes={}, georeference=None)
    # About as many as the prior alone takes: where all is measured, it needs fewer.
    passes = math.ceil(condition / 2 * math.log(2 * condition / (SOLVED * job.posterior.tol)))
    solver = SolverChoice(name="cg", iterations=passes)
    return ReconstructWork(
        Reconstruction(output=job.output, operators=(), solver=solver, run=job.run, import_folder=job.import_folder),
        OutputArray(output, plain, Grid(shape, whole, ((0, 0),) * len(shape))),
        Form(posterior.terms(None)),
        NoPrior(),
        ConjugateGradients(),
        Constant(shape, DOUBLE),
        Target(),
    )


def _places(job: Sampling, first: OutputPath) -> Iterator[tuple[str, OutputPath, str]]:
    """Yield the key, the path and the title of each image that is written: mean, standard deviation, draws."""
    yield "output.path", first, "posterior mean"
    if job.output.std:
        yield "output.std", full_path(job.output.std), "posterior standard deviation"
    stem = (job.output.samples or "").rstrip("/").removesuffix(".zarr")
    for number in range(job.posterior.count if job.output.samples else 0):
        yield "output.samples", full_path(f"{stem}-{number:03d}.zarr"), f"posterior draw {number}"


def _titled(layout: Layout, title: str, opened: _Opened) -> Layout:
    """Return a layout whose attributes say what the image is, and what it was computed from."""
    values = {key: getattr(opened.job.posterior, key) for key in ("count", "seed", "tol")}
    values |= {"prior": {"name": "matern", **asdict(opened.posterior.prior)}, "std_error": opened.std_error}
    return replace(layout, attributes={**layout.attributes, "long_name": title, "posterior": values})


def _map_error(of: Posterior, count: int, estimator: str) -> float:
    """Return the relative error of the standard deviation from so many draws, where all is measured; elsewhere it is at most that of plain squares."""
    known = (transfer_of(part.operator, EDGES[0]) for part in of.measurements)
    plain, transfers = 1 / math.sqrt(2 * count), [transfer for transfer in known if transfer is not None]
    if estimator == "samples" or len(transfers) < len(of.measurements):
        return plain
    precision = 1 / of.prior.spectrum((EDGES[0], EDGES[0]))
    for part, transfer in zip(of.measurements, transfers, strict=True):
        parts = readable_parts(part.weight, _squares(part.data))
        seen = np.concatenate([np.zeros(0), *(np.ravel(weights) for _, weights in parts)])
        if seen.any():
            precision += transfer / np.mean(1 / seen[seen != 0], dtype=np.float64)
    return plain * (1 - 1 / float(np.mean(precision) * np.mean(1 / precision)))


def _need(solved: Solved, block: tuple[int, ...], kept: int) -> Need:
    """Return the memory of a worker during a block."""
    window = math.prod(c + 2 * solved.halo for c in solved.cell[-2:]) * math.prod(solved.cell[:-2])
    images = (min(len(solved.draws), BATCH) + 2) * IMAGES_AT_ONCE + READ_AT_ONCE * len(solved.posterior.measurements)
    pixels = images * window + COPIES * solved.shape[0] * math.prod(block)
    return Need(
        f"one block of {list(block)} with {counted(len(solved.draws), 'draw')}",
        {PROCESS: IMPORTS_BYTES, "solutions": pixels * 8, DECODED: kept},
        SMALLER,
    )


def prior_text(found: Likely) -> str:
    prior = found.prior
    around = (
        f"matern, std {prior.std:.3g}{_sure(found.std_error)}, range {prior.range:.3g}{_sure(found.range_error)} pixels"
    )
    return f"{around}, around {prior.mean:.4g}"


def _sure(error: float) -> str:
    if not error < 1:
        return " (a guess: samples of the data do not show it; write it if you know it)"
    return f" ± {error:.0%}".replace("%", " %") if error else ""


def _identity(opened: _Opened, solved: Solved, layout: Mapping[str, Any], block: tuple[int, ...]) -> dict[str, Any]:
    """Return everything that can change a bit of the maps."""
    posterior, options = opened.posterior, opened.job.posterior
    triples = zip(opened.operators, opened.data, opened.levels, strict=True)
    return {
        "operators": {
            str(number): measurements.describe_operator(operator)
            | {"data": source.fingerprint(), "noise": level if isinstance(level, float) else level.fingerprint()}
            for number, (operator, source, level) in enumerate(triples)
        },
        **({"fidelity": asdict(opened.job.fidelity)} if opened.job.fidelity.name != "l2" else {}),
        "prior": {"name": "matern", **asdict(posterior.prior)},
        "posterior": {key: getattr(options, key) for key in ("count", "seed", "tol", "estimator")}
        | {"method": "blocks" if solved.halo else "cg"},
        "halo": solved.halo or None,
        "cell": list(solved.cell),
        "layout": dict(layout),
        "block": list(block),
        "code": code_versions(),
    }
