"""The passes of a denoising job: one, over all blocks."""

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halotile.graphs.jobs.denoise.image import NO_STRIPES, Striped
from halotile.graphs.jobs.denoise.job import residual_row, residual_warning, shift_warning
from halotile.graphs.jobs.denoise.place import DenoisedPlace, readable_places, spans_of
from halotile.graphs.jobs.denoise.stripes import PHASE as STRIPES
from halotile.graphs.jobs.denoise.stripes import corrections_pass, grid_of, with_kept
from halotile.graphs.kinds import base
from halotile.graphs.plans.notes import place_text
from halotile.storage.arrays import open_array
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseTask
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.noise.estimate import plane_level, plane_regions, spread_evenly
from halotile.tasks.noise.quality import HEIGHTS, FaintDetail, faint_detail, noise_sigma
from halotile.tasks.noise.residual import Residual
from halotile.tasks.noise.stripes import LineCorrections, WithoutStripes
from halotile.tasks.trials.gpu_trial import Tuned

# Planes that are looked at, squares of all of them together, and channels: more planes and squares only where there are
# more channels.
PLANES, PLACES, CHANNELS = 4, 16, 64
# Noise levels beyond the range of a type from which a pixel counts as clipped, and the share from which a run warns.
CLIPPED, LEAST_CLIPPED = 3.0, 1e-3


# Seconds of computing that the faint detail may take, share of a run, and seconds until PyTorch is loaded.
DETAIL_SECONDS, SHARE, TORCH_SECONDS = 2.0, 0.05, 4.0


