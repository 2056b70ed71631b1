"""The plan of a denoising job, in stages: opened, sized, settled, identified."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from halotile.graphs.jobs.denoise import pixels
from halotile.graphs.jobs.denoise.channels import (
    ChannelGroup,
    channels_of,
    check_alike,
    naming,
    notes_of_parts,
    previous_of,
)
from halotile.graphs.jobs.denoise.cutting import (
    SMALLER,
    decided_parts,
    figures_of,
    footprint_of,
    geometry_of,
    layout_of,
    need_of,
    redundancy_of,
)
from halotile.graphs.jobs.denoise.defects import ChosenDefects, choose_defects
from halotile.graphs.jobs.denoise.image import (
    JobImage,
    Levels,
    assign_axes,
    check_marked,
    check_units,
    choose_holes,
    choose_noise_level,
    open_input,
    open_sides,
    plane_values,
    value_range,
)
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.jobs.denoise.stripes import choose_stripes
from halotile.graphs.kinds.base import Footprint, OutputArray, OutputState, Placement, Planned, PlanRequest
from halotile.graphs.kinds.sections import DenoiserChoice, Size, parse_bytes
from halotile.graphs.plans import cutting
from halotile.graphs.plans.choices import check_decoding, check_paths, describe_denoiser
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import MODEL, io_threads_for, no_more_than
from halotile.graphs.plans.notes import levels_text, note_of_files, notes_of, notes_of_levels, notes_of_place
from halotile.graphs.plans.plan import place_job
from halotile.graphs.plans.trials import gpu_trials
from halotile.graphs.plans.trials.denoiser_trials import compare_tiles, compared_on_image, expect_trial, try_denoiser
from halotile.graphs.waiting import report_if_slow
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.denoise_block import AnyDenoiseTask, ChannelsTask, DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.trials.gpu_trial import Tuned
from halotile.tasks.trials.provenance import seals_of
from halotile.tasks.trials.trial import choose_samples


def plan_denoising(job: Denoising, state: OutputState, request: PlanRequest) -> Planned:
    """Decide every size of a denoising job."""
    image, placement, channels = _open(job, state)
    parts = []
    for place, each in enumerate(channels):
        with naming(each.title):
            parts.append(_part(each, image, previous_of(state.previous, place), request))
    # Noise that is estimated for some channels is not that of the others.
    known = (part.photons for part in parts if part.photons and (part.photons.is_given or len(parts) == 1))
    defects = choose_defects(image, next((each.noise for each in known), None))
    check_decoding(defects.sources, job.run)
    check_marked(image, defects.sources)
    return _planned(*_settle(_size(image, parts, defects, placement, state), request))


def _open(job: Denoising, state: OutputState) -> tuple[JobImage, Placement[Denoising], list[ChannelGroup]]:
    """Open the images of a job; return its device as well, and the denoisers of its channels."""
    original = open_input(job)
    check_paths(original.path, state.output)
    placement, images, channels, wanted = [], [], [], job
    for each in channels_of(job, original):
        expect_trial(each.given)
        with naming(each.title):
            placement.append(place_job(job, each.given))
            image, denoiser = assign_axes(wanted, each.given, original)
        images.append(image)
        channels.append(replace(each, denoiser=denoiser))
        # The main denoiser, which is the first, decides on the axes.
        roles = images[0].roles
        wanted = replace(job, tile=replace(job.tile, axes="".join(roles.axes[i] for i in roles.spatial)))
    check_alike([(each.device, each.precision) for each in placement], channels)
    job = placement[0].job
    image = replace(images[0], job=job, previous=state.previous)
    names = {name for each in channels for name in each.given.side_inputs}
    image = replace(image, sides=open_sides(image, channels[0].given, names))
    check_decoding([original, *image.sides.values()], job.run)
    image = replace(image, holed=choose_holes(image))
    return replace(image, striped=choose_stripes(image)), placement[0], channels


PHOTON_NAMES = ("gain", "offset", "read noise")
MOST_PLANES = 200  # lines of a list of planes


@dataclass(frozen=True)
class _Part:
    """Channels with the same denoiser, and what it has to know of their noise."""

    channels: ChannelGroup
    denoiser: Denoiser  # with its noise level and what a trial found
    sides: dict[str, Readable]  # with the noise levels of planes where they were estimated
    values: tuple[float, float] | None
    levels: Levels | None  # noise level of each plane, where they are estimated
    photons: pixels.Photons | None  # photon noise of each plane; None where noise does not depend on brightness
    written: pixels.ResultType  # type of the result, with notes on it and on the noise
    halo: cutting.Halo
    own_code: Mapping[str, str]
    seals: Mapping[str, str]
    notes: Sequence[str]

    def noise_text(self, roles: Roles) -> str:
        """The noise that was estimated or given, in words; empty where it is not known."""
        if self.photons:
            return self.photons.note(roles)
        return "" if self.levels is None else levels_text(self.levels, roles, self.values)

    def noise_by_plane(self, roles: Roles) -> list[tuple[str, str]]:
        """The noise of each plane, for the report: one line for planes of one noise, such as those of a detector; empty where all have it."""
        low, high = self.values or (0, 1)
        levels = np.zeros(()) if self.levels is None else self.levels * (high - low)
        parts, names = ((levels,), ("noise level",)) if self.photons is None else (self.photons.noise, PHOTON_NAMES)
        values = np.stack(np.broadcast_arrays(*parts))
        varied = [axis for axis in range(values.ndim - 1) if np.ptp(values, axis + 1).any()]
        places = itertools.product(*(range(n) if axis in varied else (0,) for axis, n in enumerate(values.shape[1:])))
        rows = []
        for place in itertools.islice(places, MOST_PLANES if varied else 0):
            where = ", ".join(f"{roles.axes[roles.looped[axis]]}={place[axis]}" for axis in varied)
            numbers = (float(part[place]) for part in values)
            rows.append((where, ", ".join(f"{name} {n:.4g}" for name, n in zip(names, numbers, strict=True))))
        more = math.prod(values.shape[axis + 1] for axis in varied) - MOST_PLANES
        return [*rows, *[("", f"and {more:,} more planes")] * (more > 0)]


def _part(channels: ChannelGroup, whole: JobImage, previous: Mapping[str, Any] | None, request: PlanRequest) -> _Part:
    """Decide on the noise of some channels, and on the halo of their denoiser."""
    image, roles, job = whole.subset(channels.numbers), whole.roles, channels.job
    image = replace(image, job=job, previous=previous)
    given, denoiser = channels.given, channels.denoiser
    sides: dict[str, Readable] = {k: side for k, side in whole.sides.items() if k in ("mask", *given.side_inputs)}
    values = value_range(job.input.range, image.source.dtype, given.trained_range)
    check_units(given, values, sides)
    notes = pixels.note_of_trained_pixels(image, given, values)
    photons, levels = pixels.choose_photon_noise(image, denoiser, values), None
    if photons is None:
        denoiser, levels = choose_noise_level(image, denoiser, values, sides)
    written = pixels.choose_type(image, given, levels)
    noise: dict[str, Levels | None] = (
        {"gain": photons.noise.gain, "variance": photons.noise.variance} if photons else {"sigma": levels}
    )
    # One number is an option of the denoiser.
    planes = {k: plane_values(each, roles) for k, each in noise.items() if each is not None and each.size > 1}
    if channels.numbers:
        channel = roles.axes.index("c")
        place = channel, channels.numbers, whole.source.shape[channel]
        planes = {name: side.among(*place) for name, side in planes.items()}
    sides = {**planes, **sides}
    # Its noise level is a side input in each round of photon noise.
    names, tile = (["sigma"], replace(job.tile, depth="auto")) if photons else ([*sides], job.tile)
    lengths, report = tuple(image.source.shape[i] for i in roles.spatial), request.report
    own_code, halo = try_denoiser(denoiser, tile, lengths, previous, run=job.run, report=report, sides=names)
    seals = seals_of(denoiser, own_code)
    if halo.probed:
        denoiser = denoiser.probed(*halo.probed)
    if own_code and previous is None and job.tile.seams != "allow":
        choose = partial(choose_samples, image.view, roles, values, halo.depth, halo.align)
        halo = compared_on_image(halo, denoiser, choose, job, report, names)
    if photons:
        denoiser, halo = photons.in_rounds(denoiser, halo, job.tile, len(lengths))
    return _Part(channels, denoiser, sides, values, levels, photons, written, halo, own_code, seals, notes)


@dataclass(frozen=True)
class _Sized:
    """The geometry of the job, and the layout of its output."""

    image: JobImage
    parts: Sequence[_Part]
    defects: ChosenDefects
    placement: Placement[Denoising]
    state: OutputState  # output
    job: Denoising  # with no more workers than there are blocks
    geometry: cutting.Geometry
    layout: Layout
    unit: tuple[int, ...]  # smallest block, in pixels of the input

    @property
    def deepest(self) -> int:
        """Place of the part with the widest halo."""
        depths = [max(map(max, part.halo.depth)) for part in self.parts]
        return depths.index(max(depths))

    def task_of(
        self, block: tuple[int, ...], size: Size, tuned: Tuned | None = None
    ) -> tuple[AnyDenoiseTask, Footprint]:
        """Return the task with these sizes, and the memory that a worker needs for it."""
        tasks = tuple(self._task_of(part, block, size) for part in self.parts)
        places = {number: place for place, part in enumerate(self.parts) for number in part.channels.numbers}
        task = ChannelsTask(tasks, places) if places else tasks[0]
        return task, self.footprint_of(task, tuned)

    def _task_of(self, part: _Part, block: tuple[int, ...], size: Size) -> DenoiseTask:
        """Return the task of a part with these sizes."""
        image, denoiser, halo, geometry = self.image, part.denoiser, part.halo, self.geometry
        tile, roles, placement = self.job.tile, image.roles, self.placement
        depth = max(map(max, halo.depth))
        tiling = cutting.tiling_of(tile, denoiser, halo, geometry, size, block, image.corrected.dtype)
        further = image.holed.halo(denoiser, depth, geometry.dims)
        convolves = denoiser.convolutional and geometry.dims == 2
        written = roles.output_region(Region.whole(block), tiling.scale, denoiser.channels[1])
        return DenoiseTask(
            source=image.corrected,
            sides=part.sides,
            writer=ShardWriter(self.state.output, self.layout.in_levels(written.stop, self.job.output.levels)),
            grid=cutting.grid_of(geometry, halo, block, tiling, further=further),
            rim=cutting.rim_of(tile, denoiser, roles),
            roles=roles,
            denoiser=denoiser,
            tiling=replace(tiling, range=None if part.photons else part.values),
            channels_out=denoiser.channels[1],
            device=placement.device,
            precision=placement.precision,
            on_nan=self.job.run.on_nan,
            holes=image.holed.holes,
            defects=self.defects.defects,
            overlap=placement.on_gpu or cutting.overlap_pays(self.job.run),
            channels_last=convolves and gpu_trials.channels_last_of(tile, placement.device, placement.precision),
            io_threads=io_threads_for(self.job.run, placement.cluster, placement.device),
            seals=part.seals,
        )

    def in_larger_shards(self) -> Iterator[Self]:
        """Yield the same in larger shards, for a volume whose cuts only the memory decides, as long as they keep all workers busy."""
        job, layout, geometry = self.job, self.layout, self.geometry
        if geometry.dims < 3 or (job.output.shard, job.tile.block, job.tile.size) != ("auto", "auto", "auto"):
            return
        for edge in range(0, cutting.LARGEST_BLOCK[3] + 1, cutting.CHUNK[3]):
            cut = [
                max(s, edge // c * c) if i in geometry.roles.spatial else s
                for i, (s, c) in enumerate(zip(layout.shard, layout.chunk, strict=True))
            ]
            shard = tuple(min(s, -(-n // c) * c) for s, n, c in zip(cut, layout.shape, layout.chunk, strict=True))
            blocks = math.prod(-(-n // s) for n, s in zip(layout.shape, shard, strict=True))
            if shard != layout.shard and blocks >= job.run.count * cutting.BLOCKS_PER_WORKER:
                yield replace(self, layout=replace(layout, shard=shard), unit=cutting.block_unit(geometry, shard))

    def in_memory(self, tuned: Tuned | None) -> tuple[AnyDenoiseTask, Footprint, bool]:
        """Return the task with the largest tile and super-block that fit the memory of a worker, or else the smallest; and True if they fit.

        A resumed run keeps its super-block.
        """
        job, geometry, placement, previous = self.job, self.geometry, self.placement, self.state.previous
        allowed, depth = cutting.allowed_bytes(job.run, placement.machine_bytes), self.parts[self.deepest].halo.depth
        earlier = previous["identity"]["block"] if previous else None
        given, on_gpu = job.tile.block, placement.on_gpu
        candidates = cutting.blocks_for(geometry, self.unit, job.run.count, earlier, given=given, on_gpu=on_gpu)
        for size, block in itertools.product(cutting.candidate_tiles(geometry, job.tile.size, depth), candidates):
            task, needed = self.task_of(block, size, tuned)
            if fits := sum(needed.values()) <= allowed:
                break
        return task, needed, fits

    def footprint_of(self, task: AnyDenoiseTask, tuned: Tuned | None = None) -> Footprint:
        """Return the memory that a worker needs for a task: that of the largest of its parts, with the models of all."""
        original = self.image.original
        chunk = original.chunks if not original.mapped else (1,)
        needs = [footprint_of(part, chunk, tuned) for part in task.parts]
        return {key: max(need[key] for need in needs) for key in needs[0]} | {MODEL: sum(need[MODEL] for need in needs)}


def _size(
    image: JobImage, parts: Sequence[_Part], defects: ChosenDefects, placement: Placement[Denoising], state: OutputState
) -> _Sized:
    """Decide on the layout of the output."""
    align = math.lcm(*(part.halo.align for part in parts))
    geometry = geometry_of(image.source, parts[0].denoiser, image.roles, align)
    dtype = max((part.written.dtype for part in parts), key="float32".__eq__)
    layout = layout_of(image, geometry, dtype, pixels.display_channels(image, state))
    unit = cutting.block_unit(geometry, layout.shard)
    job, requested = no_more_than(image.job, placement.requested, geometry.shape, unit)
    placement = replace(placement, job=job, requested=requested)
    return _Sized(image, parts, defects, placement, state, job, geometry, layout, unit)


def _settle(sized: _Sized, request: PlanRequest) -> tuple[_Sized, AnyDenoiseTask, Footprint, gpu_trials.ChosenTiles]:
    """Decide on blocks and tiles; return the work on a block, its memory needs, and the tiles with a trial of the GPU."""
    job, previous, placement = sized.job, sized.state.previous, sized.placement

    def choose(known: Tuned | None) -> tuple[AnyDenoiseTask, Footprint]:
        cuts = (sized, *(() if placement.on_gpu or previous else sized.in_larger_shards()))
        chosen = [cut.in_memory(known) for cut in cuts]
        # What does not fit is refused by Plan.check_fits.
        fitting = [(task, needed) for task, needed, fits in chosen if fits] or [chosen[0][:2]]
        frugal = (cut for cut in fitting if redundancy_of(cut[0]) <= cutting.MOST_REDUNDANT)
        return next(frugal, min(fitting, key=lambda cut: redundancy_of(cut[0])))

    def settle(chosen: tuple[AnyDenoiseTask, Footprint]) -> gpu_trials.ChosenTiles:
        task = max(chosen[0].parts, key=lambda part: (part.denoiser.convolutional, part.denoiser.bytes_per_pixel()))
        with report_if_slow(request.report, gpu_trials.trial_text(task)):
            return gpu_trials.choose_tiles(job, task, sized.geometry, previous, probe=request.probe)

    def settled(
        chosen: tuple[AnyDenoiseTask, Footprint], tiles: gpu_trials.ChosenTiles
    ) -> tuple[AnyDenoiseTask, Footprint]:
        task = chosen[0].changed(partial(gpu_trials.sized_as, task=tiles.task))
        return task, sized.footprint_of(task, tiles.tuned)

    def fits(chosen: tuple[AnyDenoiseTask, Footprint], tiles: gpu_trials.ChosenTiles) -> bool:
        needed = settled(chosen, tiles)[1]
        return sum(needed.values()) <= cutting.allowed_bytes(job.run, placement.machine_bytes)

    is_free = placement.on_gpu and job.tile.block == "auto" and previous is None
    chosen, tiles = gpu_trials.chosen_with_tiles(choose, settle, fits, is_free=is_free)
    assert tiles is not None
    task, needed = settled(chosen, tiles)
    check = partial(compare_tiles, job=job, previous=previous, report=request.report)
    pairs = zip(sized.parts, task.parts, strict=True)
    parts = [replace(part, halo=check(part.halo, own)) for part, own in pairs]
    return replace(sized, parts=parts), task, needed, tiles


def _planned(sized: _Sized, task: AnyDenoiseTask, needed: Footprint, tiles: gpu_trials.ChosenTiles) -> Planned:
    image, job, identity = sized.image, sized.job, _identity(sized, task)
    task = task.changed(partial(gpu_trials.with_reduced_batch, previous=image.previous))
    deepest, layout, given = task.parts[sized.deepest], task.parts[0].writer.layout, job.denoiser
    allowed, machine = parse_bytes(job.run.memory_per_worker), sized.placement.machine_bytes
    output = OutputArray(sized.state.output, layout, task.grid, job.output.overwrite)
    return Planned(
        placement=sized.placement,
        work=DenoiseWork(output, task, tiles.tuned, image.striped),
        sources=(image.original, *image.sides.values(), *sized.defects.sources),
        files=(*(file for part in task.parts for file in part.denoiser.files()), *map(Path, job.input.sides.values())),
        identity=identity,
        needs=(need_of(deepest, needed, allowed, machine),),
        smaller=SMALLER,
        smaller_output="a smaller output.dtype",
        given={} if isinstance(given, DenoiserChoice) else {"denoiser": describe_denoiser(given)},
        decided=_decided(sized, task),
        figures=figures_of(job, deepest, sized.parts[sized.deepest].halo, tiles.tuned)
        | {"dtype": str(image.source.dtype), "stripes": image.striped.text}
        | _figures_of(sized),
        notes=_notes(sized, layout, task.grid, tiles.note),
    )


def _figures_of(sized: _Sized) -> dict[str, Any]:
    """Return the settings of channels with denoisers of their own, and the noise that was estimated or given, in words, for the status of a run."""
    parts = [part for part in sized.parts if part.channels.numbers]
    settings = [{"channels": list(part.channels.names), "setting": part.channels.setting} for part in parts]
    texts = [(part.channels, part.noise_text(sized.image.roles)) for part in sized.parts]
    named = notes_of_parts([(each, [text] if text else []) for each, text in texts])
    by_plane = sized.parts[0].noise_by_plane(sized.image.roles) if len(sized.parts) == 1 else []
    settled = {"channels": settings, "noise_by_plane": by_plane}
    return {key: value for key, value in settled.items() if value} | ({"noise": "\n".join(named)} if named else {})


def _decided(sized: _Sized, task: AnyDenoiseTask) -> dict[str, Any]:
    """Return the keys that were decided; noise and rims of channels with denoisers of their own stay as they are written."""
    tile, decided = sized.job.tile, decided_parts(task.parts[0])
    if not isinstance(task, ChannelsTask):
        return decided | {"noise": pixels.decided_noise(sized.job.noise, sized.parts[0].photons)}
    own = {str(n): describe_denoiser(task.parts[place].denoiser.inner) for n, place in sorted(task.of_channel.items())}
    return decided | {"tile": decided["tile"] | {"boundary": tile.boundary, "depth": tile.depth}, "channels": own}


def _notes(sized: _Sized, layout: Layout, grid: Grid, note: str) -> tuple[str, ...]:
    image, roles = sized.image, sized.image.roles
    return (
        *image.original.remarks,
        *image.notes,
        *image.holed.notes,
        *image.striped.notes,
        *sized.defects.notes,
        *notes_of_parts([(part.channels, _own_notes(part, roles)) for part in sized.parts]),
        *pixels.note_of_defects(sum(part.written.alone for part in sized.parts), image.source.shape),
        *filter(None, [note]),
        *notes_of(image.original, image.source.dtype, layout=layout, roles=roles, grid=grid),
        *note_of_files(layout, sized.job.output, roles),
        *notes_of_place(sized.state.output, sized.state.directory),
    )


def _own_notes(part: _Part, roles: Roles) -> list[str]:
    """Return the notes on channels with the same denoiser."""
    return [
        *part.notes,
        *notes_of_levels(part.levels, roles, part.values),
        *part.halo.remarks,
        *part.written.notes,
        *([part.photons.note(roles)] if part.photons else []),
    ]


def _identity(sized: _Sized, task: AnyDenoiseTask) -> dict[str, Any]:
    """Return everything that can change a bit of the output."""
    image, main = sized.image, task.parts[0]
    parts = [_identity_of(part, own) for part, own in zip(sized.parts, task.parts, strict=True)]
    return {
        "input": image.original.fingerprint(),
        "sides": {name: side.fingerprint() for name, side in image.sides.items()},
        **({"channels": parts} if len(parts) > 1 else parts[0]),
        "holes": asdict(main.holes) if main.holes else None,
        "defects": sized.defects.to_json(),
        "tiled_axes": "".join(main.roles.axes[i] for i in main.roles.spatial),
        "precision": main.precision,
        **gpu_trials.on_device(main, image.previous),
        "on_nan": main.on_nan,
        "stripes": asdict(image.striped.lines) if image.striped.lines else None,
        "layout": main.writer.layout.to_json(),
        "block": list(main.grid.block),
        "code": {**code_versions(), **{name: digest for part in sized.parts for name, digest in part.own_code.items()}},
    }


def _identity_of(part: _Part, task: DenoiseTask) -> dict[str, Any]:
    """Return the part of the identity that channels with a denoiser of their own have for themselves."""
    given, levels, noise = part.channels.given, part.levels, part.photons
    known = None if noise else part.channels.job.noise.read_sigma or None
    return {
        **({"numbers": list(part.channels.numbers)} if part.channels.numbers else {}),
        "denoiser": describe_denoiser(given),
        "weights": {path.name: task.seals[str(path)] for path in given.files()},
        "range": list(part.values) if part.values else None,
        "depth": [list(pair) for pair in task.tiling.depth],
        "boundary": list(task.rim.rules),
        # Estimated, in the units that the denoiser computes in.
        "noise_level": None if levels is None else levels.tolist(),
        "noise.read_sigma": known,
        "noise": noise.to_json() if noise else None,
        "probed": list(part.halo.probed) if part.halo.probed else None,
    }
