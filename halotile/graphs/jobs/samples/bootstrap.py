"""The plan of a denoised image with the standard deviation of its error, and its pass."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.compare import known_level
from halotile.graphs.jobs.denoise.image import plane_values
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.jobs.denoise.place import DenoisedPlace, spans_of
from halotile.graphs.jobs.denoise.plan import plan_denoising
from halotile.graphs.jobs.samples.job import Sampling
from halotile.graphs.kinds.base import OutputArray, OutputState, Planned, PlanRequest
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES
from halotile.graphs.waiting import report_if_slow
from halotile.graphs.words import counted
from halotile.storage.disk.object_path import full_path
from halotile.storage.grid import Block, Region
from halotile.storage.rim import Array
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import PlaneValues, Replaced, measured
from halotile.tasks.block import Receipt
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask, has_noise_map, noise_at
from halotile.tasks.denoisers.common.photon_denoiser import PhotonDenoiser
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.noise.estimate import estimate_noise_levels, sample_regions
from halotile.tasks.noise.photon_noise import PhotonNoise, survey_planes
from halotile.tasks.noise.quality import unbiased_risk, without_outliers
from halotile.tasks.posterior.bootstrap import BootstrapTask

SMALLER = "a smaller tile.block, output.shard or tile.size"
SHARE = 3  # part of the memory that a denoising job is planned with: a block holds further images
BYTES = 40  # bytes of further images for each pixel that is read: what was read, noise, their sum, squares
FACTOR, OTHER = "factor", "factor_if_noise_is_2_percent_stronger"
# Least factor that is credible where the noise was estimated: with known noise, none was below 0.64; and the variance
# of 2 % more noise.
LEAST, MORE = 0.6, 0.04
# Squares that the factor comes from, their edge, redraws of each, and measured pixels that they need.
PLACES, EDGE, DRAWS, ENOUGH = 16, 128, 4, 1000


def plan_bootstrap(job: Sampling, state: OutputState, request: PlanRequest) -> Planned:
    """Decide every size: those of a denoising job with less memory, and the factor of calibration."""
    options, memory = job.posterior, parse_bytes(job.run.memory_per_worker)
    run = replace(job.run, memory_per_worker=min(memory, IMPORTS_BYTES + abs(memory - IMPORTS_BYTES) // SHARE))
    own = {each.name: getattr(job, each.name) for each in fields(Denoising) if hasattr(job, each.name)}
    planned = plan_denoising(Denoising(**own | {"run": run}), state, request)
    work, decided = planned.work, planned.placement.job
    assert isinstance(work, DenoiseWork)
    task = _checked(decided, work.task)
    known: Mapping[str, Any] = (state.previous or {}).get("identity", {}).get("posterior") or {}
    is_given = bool(known_level(decided, task)) or has_noise_map(task) or decided.noise.gain != "auto"
    level = PlaneValues(np.asarray(known["level"])) if known else _level(decided, task, is_given)
    layout, place = work.output.layout, full_path(job.output.std or "")
    layout = replace(layout, dtype="float64" if layout.dtype == "float64" else "float32", nodata=None, omero=None)
    draws: dict[str, Any] = {"count": options.count, "seed": options.seed}
    redone = BootstrapTask(**vars(task), deviation=ShardWriter(place, layout), level=level, **draws)
    is_applied = options.calibrate != "none"
    found = {key: known[key] for key in (FACTOR, OTHER)} if known else _calibrated(redone, request, is_applied)
    factor, text = found[FACTOR], "not known, not applied"
    if is_applied and not is_given and factor and factor < LEAST:
        raise InputError(
            f"SURE gives a factor of {factor:.2g} for the error map, so the estimated noise level is probably too high. "
            "Write the noise that you know: noise.read_sigma, or noise.gain and offset for photons; or posterior.calibrate: none."
        )
    redone = replace(redone, factor=factor if is_applied and factor else 1.0)
    if factor:
        text = f"{factor:.3g} from SURE, {'' if is_applied else 'not '}applied; {found[OTHER]:.2g} if the noise is 2 % stronger"
    said = {"method": "bootstrap", **draws, **found, "calibrate": "sure" if is_applied else "none"}
    titled = {"long_name": "standard deviation of the error", "posterior": said}
    deviation = OutputArray(place, replace(layout, attributes=titled), redone.grid, job.output.overwrite, "output.std")
    run = replace(decided.run, memory_per_worker=job.run.memory_per_worker)
    need, more = planned.needs[0], BYTES * redone.grid.middle.window.size
    return replace(
        planned,
        placement=replace(planned.placement, job=replace(job, run=run)),
        work=replace(work, task=redone, tuned=None, also=(deviation,)),
        identity=planned.identity | {"posterior": said | {"level": level.values.tolist()}},
        needs=(replace(need, parts={**need.parts, "the noise": more}, remedy="", smaller=SMALLER),),
        smaller=SMALLER,
        figures={**planned.figures, **draws, "std": job.output.std, "calibration": text},
    )


def _checked(job: Denoising, task: AnyDenoiseTask) -> DenoiseTask:
    """Return the task of a denoising job, if it can be done again."""
    whole = isinstance(task, DenoiseTask) and task.denoiser.scale == 1 and len({*task.denoiser.channels}) == 1
    if not whole or job.input.defects_in_output == "kept":
        raise ConfigError(
            f"denoiser is {job.denoiser.name}: a map of its error needs one denoiser for all channels that keeps the shape of the image, and computes every pixel. "
            "Write such a denoiser, without values for single channels, and input.defects_in_output: replaced."
        )
    assert isinstance(task, DenoiseTask)
    return task


def _level(job: Denoising, task: DenoiseTask, is_given: bool) -> PlaneValues:
    """Return the noise level of each plane, in the units of the file; refuse noise that is not known, or correlated."""
    roles = task.roles.apart
    whole = PlaneValues(np.full((1,) * len(roles.axes), known_level(job, task)))
    if is_given:
        return whole
    holes = task.holes.value if task.holes else None
    view = measured(task.source, holes, task.sides.get("mask"), roles.spatial, len(roles.axes))
    instead = "Write its standard deviation as noise.read_sigma, in the units of the file"
    for plane in survey_planes(view, roles.spatial, roles.looped):
        if plane.correlation and plane.correlation.is_clear:
            raise InputError(
                f"the noise is correlated, by {plane.correlation}, and noise that is drawn again is not: the error would be too small. "
                f"{plane.correlation.advice}. If it is texture of the image and the noise is independent: {instead}."
            )
    if isinstance(task.denoiser, PhotonDenoiser):
        return whole
    try:
        return plane_values(estimate_noise_levels(view, roles.spatial, roles.looped), roles)
    except InputError:
        raise InputError(f"no noise is seen in {job.input.path}, and an error needs it. {instead}.") from None


def _calibrated(task: BootstrapTask, request: PlanRequest, is_applied: bool) -> dict[str, Any]:
    """Return the factor by which the mean square of the deviation is the squared error that SURE estimates, on a few squares. None if it is neither known nor applied."""
    with report_if_slow(request.report, "calibrating the error map"), torch_threads():
        task = replace(task, device="cpu", precision="float32", count=min(task.count, DRAWS))
        stages, totals, seen = task.stages(), np.zeros(3), 0
        for region in sample_regions(task.grid.shape, PLACES, task.roles.spatial[-2:], EDGE):
            window = task.grid.window_of(region)
            image, outliers = _repaired(task, window.clip(Region.whole(task.grid.shape)))
            crop = DenoisedPlace(replace(task, source=image), spans_of(task.roles.axes, region))
            noise = crop.noise(task.level.read(crop.region))
            found = crop.view(outliers[crop.region.relative_to(image.region).slices])
            noise = noise._replace(read_sigma=np.where(found, np.nan, noise.read_sigma))
            variance = noise.gain * crop.noisy + noise.variance
            counts = np.isfinite(variance)
            seen += int(counts.sum())
            if counts.sum() > ENOUGH // PLACES:
                risk = unbiased_risk(crop.noisy, noise, crop.denoise).error * variance[counts].mean()
                block = Block(0, (0,) * len(region.start), crop.region, window)
                _, denoised, deviation = stages.compute(block, image, Receipt())
                after, wide = (crop.view(task.roles.restore(part)) for part in (denoised, deviation))
                squares = (np.square(part)[counts].mean() for part in (wide, after - crop.noisy))
                totals += counts.sum() * np.array([risk, *squares])
    if seen >= ENOUGH and min(totals[:2]) > 0:
        error, spread, taken = totals.tolist()
        stronger = error + MORE * (error - taken)  # SURE is linear in the variance of the noise
        return {FACTOR: math.sqrt(error / spread), OTHER: math.sqrt(max(stronger, 0) / spread)}
    if not is_applied:
        return {FACTOR: None, OTHER: None}
    fault = "SURE sees no error in samples of the image that exceeds its own, so a standard deviation cannot be calibrated. If the noise level was estimated, write it as noise: {model: gaussian, read_sigma: ...}; otherwise write a weaker denoiser, posterior.calibrate: none, or job: denoise."
    if seen < ENOUGH:
        few = counted(seen, "measured pixel") if seen else "no pixel that was measured"
        fault = f"samples of the image have {few}, and a factor from SURE needs {ENOUGH:,}. Write posterior.calibrate: none for a map without it."
    raise InputError(fault)


def _repaired(task: BootstrapTask, window: Region) -> tuple[Replaced, Array]:
    """Return the image with the median of its neighbours for each outlier in a window, and where those are."""
    pixels, roles = task.source.read(window), task.roles
    noise, shape = noise_at(task, window, task.level.read(window)), roles.arrange(pixels).shape
    parts = (np.where(task.measured(window, pixels), pixels, np.nan), *noise)
    seen, *others = (roles.arrange(np.broadcast_to(part, window.shape)).reshape(-1, *shape[-2:]) for part in parts)
    better, outliers = (roles.restore(part.reshape(shape)) for part in without_outliers(seen, PhotonNoise(*others)))
    pixels = np.where(outliers, better, pixels).astype(np.result_type(pixels.dtype, np.float32))
    return Replaced(task.source, window, pixels), outliers
