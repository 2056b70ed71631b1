"""The plan of a denoising job, in stages: opened, sized, settled, identified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.channels import (
    ChannelPart,
    check_alike,
    cut_for_all,
    described,
    notes_of_parts,
    parts_of,
    widest,
)
from halotile.graphs.jobs.denoise.cutting import (
    SMALLER,
    choose_block,
    decided_parts,
    figures_of,
    footprint_of,
    geometry_of,
    larger_shards,
    layout_of,
    need_of,
)
from halotile.graphs.jobs.denoise.defects import ChosenDefects, choose_defects
from halotile.graphs.jobs.denoise.image import (
    Holed,
    Levels,
    Tiled,
    assign_axes,
    check_units,
    choose_holes,
    choose_noise_level,
    level_sides,
    open_input,
    open_sides,
    value_range,
)
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.denoise.passes import DenoiseWork
from halotile.graphs.jobs.denoise.pixels import (
    Photons,
    ResultType,
    choose_photon_noise,
    choose_type,
    decided_noise,
    display_channels,
    note_of_trained_pixels,
)
from halotile.graphs.jobs.denoise.stripes import Striped, choose_stripes
from halotile.graphs.kinds.base import OutputArray, PlanRequest
from halotile.graphs.kinds.sections import DenoiserChoice, Size, parse_bytes
from halotile.graphs.plans.choices import describe_denoiser, make_chosen
from halotile.graphs.plans.cutting import (
    Geometry,
    Halo,
    allowed_bytes,
    block_unit,
    grid_of,
    overlap_pays,
    rim_of,
    tiling_of,
)
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.inputs import check_decoding, check_paths
from halotile.graphs.plans.make import Begun, compute_on
from halotile.graphs.plans.needs import MODEL, Footprint, Requested, io_threads_for, no_more_than
from halotile.graphs.plans.notes import levels_text, note_of_files, notes_of, notes_of_levels, notes_of_place
from halotile.graphs.plans.plan import Computing, Planned
from halotile.graphs.plans.trials.denoiser_trials import compared, compared_on_image, expect_trial, tried
from halotile.graphs.plans.trials.gpu_trials import (
    ChosenTiles,
    as_it_went,
    channels_last_of,
    choose_tiles,
    chosen_with_tiles,
    on_device,
    sized_as,
    trying,
)
from halotile.graphs.waiting import report_if_slow
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.rim import Readable, Rim
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.roles import Roles
from halotile.tasks.trials.gpu_trial import Tuned
from halotile.tasks.trials.provenance import seals_of
from halotile.tasks.trials.trial import choose_samples


def plan_denoising(job: Denoising, begun: Begun, request: PlanRequest) -> Planned:
    """Decide every size of a denoising job."""
    original = open_input(job)
    parts = parts_of(job, original)
    if len(parts) == 1:
        sized = _size(_open(parts[0].job, begun, original), request)
    else:
        sized = _sized_apart(job, begun, request, original, parts)
    settled = _settle(sized, request)
    return _identify(settled)


def _sized_apart(
    job: Denoising, begun: Begun, request: PlanRequest, original: Source, parts: Sequence[ChannelPart]
) -> _Sized:
    """Size an image whose channels have different denoisers, each as that of a job with those channels alone."""
    if job.input.stripes != "none":
        raise ConfigError(
            "input.stripes, and channels with denoisers of their own: stripes are measured before all channels are denoised alike. Write a job for "
            "each of these channels with input.channels."
        )
    tiled = job.tile
    sized: list[_Sized] = []
    for number, part in enumerate(parts):
        with part.naming_errors():
            # The main denoiser, which is the first, decides on the axes.
            own = replace(part.job, tile=replace(part.job.tile, axes=tiled.axes))
            opened = _open(own, part.begun(begun, number), original.with_channels(part.numbers))
            sized.append(_size(opened, request))
        tiled = replace(tiled, axes="".join(opened.roles.axes[i] for i in opened.roles.spatial))
    main = sized[0].opened
    check_alike([(one.opened.computing.device, one.opened.computing.precision) for one in sized], parts)
    types = [one.opened.written.dtype for one in sized]
    with_sides = max((one.opened.denoiser for one in sized), key=lambda denoiser: len(denoiser.side_inputs))
    opened = replace(
        main,
        begun=begun,
        computing=replace(main.computing, job=replace(job, run=main.computing.job.run)),
        original=original,
        tiled=main.tiled._replace(source=original),
        sides=open_sides(job, with_sides, original, original, main.roles),
        written=ResultType(next((name for name in types if name != types[0] and name == "float32"), types[0])),
        parts=tuple(parts),
    )
    return _size(opened, request, sized)


@dataclass(frozen=True)
class _Opened:
    """The images that are read, and the denoiser with its noise level."""

    begun: Begun
    computing: Computing[Denoising]
    original: Source
    """The input as it is stored."""
    tiled: Tiled
    holed: Holed
    sides: Mapping[str, Source]
    values: tuple[float, float] | None
    given: Denoiser
    """The denoiser as the job has it."""
    denoiser: Denoiser
    levels: Levels | None
    """Noise level of each plane, where they are estimated."""
    photons: Photons | None
    """Photon noise of each plane; None where noise does not depend on brightness."""
    striped: Striped
    defects: ChosenDefects
    written: ResultType
    """Type of the result, with notes on it and on the noise."""
    parts: tuple[ChannelPart, ...] = ()
    """Channels with denoisers of their own."""

    @property
    def source(self) -> Readable:
        """The input with the axes that the denoiser takes."""
        return self.tiled.source

    @cached_property
    def corrected(self) -> Readable:
        """The same without the stripes that are removed."""
        return self.striped.read(self.source, self.view(self.source))

    @property
    def roles(self) -> Roles:
        """The role of each axis."""
        return self.tiled.roles

    def view(self, source: Readable) -> Readable:
        """The input with NaN in its holes, and where it is masked."""
        return self.holed.view(source, self.sides.get("mask"), self.roles)

    @property
    def all_sides(self) -> dict[str, Readable]:
        """The side inputs of the job, and the noise levels of planes where they were estimated."""
        noise = self.photons.sides(self.roles) if self.photons else level_sides(self.levels, self.roles)
        return {**noise, **self.sides}


def _open(job: Denoising, begun: Begun, original: Source) -> _Opened:
    given = job.denoiser
    denoiser: Denoiser = make_chosen(given, job) if isinstance(given, DenoiserChoice) else given
    expect_trial(denoiser)
    check_paths(original, begun.output)
    computing = compute_on(job, denoiser)
    job = computing.job
    tiled = assign_axes(job, denoiser, original)
    sides = open_sides(job, denoiser, original, tiled.source, tiled.roles)
    check_decoding([original, *sides.values()], job.run)
    holed = choose_holes(job, original, tiled.source, tiled.roles.spatial, sides.get("mask"), begun.previous)
    values = value_range(job.input.range, tiled.source.dtype, denoiser.trained_range)
    check_units(denoiser, values, sides)
    roles, previous = tiled.roles, begun.previous
    view = holed.view(tiled.source, sides.get("mask"), roles)
    notes = note_of_trained_pixels(job, denoiser, view, roles, values, tiled.source.dtype, previous)
    tiled = tiled._replace(notes=(*tiled.notes, *notes))
    striped = choose_stripes(job, view, roles, previous)
    even = striped.read(view, view)
    photons = choose_photon_noise(job, tiled.denoiser, even, roles, values, previous)
    leveled, levels = tiled.denoiser, None
    if photons is None:
        leveled, levels = choose_noise_level(leveled, even, roles, values, sides, previous, job.noise.read_sigma)
    defects = choose_defects(job, original, even, roles, photons.noise if photons else None, previous)
    check_decoding(defects.sources, job.run)
    written = choose_type(job, denoiser, even, roles, original, levels=levels, nodata=holed.value, previous=previous)
    return _Opened(
        begun,
        computing,
        original,
        tiled,
        holed,
        sides,
        values,
        denoiser,
        leveled,
        levels,
        photons,
        striped,
        defects,
        written,
    )


@dataclass(frozen=True)
class _Sized:
    """The geometry of the job, and the layout of its output."""

    opened: _Opened
    job: Denoising
    requested: Requested
    denoiser: Denoiser
    own_code: Mapping[str, str]
    seals: Mapping[str, str]
    halo: Halo
    geometry: Geometry
    layout: Layout
    rim: Rim
    unit: tuple[int, ...]
    """Smallest block, in pixels of the input."""
    overlap: bool
    io_threads: int
    parts: tuple[_Sized, ...] = ()
    """Those of the channels with denoisers of their own."""

    @property
    def further(self) -> int:
        """Pixels that a block reads beyond its halo, to fill holes."""
        depth = max(map(max, self.halo.depth))
        return self.opened.holed.halo(self.denoiser, depth, self.geometry.dims)

    def task_of(self, block: tuple[int, ...], size: Size, tuned: Tuned | None = None) -> tuple[DenoiseTask, Footprint]:
        """Return the task with these sizes, and the memory that a worker needs for it."""
        opened, computing, tile = self.opened, self.opened.computing, self.job.tile
        tiling = tiling_of(
            tile,
            self.denoiser,
            opened.roles,
            self.halo,
            self.geometry,
            size,
            block,
            None if opened.photons else opened.values,
            opened.corrected.dtype,
        )
        convolves = self.denoiser.convolutional and self.geometry.dims == 2
        written = opened.roles.output_region(Region.whole(block), tiling.scale, self.denoiser.channels[1])
        layout = self.layout.in_levels(written.stop, self.job.output.levels)
        task = DenoiseTask(
            source=opened.corrected,
            sides=opened.all_sides,
            writer=ShardWriter(opened.begun.output, layout),
            grid=grid_of(self.geometry, opened.roles, self.halo, block, tiling, further=self.further),
            rim=self.rim,
            roles=opened.roles,
            denoiser=self.denoiser,
            tiling=tiling,
            channels_out=self.denoiser.channels[1],
            device=computing.device,
            precision=computing.precision,
            on_nan=self.job.run.on_nan,
            holes=opened.holed.holes,
            defects=opened.defects.defects,
            overlap=self.overlap,
            channels_last=convolves and channels_last_of(tile, computing.device, computing.precision),
            io_threads=self.io_threads,
            seals=self.seals,
        )
        if self.parts:
            task = self._with_channels(task, block, size, tuned)
        return task, self.footprint_of(task, tuned)

    def _with_channels(self, task: DenoiseTask, block: tuple[int, ...], size: Size, tuned: Tuned | None) -> DenoiseTask:
        """Return the task with those of its channels, which are cut alike."""
        alike = [
            replace(part, layout=self.layout, geometry=replace(part.geometry, align=self.geometry.align))
            for part in self.parts
        ]
        tasks = [part.task_of(block, size, tuned)[0] for part in alike]
        grid = cut_for_all(task.grid, [each.grid for each in tasks])
        tasks = [
            replace(each, grid=replace(grid, shape=each.grid.shape), writer=task.writer, io_threads=self.io_threads)
            for each in tasks
        ]
        of_channel = {
            n: (each, i) for each, own in zip(tasks, self.opened.parts, strict=True) for i, n in enumerate(own.numbers)
        }
        channels = tuple(of_channel[number] for number in sorted(of_channel))
        return replace(task, grid=grid, channels=channels)

    def in_larger_shards(self) -> Iterator[Self]:
        """Return the same for a volume that is cut into larger blocks."""
        for shard in larger_shards(self.job, self.geometry, self.layout):
            layout = replace(self.layout, shard=shard)
            yield replace(self, layout=layout, unit=block_unit(self.geometry, shard))

    def footprint_of(self, task: DenoiseTask, tuned: Tuned | None = None) -> Footprint:
        """Return the memory that a worker needs for a task: that of the largest of its channels, with the models of all."""
        original = self.opened.original
        piece = original.chunks if not original.mapped else (1,)
        needs = [footprint_of(part, piece, tuned) for part in task.parts]
        return {key: max(need[key] for need in needs) for key in needs[0]} | {MODEL: sum(need[MODEL] for need in needs)}

    def with_tasks(self, task: DenoiseTask) -> list[tuple[_Sized, DenoiseTask]]:
        """Return the parts with their tasks in that of the image."""
        pairs = zip(self.parts, self.opened.parts, strict=True)
        return [(part, task.channels[own.numbers[0]][0]) for part, own in pairs]


def _tried(opened: _Opened, request: PlanRequest) -> tuple[Denoiser, Halo, Mapping[str, str]]:
    """Return the denoiser with what a trial found, its halo, and digests of the user's own code."""
    previous, roles = opened.begun.previous, opened.roles
    job, denoiser = opened.computing.job, opened.denoiser
    image = tuple(opened.source.shape[i] for i in roles.spatial)
    # Its noise level is a side input in each round.
    tile = replace(job.tile, depth="auto") if opened.photons else job.tile
    sides = ["sigma"] if opened.photons else [*opened.all_sides]
    own_code, halo = tried(denoiser, tile, image, previous, run=job.run, report=request.report, sides=sides)
    if halo.probed:
        denoiser = denoiser.probed(*halo.probed)
    if own_code and previous is None and job.tile.seams != "allow":
        choose = partial(choose_samples, opened.view(opened.source), roles, opened.values, halo.depth, halo.align)
        halo = compared_on_image(halo, denoiser, choose, job.tile, run=job.run, report=request.report, sides=sides)
    if opened.photons:
        denoiser, halo = opened.photons.in_rounds(denoiser, halo, job.tile, len(image))
    return denoiser, halo, own_code


