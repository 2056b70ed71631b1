"""Several settings of a denoising job, compared on one crop of its image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from halotile.errors import ConfigError, HalotileError, InputError, InputUnreadable, TaskFailed
from halotile.graphs.jobs.denoise.comparison import Comparison, Score, Setting, TriedSetting
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.jobs.denoise.place import DenoisedPlace, Spans, readable_places, spans_of
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Job
from halotile.graphs.plans.choices import choices_of_channels
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.waiting import Report, no_report
from halotile.graphs.words import counted, first_line
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.images.planes import MOST_CHANNELS, channel_names, choose_planes
from halotile.storage.sharded.ome_metadata import shown_colours
from halotile.tasks.denoise_block import AnyDenoiseTask, ChannelsTask, DenoiseTask, has_noise_map
from halotile.tasks.denoisers.base import Leveled
from halotile.tasks.denoisers.common.photon_denoiser import PhotonDenoiser
from halotile.tasks.inner_tiles import respanned
from halotile.tasks.noise.estimate import SAMPLES, plane_regions, sample_regions
from halotile.tasks.noise.noise_correlation import noise_correlation
from halotile.tasks.noise.photon_noise import PhotonNoise, noise_of_planes
from halotile.tasks.noise.quality import NO_RISK, Risk, faint_detail, noise_sigma, unbiased_risk, without_outliers
from halotile.tasks.noise.quiet_windows import WINDOW, Values, cut
from halotile.tasks.noise.residual import Residual

EDGE = 512  # edge of a crop in pixels
CANDIDATES = 16  # places; the one with most structure is taken
# Edge of the smallest square crop whose figures mean something, and of the narrowest one that has neighbours to go by.
SMALLEST, NARROWEST = 16, 4
LARGEST = 1024  # edge of the largest crop that is asked for
# Estimates of an error at most; and the difference that they have to tell, relative to the smallest error: about 0.2 dB.
PROBES, TOLD = 8, 0.05
RESULTS, CLOSEST = 64, 6  # results of a denoiser for these, at most, and settings that are estimated again


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
    candidates = [spans_of(source.axes, region) for region in _candidates(source, fixed)]
    if len(candidates) == 1:
        return candidates[0]
    if not (places := readable_places(task, candidates)):
        raise InputUnreadable(
            f"{source.path}: none of {counted(len(candidates), 'place')} can be read. Write a region."
        )
    return max(places, key=lambda place: _structure(place.noisy)).place


def samples_at(source: Source, task: DenoiseTask, place: Spans) -> Iterator[list[Values]]:
    """Yield samples of the whole plane of each channel of a place, in the units of the file."""
    axes = source.axes
    square = axes.index("y"), axes.index("x")
    tiled = {task.roles.axes[i] for i in task.roles.spatial}
    for channel in range(*place.get("c", (0, 1))):
        at = {i: place[a][0] if a != "c" else channel for i, a in enumerate(axes) if a not in tiled}
        regions = plane_regions(source.shape, square, at, SAMPLES)
        yield [each.noisy[0] for each in readable_places(task, (spans_of(axes, region) for region in regions))]


def _candidates(source: Source, fixed: Spans) -> list[Region]:
    """Return places spread evenly over the axes that are not fixed."""
    square = source.axes.index("y"), source.axes.index("x")
    spread = sample_regions(source.shape, CANDIDATES, square, EDGE)
    spans = {source.axes.index(axis): span for axis, span in fixed.items()}
    return list(dict.fromkeys(respanned(region, spans) for region in spread))


def _structure(image: Values) -> float:
    """Return the mean difference of neighbouring squares; those without measured pixels count as 0."""
    # Medians, which neither noise nor single bright pixels move much.
    squares = np.median(cut(image, min(WINDOW, *image.shape[-2:])), (-3, -1))
    steps = [np.abs(np.diff(squares, axis=axis)) for axis in (-2, -1)]
    return float(sum(np.where(np.isfinite(step), step, 0).sum() for step in steps) / squares.size)


Failed = dict[Setting, HalotileError]  # settings that cannot be used, with the reasons


def compare(
    settings: Sequence[Setting],  # overrides of the job file
    job_of: Callable[[Setting], Job],  # returns the job with these overrides
    *,
    at: Mapping[str, int | str] | None = None,  # index along axes other than y and x, or the name of a channel
    region: Region | None = None,  # rows and columns of the crop; by default those with most structure
    report: Report = no_report,  # called with a line about each slow operation
) -> Comparison:
    """Denoise one crop with each setting, as a run of the job would."""
    failed: Failed = {}
    jobs: dict[Setting, Job] = {}
    tasks: dict[Setting, AnyDenoiseTask] = {}
    sources: list[Source] = []
    for setting in settings:
        with _noted(failed, setting):
            jobs[setting] = job_of(setting)
            source, task = _planned(jobs[setting], report)
            if sources and source.shape != sources[0].shape:
                raise ConfigError("its image has another shape, so there is no common crop. Compare it apart.")
            tasks[setting] = task
            sources.append(source)
    if not tasks:
        raise _none_left(failed)
    own: Setting | None = None
    with _noted({}, ()):
        own = next((setting for setting in tasks if jobs[setting] == job_of(())), None)
    source, main = sources[0], next(iter(tasks.values())).parts[0]
    place = choose_crop(source, main, at or {}, region)
    names, spans = channel_names(source), place.get("c", (0, 1))
    by_channel = any(len(task.parts) > 1 for task in tasks.values()) or spans[1] - spans[0] == 1
    if "c" in (at or {}) or not by_channel or not 2 <= len(names) <= MOST_CHANNELS or main.roles.channel is not None:
        return replace(
            _compared(tasks, source, place, _level_in(spans[0], tasks, jobs, source), failed, report), preferred=own
        )
    found: dict[str, Comparison] = {}
    without: Failed = {}
    for number, name in enumerate(names):
        with _noted(without, (name,)):
            level = _level_in(number, tasks, jobs, source)
            found[name] = _compared(tasks, source, {**place, "c": (number, number + 1)}, level, dict(failed), report)
    if not found:
        raise _none_left(without)
    tied = [{tried.setting for tried in one.tied} for one in found.values() if one.suggested]
    common = [setting for setting in tasks if all(setting in equal for equal in tied)]
    preferred = own if own in common else next(iter(common), own)
    found = {name: replace(one, preferred=preferred) for name, one in found.items()}
    best = {name: _chosen(found.get(name), preferred) for name in names}
    blend = choose_planes(source, {}, None).blended().blend or shown_colours(({},) * len(names))  # of a photograph
    colours = dict(zip(names, blend, strict=True))
    return replace(
        next(iter(found.values())),
        channels=found,
        written=_written(best, jobs, source),
        colours=tuple(colours[name] for name in found),
        failed={setting: why for one in found.values() for setting, why in one.failed.items()},
        missing={name: str(error) for (name,), error in without.items()},
    )


def _level_in(
    channel: int, tasks: Mapping[Setting, AnyDenoiseTask], jobs: Mapping[Setting, Any], source: Source
) -> float:
    """Return the noise level that all settings have in a channel; 0 where none has one, or the level is what is tried."""
    levels: set[float] = set()
    for setting, task in tasks.items():
        choices = choices_of_channels(jobs[setting].denoiser, jobs[setting].channels, source)
        own = replace(jobs[setting], denoiser=choices[channel if len(choices) > 1 else 0])
        levels.add(known_level(own, task.parts[task.of_channel[channel]] if isinstance(task, ChannelsTask) else task))
    levels.discard(0.0)
    return levels.pop() if len(levels) == 1 else 0.0


def known_level(job: Any, task: DenoiseTask) -> float:
    """Return the noise level that a job has, in the units of the file; 0 where it has none."""
    options = getattr(job.denoiser, "options", None) or {"sigma": getattr(job.denoiser, "sigma", None)}
    given, (low, high) = options.get("sigma"), task.tiling.range or (0.0, 1.0)
    is_level = isinstance(given, int | float) and isinstance(task.denoiser, Leveled)
    return float(job.noise.read_sigma or (given and is_level and given * (high - low)) or 0)


def _chosen(one: Comparison | None, usual: Setting | None) -> Setting | None:
    """Return the setting for a channel: the suggested one; where errors cannot be estimated the usual one; None where none is better than the image."""
    if one is not None and one.correlation is not None:
        return usual
    return one.suggested.setting if one and one.suggested else None


def _written(best: Mapping[str, Setting | None], jobs: Mapping[Setting, Any], source: Source) -> dict[str, Any]:
    """Return the denoisers that a job file has for these settings of channels, None for what no setting improves; nothing where all are alike."""
    if len(set(best.values())) == 1:
        return {}
    choices: dict[str, DenoiserChoice] = {}
    for name, setting in best.items():
        job = jobs[setting] if setting is not None else None
        of_all = choices_of_channels(job.denoiser, job.channels, source) if job else [DenoiserChoice(name="none")]
        choices[name] = of_all[channel_names(source).index(name) if len(of_all) > 1 else 0]
    main = max(choices.values(), key=lambda choice: sum(each.name == choice.name for each in choices.values()))
    alike = {name: choice.options for name, choice in choices.items() if choice.name == main.name}
    merged = {
        key: main.options[key]
        if len({str(own.get(key)) for own in alike.values()}) == 1
        else {name: own[key] for name, own in alike.items() if key in own}
        for key in dict.fromkeys(key for own in alike.values() for key in own)
    }
    others = {n: {"name": each.name, **each.options} for n, each in choices.items() if n not in alike}
    return {"denoiser": {"name": main.name, **merged}, **({"channels": others} if others else {})}


def _compared(
    tasks: Mapping[Setting, AnyDenoiseTask], source: Source, place: Spans, level: float, failed: Failed, report: Report
) -> Comparison:
    """Compare settings at one place."""
    crops = {setting: DenoisedPlace(task, place) for setting, task in tasks.items()}
    # One description of the noise for all, or their figures could not be compared.
    with_photons = [s for s, crop in crops.items() if isinstance(crop.task.denoiser, PhotonDenoiser)]
    with_maps = [s for s, crop in crops.items() if has_noise_map(crop.task)]
    described = next(iter((*with_photons, *with_maps, *tasks)))
    crop = crops[described]
    # A map tells where there is little noise, and these places would count most.
    samples = [] if has_noise_map(crop.task) else [*samples_at(source, crop.task, place)]
    correlated = [found for each in samples if (found := noise_correlation(each)) and found.is_clear]
    is_known = with_photons or with_maps or level
    noise, noisy, tried = crop.noise(level) if is_known else noise_of_planes(samples), crop.noisy, []
    if not (noise_sigma(noisy, noise)[np.isfinite(noisy)] > 0).any():
        raise InputError(
            f"{source.path}: no noise can be estimated in the plane of the crop, and settings are compared by it. "
            "Choose another plane or region."
        )
    repaired, outliers = without_outliers(noisy, noise)
    judged = None if correlated else noise._replace(read_sigma=np.where(outliers, np.nan, noise.read_sigma))
    for setting, crop in crops.items():
        with _noted(failed, setting):
            if not np.array_equal(crop.noisy, noisy, equal_nan=True):
                raise ConfigError("its image has other pixels there: errors cannot be compared. Look at it apart.")
            tried.append(_evaluated(setting, crop, noise, repaired, judged))
    if not tried:
        raise _none_left(failed)
    tried = _probed_again(
        tried, lambda setting, seed: unbiased_risk(repaired, judged or noise, crops[setting].denoise, seed), report
    )
    reasons = {setting: str(error) for setting, error in failed.items()}
    mean = float(np.nanmean(np.where(np.isfinite(noisy), noise_sigma(noisy, noise), np.nan)))
    photons = noise if np.any(noise.gain) else None
    score: Score = "PURE" if photons else "SURE"
    count, correlation = int(outliers.sum()), next(iter(correlated), None)
    return Comparison(place, noisy, mean, photons, score, tuple(tried), reasons, count, correlation)


@contextmanager
def _noted(failed: Failed, setting: Setting) -> Iterator[None]:
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


def _planned(job: Job, report: Report) -> tuple[Source, AnyDenoiseTask]:
    """Plan a run from its beginning on this machine: its image and its task. Nothing is claimed or written."""
    if not isinstance(job, Denoising):
        raise ConfigError(f"job is {job.kind}, and only the settings of job: denoise are compared on a crop.")
    local = replace(job, cluster=Cluster(kind="local"))
    plan = make_plan(local, fresh=True, refuse=False, makes_folder=True, report=report)
    if plan.layout.shape != plan.sources[0].shape:
        raise ConfigError(
            f"{job.denoiser.name} changes the shape of the image, so there is no residual to compare it by. "
            "Use a denoiser that keeps it."
        )
    assert isinstance(plan.work, DenoiseWork)
    return plan.sources[0], plan.work.task


def _evaluated(
    setting: Setting, crop: DenoisedPlace, noise: PhotonNoise, repaired: Values, judged: PhotonNoise | None
) -> TriedSetting:
    """Evaluate a setting; ``judged``: noise with NaN in outliers, None where it is correlated, which an estimate takes for structure."""
    denoised, denoise, sigma = crop.denoised, crop.denoise, noise_sigma(repaired, noise)
    # Outliers do not count here either.
    residual = (np.where(crop.noisy == repaired, repaired, np.nan) - denoised.astype(np.float64)) / sigma
    risk = unbiased_risk(repaired, judged, denoise) if judged else NO_RISK
    if judged and not math.isfinite(risk.error):
        raise InputError("no pixel of the crop can be compared: all are holes, or without noise. Take another region.")
    detail = faint_detail(repaired, sigma, denoise, denoise(repaired))
    statistics, repairs = Residual.from_images(residual), crop.task.defects is not None
    return TriedSetting(setting, denoised, residual, statistics, risk, detail, repairs)


def _probed_again(
    tried: list[TriedSetting], estimate: Callable[[Setting, int], Risk], report: Report
) -> list[TriedSetting]:
    """Estimate errors again with other probes, for the settings that may be the best as far as the estimates can tell, until they can."""
    means = {each.setting: each.risk for each in tried}
    risks = {setting: [risk] for setting, risk in means.items()}
    for seed in range(1, PROBES):
        best = min(means.values())
        margins = {setting: 2 * math.hypot(each.spread, best.spread) for setting, each in means.items()}
        close = [s for s, each in means.items() if TOLD * best.error < margins[s] > each.error - best.error]
        close = sorted(close, key=means.__getitem__)[:CLOSEST]
        # Equal estimates are those of equal results.
        if len({means[setting] for setting in close}) < 2 or (seed + 1) * best.results > RESULTS:
            break
        if seed == 1:
            report(f"the errors of {counted(len(close), 'setting')} are close: they are estimated again")
        with suppress(Exception):  # of a network or function of the user's own: what is known counts
            for setting in close:
                risks[setting].append(estimate(setting, seed))
        for setting in close:
            found = np.array(risks[setting])
            means[setting] = best._replace(
                error=float(found[:, 0].mean()), spread=float(found[:, 1].mean()) / math.sqrt(len(found))
            )
    return [replace(each, risk=means[each.setting]) for each in tried]
