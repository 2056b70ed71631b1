"""Several settings of a denoising job, compared on one crop of its image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, HalotileError, InputError, InputUnreadable, TaskFailed
from halotile.graphs.amounts import counted, first_line
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.jobs.denoise.place import DenoisedPlace, Spans
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Job
from halotile.graphs.plans.choices import choices_of_channels
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.plan import Plan
from halotile.graphs.waiting import Report, no_report
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.images.planes import MOST_CHANNELS, channel_names, choose_planes
from halotile.storage.rim import Array, Readable
from halotile.storage.views import measured, readable_parts
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask
from halotile.tasks.noise.estimate import SAMPLES, as_square, plane_regions, sample_regions
from halotile.tasks.noise.noise_correlation import NoiseCorrelation, noise_correlation
from halotile.tasks.noise.photon_noise import PhotonNoise, noise_of_planes, per_channel
from halotile.tasks.noise.quality import FaintDetail, faint_detail, noise_sigma, unbiased_risk, without_outliers
from halotile.tasks.noise.quiet_windows import Values
from halotile.tasks.noise.residual import Residual, has_noise_map, has_photons, noise_map_at
from halotile.tasks.noise.stripes import WithoutStripes

EDGE = 512
"""Edge of a crop in pixels."""
CANDIDATES = 16
"""Places of which the one with most structure is taken."""
SMALLEST, NARROWEST = 16, 4
"""Edge of the smallest square crop whose figures mean something, and of the narrowest one that has neighbours to go by."""
LARGEST = 1024
"""Edge of the largest crop that is asked for."""
NEAR, MUCH_LESS = 2.0, 2 / 3
"""Ratio of errors up to which a setting may be preferred for the faint detail that it keeps, and what the best keeps of that at most."""
COARSE = 8
"""Edge of the squares whose medians are compared."""


def choose_crop(source: Source, task: DenoiseTask, at: Mapping[str, int | str], region: Region | None) -> Spans:
    """Return the place to compare settings on; where it is left open, the one with most structure of a fixed number of places.

    ``source``: image as it is stored; ``task``: what is known of its holes; ``at``: index along axes other than y and x; ``region``: rows and
    columns.
    """
    if region is not None and max(region.shape) > LARGEST:
        rows, columns = region.shape
        raise ConfigError(
            f"the region has {rows:,} × {columns:,} pixels, and a crop is compared pixel by pixel. "
            f"Write one of at most {LARGEST} × {LARGEST}, or leave it out."
        )
    planes = choose_planes(source, at, region)
    if min(planes.shape) < NARROWEST or math.prod(planes.shape) < SMALLEST**2:
        raise ConfigError(
            f"the crop has {planes.shape[0]} × {planes.shape[1]} pixels, too few to compare settings by. "
            f"Take at least {SMALLEST} × {SMALLEST}."
        )
    fixed = {axis: (index, index + 1) for axis, index in planes.at.items()}
    if planes.colour:
        fixed["c"] = (0, planes.samples)
    if region is not None:
        fixed |= {"y": (region.start[0], region.stop[0]), "x": (region.start[1], region.stop[1])}
    candidates = _candidates(source, fixed)
    best = candidates[0]
    if len(candidates) > 1:
        parts = readable_parts(image_of(source, task), candidates)
        if not parts:
            raise InputUnreadable(
                f"{source.path}: none of {counted(len(candidates), 'place')} can be read. Write a region."
            )
        best = max(parts, key=lambda part: _structure(part[1], source.axes))[0]
    return dict(zip(source.axes, zip(best.start, best.stop, strict=True), strict=True))


def image_of(source: Readable, task: DenoiseTask) -> Readable:
    """Return the image with NaN in its holes, and where it is masked."""
    value, roles = task.holes.value if task.holes else None, task.roles
    if isinstance(task.source, WithoutStripes):
        source = replace(task.source, source=source)
    return measured(source, value, task.sides.get("mask"), roles.spatial, len(roles.axes))


def samples_at(source: Source, task: DenoiseTask, place: Spans) -> Iterator[list[Array]]:
    """Yield samples of the whole plane of each channel of a place, in the units of the file."""
    axes, image = source.axes, image_of(source, task)
    square = axes.index("y"), axes.index("x")
    tiled = {task.roles.axes[i] for i in task.roles.spatial}
    for channel in range(*place.get("c", (0, 1))):
        at = {i: place[a][0] if a != "c" else channel for i, a in enumerate(axes) if a not in tiled}
        regions = plane_regions(source.shape, square, at, SAMPLES)
        yield [as_square(part, square) for _, part in readable_parts(image, regions)]


def _candidates(source: Source, fixed: Spans) -> list[Region]:
    """Return places spread evenly over the axes that are not fixed."""
    square = source.axes.index("y"), source.axes.index("x")
    spread = sample_regions(source.shape, CANDIDATES, square, EDGE)
    ends = [fixed.get(axis) for axis in source.axes]
    moved = [
        Region(
            tuple(end[0] if end else a for a, end in zip(region.start, ends, strict=True)),
            tuple(end[1] if end else b for b, end in zip(region.stop, ends, strict=True)),
        )
        for region in spread
    ]
    return list(dict.fromkeys(moved))


def _structure(pixels: Array, axes: tuple[str, ...]) -> float:
    """Return the mean difference of neighbouring squares; those without measured pixels count as 0."""
    image = np.moveaxis(pixels.astype(np.float64), (axes.index("y"), axes.index("x")), (-2, -1))
    rows, columns = (max(1, n // COARSE) for n in image.shape[-2:])
    edge = min(COARSE, *image.shape[-2:])
    image = image[..., : rows * edge, : columns * edge]
    # Medians, which neither noise nor single bright pixels move much.
    squares = np.median(image.reshape(*image.shape[:-2], rows, edge, columns, edge), (-3, -1))
    steps = [np.abs(np.diff(squares, axis=axis)) for axis in (-2, -1)]
    return float(sum(np.where(np.isfinite(step), step, 0).sum() for step in steps) / squares.size)


Setting = tuple[str, ...]
"""Overrides of a job file, such as ``("denoiser.strength=0.5",)``."""
Score = Literal["SURE", "PURE"]
"""Unbiased risk estimates for Gaussian noise, and for noise of photons."""


@dataclass(frozen=True)
class TriedSetting:
    """A setting with the crop that it denoised."""

    setting: Setting  # overrides of the job file
    denoised: NDArray[Any]  # pixels that a run writes there
    # noisy crop less the denoised one, relative to the standard deviation of the noise; NaN in holes
    residual: Values
    statistics: Residual  # its size relative to the noise, and the correlation of its neighbouring pixels
    # estimate of the squared error relative to that of the noisy crop; it may be below 0. NaN where noise is correlated
    error: float
    detail: tuple[FaintDetail, ...]  # faint detail that is left, by its height

    @property
    def detail_kept(self) -> float:
        """Share of the faint detail that is left, the mean over its heights."""
        return float(np.mean([found.kept for found in self.detail])) if self.detail else 1.0


@dataclass(frozen=True)
class Comparison:
    """Settings compared on one crop."""

    place: Spans  # crop: first and last pixel, excluding that, along each axis of the image
    noisy: Values  # crop; NaN in holes
    noise: float  # mean standard deviation of the noise there, in the units of the file
    photons: (
        PhotonNoise | None
    )  # noise by which all settings are judged, of shapes that broadcast to the crop; None for Gaussian noise
    score: Score  # the estimate of the error
    tried: tuple[TriedSetting, ...]  # settings that could be used, as they were listed
    failed: Mapping[Setting, str]  # others, with the reason
    outliers: int = 0  # hot, dead and other pixels that noise does not explain: they were replaced, and do not count
    correlation: NoiseCorrelation | None = None  # that of the noise, where it is clear: no error can be estimated then
    # that of each channel by its name, this one first, and what a job file has for the suggestions where they differ;
    # empty where one channel was compared, or all together
    channels: Mapping[str, Comparison] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    colours: tuple[str, ...] = ()  # colours of these channels, six hexadecimal digits each

    @property
    def best(self) -> TriedSetting:
        """The setting with the smallest estimated error; the first where none can be estimated."""
        return min(self.tried, key=lambda tried: tried.error)

    @property
    def suggested(self) -> TriedSetting | None:
        """The same, if its estimated error is less than that of the noisy crop."""
        return self.best if self.best.error < 1 else None

    @property
    def keeps_more(self) -> TriedSetting | None:
        """A setting of little more error than the best that keeps much more of the faint detail, which hardly counts in the error."""
        near = [tried for tried in self.tried if tried.error <= NEAR * max(self.best.error, 0)]
        most = max(near, key=lambda tried: tried.detail_kept, default=self.best)
        return most if self.best.detail_kept < MUCH_LESS * most.detail_kept else None


def compare(
    settings: Sequence[Setting],  # overrides of the job file
    job_of: Callable[[Setting], Job],  # returns the job with these overrides
    *,
    at: Mapping[str, int | str] | None = None,  # index along axes other than y and x, or the name of a channel
    region: Region | None = None,  # rows and columns of the crop; by default those with most structure
    report: Report = no_report,  # called with a line about each slow operation
) -> Comparison:
    """Denoise one crop with each setting, as a run of the job would."""
    failed: dict[Setting, HalotileError] = {}
    plans: dict[Setting, Plan] = {}
    level = 0.0  # where a job knows it
    for setting in settings:
        with _noted(failed, setting):
            job = job_of(setting)
            plans[setting] = _planned(job, report)
            level = level or job.noise.read_sigma  # type: ignore[attr-defined]
    if not plans:
        raise _none_left(failed)
    first, tasks = next(iter(plans.values())), {setting: _task_of(plan) for setting, plan in plans.items()}
    source, main = first.sources[0], _task_of(first).parts[0]
    place = choose_crop(source, main, at or {}, region)
    names, spans = channel_names(source), place.get("c", (0, 1))
    by_channel = any(len(task.parts) > 1 for task in tasks.values()) or spans[1] - spans[0] == 1
    if "c" in (at or {}) or not by_channel or not 2 <= len(names) <= MOST_CHANNELS or main.roles.channel is not None:
        return _compared(plans, place, level, failed)
    found: dict[str, Comparison] = {}
    without: dict[Setting, HalotileError] = {}
    for number, name in enumerate(names):
        with _noted(without, (name,)):
            found[name] = _compared(plans, {**place, "c": (number, number + 1)}, level, dict(failed))
    if not found:
        raise _none_left(without)
    best = {name: one.suggested.setting if (one := found.get(name)) and one.suggested else None for name in names}
    colours = dict(zip(names, choose_planes(source, {}, None).blended().blend, strict=True))
    shown = tuple(colours[name] for name in found)
    written = _written(best, job_of, source)
    first_one = next(iter(found.values()))
    missing = {setting: str(error) for setting, error in without.items()}
    return replace(first_one, channels=found, written=written, colours=shown, failed={**first_one.failed, **missing})


def _written(best: Mapping[str, Setting | None], job_of: Callable[[Setting], Job], source: Source) -> dict[str, Any]:
    """Return the denoisers that a job file has for these settings of channels, None for what no setting improves; nothing where all are alike."""
    if len(set(best.values())) == 1:
        return {}
    choices: dict[str, DenoiserChoice] = {}
    for name, setting in best.items():
        job: Any = job_of(setting) if setting is not None else None
        of_all = choices_of_channels(job.denoiser, job.channels, source) if job else [DenoiserChoice(name="none")]
        choices[name] = of_all[channel_names(source).index(name) if len(of_all) > 1 else 0]
    main = max(choices.values(), key=lambda choice: sum(each.name == choice.name for each in choices.values()))
    alike = {name: choice.options for name, choice in choices.items() if choice.name == main.name}
    merged = {
        key: main.options[key] if len({str(own.get(key)) for own in alike.values()}) == 1 else _each(alike, key)
        for key in dict.fromkeys(key for own in alike.values() for key in own)
    }
    others = {n: {"name": each.name, **each.options} for n, each in choices.items() if n not in alike}
    return {"denoiser": {"name": main.name, **merged}, **({"channels": others} if others else {})}


def _each(options: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: own[key] for name, own in options.items() if key in own}


def _compared(
    plans: Mapping[Setting, Plan], place: Spans, level: float, failed: dict[Setting, HalotileError]
) -> Comparison:
    """Compare settings at one place."""
    first = _task_of(next(iter(plans.values())))
    crops = {setting: DenoisedPlace(_task_of(plan), place) for setting, plan in plans.items()}
    # One description of the noise for all, or their figures could not be compared.
    known = [setting for setting, crop in crops.items() if has_photons(crop.task)]
    known += [setting for setting, crop in crops.items() if has_noise_map(crop.task)]
    described = next(iter(known or plans))
    # A map tells where there is little noise, and these places would count most.
    is_mapped = has_noise_map(crops[described].task)
    samples = [] if is_mapped else [*samples_at(plans[described].sources[0], crops[described].task, place)]
    correlated = [found for each in samples if (found := noise_correlation(each)) and found.is_clear]
    noise = _noise_of(plans[described], place, level, samples)
    noisy, tried = crops[described].noisy, []
    repaired, outliers = without_outliers(noisy, noise)
    judged = None if correlated else replace(noise, read_sigma=np.where(outliers, np.nan, noise.read_sigma))
    for setting, crop in crops.items():
        with _noted(failed, setting):
            _check_shape(_task_of(plans[setting]), first)
            if not np.array_equal(crop.noisy, noisy, equal_nan=True):
                raise ConfigError(
                    "its image has other pixels there, so their errors cannot be compared. Look at it apart."
                )
            tried.append(_evaluated(setting, crop, noise, repaired, judged))
    if not tried:
        raise _none_left(failed)
    reasons = {setting: str(error) for setting, error in failed.items()}
    mean = float(np.nanmean(np.where(np.isfinite(noisy), noise_sigma(noisy, noise), np.nan)))
    photons = noise if np.any(noise.gain) else None
    score: Score = "PURE" if photons else "SURE"
    count, correlation = int(outliers.sum()), next(iter(correlated), None)
    return Comparison(place, noisy, mean, photons, score, tuple(tried), reasons, count, correlation)


@contextmanager
def _noted(failed: dict[Setting, HalotileError], setting: Setting) -> Iterator[None]:
    """Note the reason where work on a setting fails."""
    try:
        yield
    except HalotileError as error:
        failed[setting] = error
    except Exception as error:  # of a network or function of the user's own
        failed[setting] = TaskFailed(f"{type(error).__name__}: {first_line(str(error))}")


def _none_left(failed: Mapping[Setting, HalotileError]) -> HalotileError:
    """Return the error of all settings, or one that names each."""
    if len({str(error) for error in failed.values()}) == 1:
        return next(iter(failed.values()))
    lines = "\n".join(f"{' '.join(setting)}: {error}" for setting, error in failed.items())
    return ConfigError(f"none of {counted(len(failed), 'setting')} can be used.\n{lines}")


def _planned(job: Job, report: Report) -> Plan:
    """Plan a run from its beginning on this machine; nothing is claimed or written."""
    if not isinstance(job, Denoising):
        raise ConfigError(f"job is {job.kind}, and only the settings of job: denoise are compared on a crop.")
    plan = make_plan(
        replace(job, cluster=Cluster(kind="local")), fresh=True, refuse=False, makes_folder=True, report=report
    )
    if plan.layout.shape != plan.sources[0].shape:
        raise ConfigError(
            f"{job.denoiser.name} changes the shape of the image, so there is no residual to compare it by. "
            "Use a denoiser that keeps it."
        )
    return plan


def _check_shape(task: AnyDenoiseTask, first: AnyDenoiseTask) -> None:
    """Refuse a setting that denoises another image than the first one."""
    if task.grid.shape != first.grid.shape:
        raise ConfigError("its image has another shape, so there is no common crop. Compare it apart.")


def _task_of(plan: Plan) -> AnyDenoiseTask:
    assert isinstance(plan.work, DenoiseWork)
    return plan.work.task


def _noise_of(plan: Plan, place: Spans, level: float, samples: Sequence[Sequence[Values]]) -> PhotonNoise:
    """Return the noise of a place, of shapes that broadcast to (channels, rows, columns); NaN where there is none."""
    source, identity, crop = plan.sources[0], plan.identity, DenoisedPlace(_task_of(plan), place)
    task, number = crop.task, place.get("c", (0, 1))[0]
    if "channels" in identity:
        identity = next(part for part in identity["channels"] if number in part["numbers"])
        number = identity["numbers"].index(number)
        place = {**place, "c": (number, number + 1)}
    if has_photons(task):
        noise = PhotonNoise.from_json(identity["noise"])
        if noise.gain.ndim:
            axes, looped = task.roles.axes, task.roles.looped
            planes = [
                tuple(c if axes[i] == "c" else place[axes[i]][0] for i in looped)
                for c in range(*place.get("c", (0, 1)))
            ]
            noise = per_channel(*([float(part[at]) for at in planes] for part in _parts(noise)))
    elif has_noise_map(task):
        sigma = crop.view(noise_map_at(task, crop.region)).astype(np.float64)
        noise = PhotonNoise(np.zeros(()), np.zeros(()), np.where(sigma > 0, sigma, np.nan))
    elif level:
        noise = PhotonNoise(np.zeros(()), np.zeros(()), np.array(level))
    else:
        noise = noise_of_planes(samples)
    if not (noise_sigma(crop.noisy, noise)[np.isfinite(crop.noisy)] > 0).any():
        raise InputError(
            f"{source.path}: no noise can be estimated in the plane of the crop, and settings are compared by it. "
            "Choose another plane or region."
        )
    return noise


def _parts(noise: PhotonNoise) -> list[Values]:
    return [getattr(noise, part.name) for part in fields(noise)]


def _evaluated(
    setting: Setting, crop: DenoisedPlace, noise: PhotonNoise, repaired: Values, judged: PhotonNoise | None
) -> TriedSetting:
    """Evaluate a setting; ``judged``: noise with NaN in outliers, None where it is correlated, which an estimate takes for structure."""
    denoised, denoise, sigma = crop.denoised, crop.denoise, noise_sigma(repaired, noise)
    # Outliers do not count here either.
    residual = (np.where(crop.noisy == repaired, repaired, np.nan) - denoised.astype(np.float64)) / sigma
    error = unbiased_risk(repaired, judged, denoise) if judged else math.nan
    if judged and not math.isfinite(error):
        raise InputError("no pixel of the crop can be compared: all are holes, or without noise. Take another region.")
    detail = faint_detail(repaired, sigma, denoise, denoise(repaired))
    return TriedSetting(setting, denoised, residual, Residual.of(residual), error, detail)