def _size(opened: _Opened, request: PlanRequest, parts: Sequence[_Sized] = ()) -> _Sized:
    computing, previous, roles = opened.computing, opened.begun.previous, opened.roles
    job = computing.job
    if not parts:
        denoiser, halo, own_code = _tried(opened, request)
    else:
        denoiser, halo = parts[0].denoiser, widest([part.halo for part in parts])
        own_code = {name: digest for part in parts for name, digest in part.own_code.items()}
    geometry = geometry_of(opened.source, denoiser, roles, halo)
    layout = layout_of(
        job,
        opened.original,
        geometry,
        roles,
        previous,
        dtype=opened.written.dtype,
        nodata=opened.holed.value,
        channels=display_channels(opened.original, opened.view(opened.original), opened.begun),
    )
    unit = block_unit(geometry, layout.shard)
    job, requested = no_more_than(job, computing.requested, geometry.shape, unit)
    return _Sized(
        opened,
        job,
        requested,
        denoiser,
        own_code,
        {} if parts else seals_of(opened.denoiser, own_code),
        halo,
        geometry,
        layout,
        rim_of(job.tile, denoiser, roles),
        unit,
        overlap=computing.on_gpu or overlap_pays(job.run),
        io_threads=io_threads_for(job.run, computing.cluster, computing.device),
        parts=tuple(parts),
    )