def inspect_residual(
    task: AnyDenoiseTask,
    output: OutputPath,
    seconds: float = 0.0,
    pixel_seconds: float = math.inf,
    striped: Striped = NO_STRIPES,
) -> base.Inspection:
    """Measure the residual of an image that was denoised, and its faint detail if that is quick beside a run of so many seconds.

    Nothing is found where there is no noise, or no common shape.
    """
    main = task.parts[0]
    if main.denoiser.scale != 1 or main.source.dtype.kind == "b":
        return base.Inspection()
    result = open_array(str(output))
    if result.shape != main.source.shape:
        return base.Inspection()
    if main.defects and not main.defects.are_kept:  # else they are the same in both images
        task = task.changed(lambda part: replace(part, source=part.repaired(), defects=None))
    found, roles, shown = {}, _roles(main), list[base.InspectedPlace]()
    places = _planes(main)
    for place in places:
        residual = _of_plane(task, result, place, max(1, PLACES // len(places)), shown)
        if residual and residual.ratio > 0:
            found[place] = residual
    cut_off = _clipping_warning(shown, result.dtype)
    if not found:
        return base.Inspection(warnings=(cut_off,)) if cut_off else base.Inspection()
    figures = [
        {"plane": place_text(roles, place), "ratio": r.ratio, **r.structure_json(), "shift": r.shift}
        for place, r in found.items()
    ]
    labels, residuals = _labels(main), list(found.values())
    planes = (place_text(roles, place).split(", ") for place in found)
    names = [", ".join(labels.get(part, part) for part in plane) for plane in planes]  # such as t=0, DAPI
    warnings = [cut_off]
    if not cut_off:  # else the denoiser is not to blame
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
    return base.Inspection({"residual": figures, **more}, rows, [*filter(None, warnings)], _chosen(shown))


def _chosen(shown: Sequence[base.InspectedPlace]) -> list[base.InspectedPlace]:
    """Return the places that the report shows, with the reasons; one where they are the same."""
    titles: dict[int, list[str]] = {}
    for reason, images in (
        ("most structure", [place.after for place in shown]),
        ("largest residual", [place.residual for place in shown]),
    ):
        spreads = [float(np.nanstd(image)) if np.isfinite(image).any() else 0.0 for image in images]
        titles.setdefault(int(np.argmax(spreads)), []).append(reason)
    return [shown[n]._replace(title=f"{shown[n].title}: {' and '.join(each)}") for n, each in titles.items()]


def _detail(
    whole: AnyDenoiseTask, place: tuple[int, ...], seconds: float, pixel_seconds: float
) -> tuple[FaintDetail, ...]:
    """Return the faint detail that is left in the middle of a plane; nothing where it takes too long, or workers have another device."""
    (crop,) = _crops(whole, place, 1)
    cost = (3 + len(HEIGHTS)) * crop.task.grid.window_of(crop.region).size * pixel_seconds
    loading = 0.0 if "torch" in sys.modules else TORCH_SECONDS
    if crop.task.device != "cpu" or cost > DETAIL_SECONDS or cost + loading > SHARE * seconds:
        return ()
    noisy = crop.noisy
    sigma = noise_sigma(noisy, crop.noise(plane_level([noisy[0]])))
    return faint_detail(noisy, sigma, crop.denoise, crop.denoise(noisy))


def _crops(task: AnyDenoiseTask, place: tuple[int, ...], count: int) -> list[DenoisedPlace]:
    """Return squares of a plane that can be read."""
    main = task.parts[0]
    roles, square = _roles(main), main.roles.spatial[-2:]
    regions = plane_regions(main.source.shape, square, dict(zip(roles.looped, place, strict=True)), count)
    plane = "".join(roles.axes[axis] for axis in square)
    return readable_places(task, (spans_of(roles.axes, region) for region in regions), plane)


def _roles(task: DenoiseTask) -> Roles:
    """Return the roles of the axes with channels apart, also where a network takes them together."""
    return task.roles.apart


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
    task: AnyDenoiseTask, result: Readable, place: tuple[int, ...], count: int, shown: list[base.InspectedPlace]
) -> Residual | None:
    """Return the residual of a plane, None where it has no noise; enter its squares among those to be shown."""
    crops, residuals = _crops(task, place, count), []
    level = plane_level([crop.noisy[0] for crop in crops])
    if not level > 0:
        return None
    for crop in crops:
        noisy, denoised = crop.noisy, crop.view(result.read(crop.region)).astype(np.float64)
        after = np.where(np.isfinite(noisy) & np.isfinite(denoised), denoised, np.nan)
        residual = (noisy - after) / noise_sigma(noisy, crop.noise(level))
        spans = ((axis, a, b - 1) for axis, (a, b) in crop.place.items())
        where = ", ".join(f"{axis} {a}" if a == b else f"{axis} {a} to {b}" for axis, a, b in spans)
        shown.append(base.InspectedPlace(where, noisy, after, residual))
        residuals.append(residual[0])
    plane = crops[0].plane
    return Residual.from_images(residuals, (plane[0], plane[1]))


def _clipping_warning(shown: Sequence[base.InspectedPlace], dtype: np.dtype[Any]) -> str:
    """Return a warning where a type of whole numbers clipped values by more than noise; empty where not."""
    if dtype.kind not in "iu":
        return ""
    ends = np.iinfo(dtype)
    clipped = [
        (part.before < ends.min) & (part.residual < -CLIPPED) | (part.before > ends.max) & (part.residual > CLIPPED)
        for part in shown
    ]
    share = float(np.mean([each.mean() for each in clipped])) if clipped else 0.0
    if share < LEAST_CLIPPED:
        return ""
    return (
        f"about {100 * share:.2g} % of the pixels of the image are outside the range of {dtype}, {ends.min} to {ends.max}, and were clipped. "
        "Write output.dtype: float32"
    )


def _labels(task: DenoiseTask) -> dict[str, str]:
    """Return the names of the channels by ``c=0`` and so on; none where two are alike."""
    omero = task.writer.layout.omero
    labels = [str(channel.get("label", n)) for n, channel in enumerate(omero["channels"])] if omero else []
    is_named = len(set(labels)) == len(labels)
    return {f"c={n}": label for n, label in enumerate(labels) if is_named and label not in ("", str(n))}


PHASE = "denoise"
# Minimum duration of a task on a GPU, which is idle between the blocks of two tasks; a kill loses one task.
GPU_TASK_SECONDS = 10.0


@dataclass(frozen=True)
class DenoiseWork(base.Work):
    """A denoiser applied to every block of an image."""

    output: base.OutputArray
    task: AnyDenoiseTask
    tuned: Tuned | None = None
    striped: Striped = NO_STRIPES
    also: tuple[base.OutputArray, ...] = ()  # further images of the same blocks

    @property
    def outputs(self) -> tuple[base.OutputArray, ...]:
        """The denoised image, and further ones."""
        return (self.output, *self.also)

    @property
    def passes(self) -> tuple[base.PassCount, ...]:
        """One pass over every block; before it, one over the lines where stripes are removed."""
        denoised = base.PassCount(PHASE, self.task.grid, len(self.outputs))
        return (base.PassCount(STRIPES, grid_of(self._lines)), denoised) if self._lines else (denoised,)

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

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> base.Inspection:
        """Compare a few places of the result with the image."""
        task = _with_kept(self.task, RunDirectory.beside(self.output.path))
        found = inspect_residual(task, self.output.path, seconds, pixel_seconds, self.striped)
        text = self.striped.text
        return replace(found, rows=[("stripes", text), *found.rows]) if text else found

    def run(self, at: base.RunView) -> Generator[base.Pass | base.Gather, base.Sums, None]:
        task, main = self.task, self.task.parts[0]
        if self._lines:
            yield corrections_pass(self._lines, main.roles.axes, at.directory, task.io_threads)
            task = _with_kept(task, at.directory)
        yield base.Pass(
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
