"""Several settings of a denoising job, compared on one crop of its image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, HalotileError, InputError, InputUnreadable, TaskFailed
from halotile.graphs.amounts import counted, first_line
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.kinds.sections import Cluster, Job
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.plan import Plan
from halotile.graphs.waiting import Report, no_report
from halotile.storage.arrays import Source
from halotile.storage.grid import Block, Region
from halotile.storage.images.planes import choose_planes
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.sharded.output import ShardWriter, WrittenBlock, to_dtype
from halotile.storage.views import measured, readable_parts
from halotile.tasks.block import Receipt
from halotile.tasks.denoise_block import DenoiseStages, DenoiseTask
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.noise.estimate import SAMPLES, as_square, plane_level, plane_regions, sample_regions
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import FaintDetail, faint_detail, noise_sigma, unbiased_risk, without_outliers
from halotile.tasks.noise.quiet_windows import Values, fit_noise, windows_of
from halotile.tasks.noise.residual import Residual, has_noise_map, has_photons, measured_at, noise_map_at
from halotile.tasks.roles import Roles

Spans = Mapping[str, tuple[int, int]]
"""First and last pixel, excluding that, along each axis by its letter."""

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


def choose_crop(source: Source, task: DenoiseTask, at: Mapping[str, int], region: Region | None) -> Spans:
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
    error: float  # estimate of the squared error relative to that of the noisy crop; it may be below 0
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

    @property
    def best(self) -> TriedSetting:
        """The setting with the smallest estimated error."""
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
    at: Mapping[str, int] | None = None,  # index along axes other than y and x
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
    place = choose_crop(first.sources[0], _task_of(first), at or {}, region)
    # One description of the noise for all, or their figures could not be compared.
    known = next((task for task in tasks.values() if has_photons(task)), None)
    described = known or next((task for task in tasks.values() if has_noise_map(task)), _task_of(first))
    plan_of_noise = next(plan for setting, plan in plans.items() if tasks[setting] is described)
    noise = _noise_of(plan_of_noise, described, place, level)
    noisy, tried = DenoisedPlace(described, place).noisy, []
    repaired, outliers = without_outliers(noisy, noise)
    for setting, task in tasks.items():
        with _noted(failed, setting):
            _check_shape(task, _task_of(first))
            tried.append(_evaluated(setting, DenoisedPlace(task, place), noise, repaired, outliers))
    if not tried:
        raise _none_left(failed)
    reasons = {setting: str(error) for setting, error in failed.items()}
    mean = float(np.nanmean(np.where(np.isfinite(noisy), noise_sigma(noisy, noise), np.nan)))
    photons = noise if np.any(noise.gain) else None
    return Comparison(
        place, noisy, mean, photons, "PURE" if photons else "SURE", tuple(tried), reasons, int(outliers.sum())
    )


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


def _check_shape(task: DenoiseTask, first: DenoiseTask) -> None:
    """Refuse a setting that denoises another image than the first one."""
    if task.source.shape != first.source.shape:
        raise ConfigError("its image has another shape, so there is no common crop. Compare it apart.")


def _task_of(plan: Plan) -> DenoiseTask:
    assert isinstance(plan.work, DenoiseWork)
    return plan.work.task


def _noise_of(plan: Plan, task: DenoiseTask, place: Spans, level: float) -> PhotonNoise:
    """Return the noise of a place, of shapes that broadcast to (channels, rows, columns); NaN where there is none."""
    crop, source = DenoisedPlace(task, place), plan.sources[0]
    if has_photons(task):
        noise = PhotonNoise.from_json(plan.identity["noise"])
        if noise.gain.ndim:
            axes, looped = task.roles.axes, task.roles.looped
            planes = [
                tuple(c if axes[i] == "c" else place[axes[i]][0] for i in looped)
                for c in range(*place.get("c", (0, 1)))
            ]
            noise = _per_channel(*([float(part[at]) for at in planes] for part in _parts(noise)))
    elif has_noise_map(task):
        sigma = crop.view(noise_map_at(task, crop.region)).astype(np.float64)
        noise = PhotonNoise(np.zeros(()), np.zeros(()), np.where(sigma > 0, sigma, np.nan))
    elif level:
        noise = PhotonNoise(np.zeros(()), np.zeros(()), np.array(level))
    else:
        samples = list(samples_at(source, task, place))
        fits = [fit for fit in map(fit_noise, map(windows_of, samples)) if fit and fit.is_clear]
        if len(fits) == len(samples):
            # One level for dark and bright alike would reward what leaves the noise of the bright.
            found = PhotonNoise.of(np.array([fit.gain for fit in fits]), np.array([fit.variance for fit in fits]))
            noise = _per_channel(*_parts(found))
        else:
            levels = np.array([plane_level(squares) for squares in samples])
            noise = _per_channel(0 * levels, 0 * levels, np.where(levels > 0, levels, np.nan))
    if not (noise_sigma(crop.noisy, noise)[np.isfinite(crop.noisy)] > 0).any():
        raise InputError(
            f"{source.path}: no noise can be estimated in the plane of the crop, and settings are compared by it. "
            "Choose another plane or region."
        )
    return noise


def _parts(noise: PhotonNoise) -> list[Values]:
    return [getattr(noise, part.name) for part in fields(noise)]


def _per_channel(*parts: Any) -> PhotonNoise:
    """Return the noise of several channels, which broadcasts to an image of them."""
    gain, offset, read_sigma = (np.reshape(np.asarray(part, np.float64), (-1, 1, 1)) for part in parts)
    return PhotonNoise(gain, offset, read_sigma)


def _evaluated(
    setting: Setting, crop: DenoisedPlace, noise: PhotonNoise, repaired: Values, outliers: NDArray[np.bool_]
) -> TriedSetting:
    denoised, denoise, sigma = crop.denoised, crop.denoise, noise_sigma(repaired, noise)
    residual = (crop.noisy - denoised.astype(np.float64)) / sigma
    counted = replace(noise, read_sigma=np.where(outliers, np.nan, noise.read_sigma)) if outliers.any() else noise
    error = unbiased_risk(repaired, counted, denoise)
    if not math.isfinite(error):
        raise InputError("no pixel of the crop can be compared: all are holes, or without noise. Take another region.")
    detail = faint_detail(repaired, sigma, denoise, denoise(repaired))
    return TriedSetting(setting, denoised, residual, Residual.of(residual), error, detail)


class DenoisedPlace:
    """Rows and columns of an image, with one index along each other axis, or several channels, and what a task makes of them.

    Images of the place have the shape (channels, rows, columns).

    Parameters
    ----------
    task : DenoiseTask
        The task, as a worker has it; its denoiser keeps the shape of the image.
    place : mapping of str to (int, int)
        The place.
    """

    def __init__(self, task: DenoiseTask, place: Spans) -> None:
        self.task, self.place = task, place
        self.region = region_of(task.roles, task.grid.shape, place)

    @cached_property
    def noisy(self) -> Values:
        """The image, with NaN in holes and where a mask keeps it."""
        pixels = np.where(self._measured, self._pixels, np.nan) if not self._measured.all() else self._pixels
        return self.view(pixels).astype(np.float64)

    @cached_property
    def denoised(self) -> Pixels:
        """The pixels that a run writes there."""
        return self.view(self._run(self.task))

    def denoise(self, image: Values) -> Values:
        """Denoise another image at this place, among the pixels around it; unrounded, with NaN in holes."""
        pixels = self._pixels.astype(np.result_type(self._pixels.dtype, np.float32))
        shown, kept = self.view(pixels), self.view(self._measured)
        shown[kept] = image[kept]
        task = replace(self.task, source=_Replaced(self.task.source, self.region, pixels))
        return np.where(kept, self.view(self._run(task, "float64")), np.nan)

    def view(self, pixels: Array) -> Array:
        """Arrange pixels of the region as an image of the place; never a copy."""
        axes = self.task.roles.axes
        shown = [axes.index(letter) for letter in "cyx" if letter in axes]
        others = [axis for axis in range(len(axes)) if axis not in shown]
        view: Array = pixels.transpose(others + shown)[(0,) * len(others)]
        if "c" not in axes:
            return np.expand_dims(view, 0)
        takes_all = self.task.roles.channel is not None and "c" in self.place
        return view[slice(*self.place["c"])] if takes_all else view

    @cached_property
    def _pixels(self) -> Array:
        return self.task.source.read(self.region)

    @cached_property
    def _measured(self) -> Array:
        return measured_at(self.task, self.region, self._pixels)

    @cached_property
    def _stages(self) -> DenoiseStages:
        stages = self.task.stages()
        stages.check()
        return stages

    def _run(self, task: DenoiseTask, dtype: str | None = None) -> Pixels:
        """Read, denoise and keep the region as a worker does, except that nothing is stored."""
        layout = task.writer.layout
        kept = _KeptRegion("", replace(layout, dtype=dtype or layout.dtype))
        block = Block(0, (0,) * len(self.region.start), self.region, task.grid.window_of(self.region))
        receipt = Receipt()
        with torch_threads():
            stages = self._stages
            stages.task = replace(task, writer=kept)
            stages.write(block, stages.compute(block, stages.read(block), receipt), receipt)
        return kept.written[0]


def region_of(roles: Roles, shape: tuple[int, ...], place: Spans) -> Region:
    """The region of an image at a place, with all channels where the denoiser takes them together.

    >>> region_of(Roles(("t", "c", "y", "x"), (2, 3), 1), (5, 3, 60, 70), {"t": (2, 3), "c": (0, 1), "y": (8, 16), "x": (0, 4)})
    Region(start=(2, 0, 8, 0), stop=(3, 3, 16, 4))
    """
    spans = [(0, shape[i]) if i == roles.channel else place.get(letter, (0, 1)) for i, letter in enumerate(roles.axes)]
    return Region(tuple(a for a, _ in spans), tuple(b for _, b in spans))


@dataclass(frozen=True)
class _KeptRegion(ShardWriter):
    """A writer that keeps what it is given, in the type of the output."""

    written: list[Pixels] = field(default_factory=list, compare=False)

    def write(self, region: Region, pixels: Array) -> WrittenBlock:
        self.written.append(to_dtype(pixels, self.layout.dtype))
        return WrittenBlock(0, b"")


@dataclass(frozen=True)
class _Replaced:
    """An image with other pixels in a region."""

    source: Readable
    region: Region
    pixels: Pixels

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        common = region.clip(self.region)
        pixels = self.source.read(region).astype(self.dtype)
        pixels[common.relative_to(region).slices] = self.pixels[common.relative_to(self.region).slices]
        return pixels