@dataclass(frozen=True)
class _Settled:
    """The work on a block, and its memory needs."""

    sized: _Sized
    task: DenoiseTask
    needed: Footprint
    tuned: Tuned | None
    """Result of a trial of the GPU."""
    note: str
    halo: Halo


def _settle(sized: _Sized, request: PlanRequest) -> _Settled:
    job, previous, computing = sized.job, sized.opened.begun.previous, sized.opened.computing

    def choose(known: Tuned | None) -> tuple[DenoiseTask, Footprint]:
        cuts = (sized, *(() if computing.on_gpu or previous else sized.in_larger_shards()))
        with_sizes = [(cut.unit, partial(cut.task_of, tuned=known)) for cut in cuts]
        machine, depth = computing.machine_bytes, sized.halo.depth
        return choose_block(job, sized.geometry, with_sizes, previous, machine, depth, on_gpu=computing.on_gpu)

    def settle(chosen: tuple[DenoiseTask, Footprint]) -> ChosenTiles:
        task = max(chosen[0].parts, key=lambda part: (part.denoiser.convolutional, part.denoiser.bytes_per_pixel()))
        with report_if_slow(request.report, trying(task)):
            found = choose_tiles(job, task, sized.geometry, previous, probe=request.probe)
        if task is chosen[0]:
            return found
        return replace(found, task=chosen[0].changed(partial(_sized_as, task=found.task)))

    def fits(_: tuple[DenoiseTask, Footprint], chosen_tiles: ChosenTiles) -> bool:
        needed = sized.footprint_of(chosen_tiles.task, chosen_tiles.tuned)
        return sum(needed.values()) <= allowed_bytes(job.run, computing.machine_bytes)

    is_free = computing.on_gpu and job.tile.block == "auto" and previous is None
    (task, needed), chosen_tiles = chosen_with_tiles(choose, settle, fits, is_free=is_free)
    if chosen_tiles is not None:
        task, needed = chosen_tiles.task, sized.footprint_of(chosen_tiles.task, chosen_tiles.tuned)
    check = partial(compared, tile=job.tile, previous=previous, run=job.run, report=request.report)
    if sized.parts:
        pairs = sized.with_tasks(task)
        sized = replace(sized, parts=tuple(replace(part, halo=check(part.halo, own)) for part, own in pairs))
        halo = sized.halo
    else:
        halo = check(sized.halo, task)
    tuned, note = (chosen_tiles.tuned, chosen_tiles.note) if chosen_tiles else (None, "")
    return _Settled(sized, task, needed, tuned, note, halo)


