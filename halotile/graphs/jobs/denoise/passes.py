"""The passes of a denoising job: one, over all blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halotile.graphs.jobs.denoise.job import residual_row, residual_warning, shift_warning
from halotile.graphs.jobs.denoise.place import DenoisedPlace
from halotile.graphs.jobs.denoise.stripes import PHASE as STRIPES
from halotile.graphs.jobs.denoise.stripes import Striped, corrections_pass, grid_of, with_kept
from halotile.graphs.kinds.base import (
    Gather,
    InspectedPlace,
    Inspection,
    OutputArray,
    Pass,
    PassCount,
    RunView,
    Sums,
    Work,
)
from halotile.graphs.plans.notes import place_text
from halotile.storage.arrays import open_array
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.views import readable_parts
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask, noise_at
from halotile.tasks.noise.estimate import as_square, plane_level, plane_regions, spread_evenly
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import HEIGHTS, FaintDetail, faint_detail, noise_sigma
from halotile.tasks.noise.quiet_windows import Values
from halotile.tasks.noise.residual import Residual
from halotile.tasks.noise.stripes import LineCorrections, WithoutStripes
from halotile.tasks.roles import Roles
from halotile.tasks.trials.gpu_trial import Tuned

NO_STRIPES = Striped()
PLANES, PLACES, CHANNELS = 4, 16, 64
"""Planes that are looked at, squares of all of them together, and channels: more planes and squares only where there are more channels."""


DETAIL_SECONDS, SHARE, TORCH_SECONDS = 2.0, 0.05, 4.0
"""Seconds of computing that the faint detail may take, share of a run, and seconds until PyTorch is loaded."""


def inspect_residual(
    task: AnyDenoiseTask,
    output: OutputPath,
    seconds: float = 0.0,
    pixel_seconds: float = math.inf,
    striped: Striped = NO_STRIPES,
) -> Inspection:
    """Measure the residual of an image that was denoised, and its faint detail if that is quick beside a run of so many seconds.

    Nothing is found where there is no noise, or no common shape.
    """
    main = task.parts[0]
    if main.denoiser.scale != 1 or main.source.dtype.kind == "b":
        return Inspection()
    result = open_array(str(output))
    if result.shape != main.source.shape:
        return Inspection()
    found, roles, shown = {}, _roles(main), dict[str, _Square]()
    places = _planes(main)
    for place in places:
        residual = _of_plane(task, result, place, max(1, PLACES // len(places)), shown)
        if residual and residual.ratio > 0:
            found[place] = residual
    if not found:
        return Inspection()
    figures = [
        {
            "plane": place_text(roles, place),
            "ratio": r.ratio,
            **r.correlations_json(),
            "holds_structure": r.is_structured,
            "shift": r.shift,
        }
        for place, r in found.items()
    ]
    labels, residuals = _labels(main), list(found.values())
    planes = (place_text(roles, place).split(", ") for place in found)
    names = [", ".join(labels.get(part, part) for part in plane) for plane in planes]  # such as t=0, DAPI
    warnings = [residual_warning(names, residuals, striped.notes), shift_warning(names, residuals)]
    count = math.prod(main.source.shape[i] for i in roles.looped)
    rows, more = [residual_row(names, residuals, count)], {}
    detail: tuple[FaintDetail, ...] = ()
    with suppress(Exception):  # the workers may have a library that is missing here
        detail = _detail(task, next(iter(found)), seconds, pixel_seconds)
    if detail:
        kept, seen = (", ".join(f"{100 * each[i]:.0f}" for each in detail) for i in (1, 2))
        text = f"{kept} % of the height kept at {', '.join(map(str, HEIGHTS))} noise levels; {seen} % detected"
        rows.append(("faint detail", f"{text}; in {names[0]}" if len(found) > 1 else text))
        more = {"faint_detail": [each._asdict() for each in detail]}
    return Inspection({"residual": figures, **more}, rows, [*filter(None, warnings)], _places(shown))


STRUCTURE, LARGEST = "most structure", "largest residual"


class _Square(NamedTuple):
    """A place that the report shows, and what it was chosen by."""

    spread: float
    place: InspectedPlace


def _places(shown: Mapping[str, _Square]) -> list[InspectedPlace]:
    """Return the places that were chosen, with the reasons; one where they are the same."""
    titles: dict[str, list[str]] = {}
    for reason, square in shown.items():
        titles.setdefault(square.place.title, []).append(reason)
    places = {square.place.title: square.place for square in shown.values()}
    return [places[where]._replace(title=f"{where}: {' and '.join(reasons)}") for where, reasons in titles.items()]


def _detail(
    whole: AnyDenoiseTask, place: tuple[int, ...], seconds: float, pixel_seconds: float
) -> tuple[FaintDetail, ...]:
    """Return the faint detail that is left in the middle of a plane; nothing where it takes too long, or workers have another device."""
    (region,) = _regions(whole, place, 1)
    task = whole.at(region)
    if task.device != "cpu" or [task.roles.axes[i] for i in task.roles.spatial[-2:]] != ["y", "x"]:
        return ()
    spans = zip(region.start, region.stop, strict=True)
    crop = DenoisedPlace(task, dict(zip(task.roles.axes, spans, strict=True)))
    cost = (3 + len(HEIGHTS)) * task.grid.window_of(crop.region).size * pixel_seconds
    loading = 0.0 if "torch" in sys.modules else TORCH_SECONDS
    if cost > DETAIL_SECONDS or cost + loading > SHARE * seconds:
        return ()
    noisy = crop.noisy
    sigma = _noise(task, region, noisy[0], plane_level([noisy[0]]))[None]
    return faint_detail(noisy, sigma, crop.denoise, crop.denoise(noisy))


def _regions(task: AnyDenoiseTask, place: tuple[int, ...], count: int) -> list[Region]:
    """Return squares of a plane."""
    main = task.parts[0]
    roles, shape = _roles(main), main.source.shape
    at = dict(zip(roles.looped, place, strict=True))
    return plane_regions(shape, (roles.spatial[-2], roles.spatial[-1]), at, count)


def _roles(task: DenoiseTask) -> Roles:
    """Return the roles of the axes with channels apart, also where a network takes them together."""
    return replace(task.roles, channel=None)


def _planes(task: DenoiseTask) -> list[tuple[int, ...]]:
    """Return the places of planes on the looped axes: at least one of each channel; of many, some that are spread evenly."""
    roles = _roles(task)
    lengths = {roles.axes[i]: task.source.shape[i] for i in roles.looped}
    others = {axis: length for axis, length in lengths.items() if axis != "c"}
    channels = [*dict.fromkeys(spread_evenly(range(lengths.get("c", 1)), CHANNELS))]
    count = max(1, PLANES // len(channels)) * len(channels)
    places = set()
    for n, index in enumerate(spread_evenly([*np.ndindex(*others.values())], count)):
        place = {"c": channels[n % len(channels)], **dict(zip(others, index, strict=True))}
        places.add(tuple(place[axis] for axis in lengths))
    return sorted(places)


def _of_plane(
    whole: AnyDenoiseTask, result: Readable, place: tuple[int, ...], count: int, shown: dict[str, _Square]
) -> Residual | None:
    """Return the residual of a plane, None where it has no noise; enter its squares among those to be shown."""
    regions = _regions(whole, place, count)
    task = whole.at(regions[0])
    square = (task.roles.spatial[-2], task.roles.spatial[-1])
    squares: list[tuple[Region, Values, Values]] = []
    # Kept defects are the same in both images; the others would count as structure that was taken away.
    kept = task.defects is not None and task.defects.are_kept
    for region, pixels in readable_parts(task.source if kept else task.repaired(), regions):
        measured = np.where(task.measured(region, pixels), pixels, np.nan)
        squares.append((region, as_square(measured, square), as_square(result.read(region), square)))
    level = plane_level([noisy for _, noisy, _ in squares])
    if not level > 0:
        return None
    letters = (task.roles.axes[square[0]], task.roles.axes[square[1]])
    relative = [(noisy - denoised) / _noise(task, at, noisy, level) for at, noisy, denoised in squares]
    for (region, noisy, denoised), residual in zip(squares, relative, strict=True):
        spans = zip(task.roles.axes, region.start, region.stop, strict=True)
        where = ", ".join(f"{axis} {a}" if b == a + 1 else f"{axis} {a} to {b - 1}" for axis, a, b in spans)
        after = np.where(np.isfinite(noisy), denoised, np.nan)
        for reason, image in ((STRUCTURE, after), (LARGEST, residual)):
            spread = float(np.nanstd(image)) if np.isfinite(image).any() else 0.0
            if reason not in shown or spread > shown[reason].spread:
                shown[reason] = _Square(spread, InspectedPlace(where, noisy[None], after[None], residual[None]))
    return Residual.of(relative, letters)


def _noise(task: DenoiseTask, region: Region, noisy: Values, level: float) -> Values:
    """Return the standard deviation of the noise of each pixel; NaN where there is none."""
    square, noise = task.roles.spatial[-2:], noise_at(task, region, level)
    parts = (np.broadcast_to(part, region.shape) for part in (noise.gain, noise.offset, noise.read_sigma))
    sigma: Values = noise_sigma(noisy[None], PhotonNoise(*(as_square(part, square)[None] for part in parts)))[0]
    return sigma


def _labels(task: DenoiseTask) -> dict[str, str]:
    """Return the names of the channels by ``c=0`` and so on; none where two are alike."""
    omero = task.writer.layout.omero
    labels = [str(channel.get("label", n)) for n, channel in enumerate(omero["channels"])] if omero else []
    is_named = len(set(labels)) == len(labels)
    return {f"c={n}": label for n, label in enumerate(labels) if is_named and label not in ("", str(n))}


PHASE = "denoise"
GPU_TASK_SECONDS = 10.0
"""Minimum duration of a task on a GPU, which is idle between the blocks of two tasks; a kill loses one task."""


@dataclass(frozen=True)
class DenoiseWork(Work):
    """A denoiser applied to every block of an image."""

    output: OutputArray
    task: AnyDenoiseTask
    tuned: Tuned | None = None
    striped: Striped = NO_STRIPES
    also: tuple[OutputArray, ...] = ()  # further images of the same blocks

    @property
    def outputs(self) -> tuple[OutputArray, ...]:
        """The denoised image, and further ones."""
        return (self.output, *self.also)

    @property
    def passes(self) -> tuple[PassCount, ...]:
        """One pass over every block; before it, one over the lines where stripes are removed."""
        denoised = PassCount(PHASE, self.task.grid, len(self.outputs))
        return (PassCount(STRIPES, grid_of(self._lines)), denoised) if self._lines else (denoised,)

    @property
    def _lines(self) -> LineCorrections | None:
        """The corrections of lines that a run measures."""
        source = self.task.parts[0].source
        corrections = source.corrections if isinstance(source, WithoutStripes) else None
        return corrections if isinstance(corrections, LineCorrections) else None

    @property
    def keeps_state(self) -> bool:
        """True with corrections of lines, by which the result is inspected."""
        return self._lines is not None

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> Inspection:
        """Compare a few places of the result with the image."""
        task = _with_kept(self.task, RunDirectory.beside(self.output.path))
        found = inspect_residual(task, self.output.path, seconds, pixel_seconds, self.striped)
        text = self.striped.text
        return replace(found, rows=[("stripes", text), *found.rows]) if text else found

    def run(self, at: RunView) -> Generator[Pass | Gather, Sums, None]:
        task, main = self.task, self.task.parts[0]
        if self._lines:
            yield corrections_pass(self._lines, main.roles.axes, at.directory, task.io_threads)
            task = _with_kept(task, at.directory)
        yield Pass(
            PHASE,
            task,
            self.output,
            task_seconds=None if main.device == "cpu" else GPU_TASK_SECONDS,
            seconds_per_block=self.tuned.seconds_per_block if self.tuned else None,
            also=self.also,
        )


def _with_kept(task: AnyDenoiseTask, directory: RunDirectory) -> AnyDenoiseTask:
    """Return a task whose image has the corrections that a run has measured, where there are any."""
    return task.changed(lambda part: replace(part, source=with_kept(part.source, directory)))