def _sized_as(tiled: DenoiseTask, task: DenoiseTask) -> DenoiseTask:
    """Return the task of a channel with the tiles that were tried with another; only networks have a memory layout."""
    sized = sized_as(tiled, task)
    return sized if tiled.denoiser.convolutional else replace(sized, channels_last=False)


def _identify(settled: _Settled) -> Planned:
    sized, opened = settled.sized, settled.sized.opened
    job, begun = sized.job, opened.begun
    task = settled.task.changed(partial(as_it_went, previous=begun.previous))
    allowed, machine = parse_bytes(job.run.memory_per_worker), opened.computing.machine_bytes
    output = OutputArray(begun.output, task.writer.layout, task.grid, job.output.overwrite)
    given = job.denoiser
    return Planned(
        computing=replace(opened.computing, job=job, requested=sized.requested),
        work=DenoiseWork(output, task, settled.tuned, opened.striped.text),
        sources=(opened.original, *opened.sides.values(), *opened.defects.sources),
        files=(*(file for part in task.parts for file in part.denoiser.files()), *map(Path, job.input.sides.values())),
        identity=_identity(settled),
        needs=(need_of(task, settled.needed, allowed, machine),),
        smaller=SMALLER,
        smaller_output="a smaller output.dtype",
        given={} if isinstance(given, DenoiserChoice) else {"denoiser": describe_denoiser(given)},
        decided=_decided(settled, task),
        figures=figures_of(job, task, settled.halo, settled.tuned)
        | {"dtype": str(opened.source.dtype), "stripes": opened.striped.text}
        | _figures_of_parts(opened)
        | _noise(opened),
        notes=_notes(settled),
    )


def _noise(opened: _Opened) -> dict[str, str]:
    """Return the noise that was estimated or given, in words, for the status of a run; that of channels apart is in their notes."""
    if opened.parts:
        return {}
    if opened.photons:
        return {"noise": opened.photons.note(opened.roles)}
    return {} if opened.levels is None else {"noise": levels_text(opened.levels, opened.roles, opened.values)}


def _decided(settled: _Settled, task: DenoiseTask) -> dict[str, Any]:
    """Return the keys that were decided; noise and rims of channels with denoisers of their own stay as they are written."""
    sized, opened, parts = settled.sized, settled.sized.opened, settled.sized.opened.parts
    decided = decided_parts(task)
    if not parts:
        return decided | {"noise": decided_noise(sized.job.noise, opened.photons)}
    own = [describe_denoiser(each.denoiser.inner) for _, each in sized.with_tasks(task)]
    tile = decided["tile"] | {"boundary": sized.job.tile.boundary}
    return decided | {"tile": tile, "denoiser": own[0], "channels": described(parts, own)}


def _figures_of_parts(opened: _Opened) -> dict[str, Any]:
    parts = [{"channels": list(part.names), "setting": part.setting} for part in opened.parts]
    return {"channels": parts} if parts else {}


def _notes(settled: _Settled) -> tuple[str, ...]:
    sized, opened, layout = settled.sized, settled.sized.opened, settled.task.writer.layout
    # Stripes cannot be removed where channels have denoisers of their own: no note may ask for it.
    of_parts = (replace(part.opened, striped=Striped()) for part in sized.parts)
    apart = [_own_notes(own, part.halo) for own, part in zip(of_parts, sized.parts, strict=True)]
    return (
        *opened.original.remarks,
        *(notes_of_parts(opened.parts, apart) if apart else _own_notes(opened, settled.halo)),
        *filter(None, [settled.note]),
        *notes_of(opened.original, opened.source.dtype, layout=layout, roles=opened.roles, grid=settled.task.grid),
        *note_of_files(layout, sized.job.output, opened.roles),
        *notes_of_place(opened.begun.output, opened.begun.directory),
    )


def _own_notes(opened: _Opened, halo: Halo) -> list[str]:
    """Return the notes on an image, or on channels with a denoiser of their own."""
    return [
        *opened.tiled.notes,
        *opened.holed.notes,
        *opened.striped.notes,
        *opened.defects.notes,
        *notes_of_levels(opened.levels, opened.roles, opened.values),
        *halo.remarks,
        *opened.written.notes,
        *([opened.photons.note(opened.roles)] if opened.photons else []),
    ]


def _identity(settled: _Settled) -> dict[str, Any]:
    """Return everything that can change a bit of the output."""
    sized, opened, task = settled.sized, settled.sized.opened, settled.task
    pairs = zip(opened.parts, sized.with_tasks(task), strict=True)
    apart = [{"numbers": list(own.numbers), **_identity_of(part, each, part.halo)} for own, (part, each) in pairs]
    return {
        "input": opened.original.fingerprint(),
        "sides": {name: side.fingerprint() for name, side in opened.sides.items()},
        **({"channels": apart} if apart else _identity_of(sized, task, settled.halo)),
        "tiled_axes": "".join(task.roles.axes[i] for i in task.roles.spatial),
        "precision": task.precision,
        **on_device(task, opened.begun.previous),
        "on_nan": task.on_nan,
        "stripes": asdict(opened.striped.lines) if opened.striped.lines else None,
        "layout": task.writer.layout.to_json(),
        "block": list(task.grid.block),
        "code": {**code_versions(), **sized.own_code},
    }


def _level(opened: _Opened) -> Any:
    """Return the noise level of each plane, or the one that is given."""
    if opened.levels is None:
        return (None if opened.photons else opened.computing.job.noise.read_sigma) or None
    return opened.levels.tolist()


def _identity_of(sized: _Sized, task: DenoiseTask, halo: Halo) -> dict[str, Any]:
    """Return the part of the identity that channels with a denoiser of their own have for themselves."""
    opened = sized.opened
    return {
        "denoiser": describe_denoiser(opened.given),
        "weights": {path.name: task.seals[str(path)] for path in opened.given.files()},
        "range": list(opened.values) if opened.values else None,
        "depth": [list(pair) for pair in task.tiling.depth],
        "boundary": list(task.rim.rules),
        "holes": asdict(task.holes) if task.holes else None,
        "defects": opened.defects.to_json(),
        "noise_level": _level(opened),
        "noise": opened.photons.to_json() if opened.photons else None,
        "probed": list(halo.probed) if halo.probed else None,
    }
