"""The plan of a denoising job, in stages: opened, sized, settled, identified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from halotile.graphs.amounts import pixel_size_text
from halotile.graphs.jobs.denoise.cutting import (
    SMALLER,
    choose_block,
    footprint_of,
    geometry_of,
    larger_shards,
    layout_of,
    need_of,
    tile_window,
)
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
from halotile.graphs.plans.needs import Footprint, Requested, io_threads_for, no_more_than
from halotile.graphs.plans.notes import note_of_files, notes_of, notes_of_place
from halotile.graphs.plans.plan import Computing, Planned
from halotile.graphs.plans.trials.denoiser_trials import compared, compared_on_image, expect_trial, tried
from halotile.graphs.plans.trials.gpu_trials import (
    ChosenTiles,
    as_it_went,
    channels_last_of,
    choose_tiles,
    chosen_with_tiles,
    on_device,
    trying,
    written_tiles,
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


def figures_of(job: Denoising, task: DenoiseTask, halo: Halo, tuned: Tuned | None) -> dict[str, Any]:
    """Return the figures of a plan, by name."""
    grid, roles, layout = task.grid, task.roles, task.writer.layout
    spatial_core = roles.spatial_part(grid.middle.core).size
    spatial_window = roles.spatial_part(task.rim.reach(grid.middle.window, grid.shape)).size
    tile, window = map(math.prod, tile_window(task))
    return {
        "input": job.input.path,
        "shape": list(grid.shape),
        "axes": "".join(roles.axes),
        "tiled_axes": "".join(roles.axes[i] for i in roles.spatial),
        "dtype": str(task.source.dtype),
        "output_shape": list(layout.shape),
        "output_dtype": layout.dtype,
        "pixel_size": pixel_size_text(layout.axes, layout.scale, layout.units),
        "denoiser": task.denoiser.name,
        "tile": list(task.tiling.tile),
        "batch": task.tiling.batch,
        "device": task.device,
        "precision": task.precision,
        "device_memory_bytes": tuned.device_bytes if tuned and task.device != "cpu" else None,
        "tuned": tuned.to_json() if tuned else None,
        "depth": [list(d) for d in task.tiling.depth],
        "depth_from": halo.origin,
        "boundary": task.rim.rules[roles.spatial[0]],
        "read_amplification": round(spatial_window / spatial_core, 4),
        "compute_redundancy": round(window / tile, 4),
    }


def decided_parts(task: DenoiseTask) -> dict[str, Any]:
    """Return the keys whose values were decided; with them the job makes the same output."""
    spatial, layout = task.roles.spatial, task.writer.layout

    def edges(sizes: tuple[int, ...]) -> list[int]:
        return [sizes[i] for i in spatial]

    block = edges(task.grid.block)
    if task.tiling.scale == 1:  # a block that ends with the image is as good as one that ends with its shard
        block = [-(-b // s) * s for b, s in zip(block, edges(layout.shard), strict=True)]
    return {
        "denoiser": describe_denoiser(task.denoiser.inner),
        "output": {"shard": edges(layout.shard), "chunk": edges(layout.chunk), "dtype": layout.dtype},
        "tile": {
            **written_tiles(task),
            "depth": [max(pair) for pair in task.tiling.depth],
            "boundary": task.rim.rules[spatial[0]],
            "block": block,
            "axes": "".join(task.roles.axes[i] for i in spatial),
        },
    }


def plan_denoising(job: Denoising, begun: Begun, request: PlanRequest) -> Planned:
    """Decide every size of a denoising job."""
    opened = _open(job, begun)
    sized = _size(opened, request)
    settled = _settle(sized, request)
    return _identify(settled)


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
    written: ResultType
    """Type of the result, with notes on it and on the noise."""

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


def _open(job: Denoising, begun: Begun) -> _Opened:
    given = job.denoiser
    denoiser: Denoiser = make_chosen(given, job) if isinstance(given, DenoiserChoice) else given
    expect_trial(denoiser)
    original = open_input(job)
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
    photons = choose_photon_noise(job, tiled.denoiser, view, roles, values, previous)
    leveled, levels = tiled.denoiser, None
    if photons is None:
        leveled, levels = choose_noise_level(leveled, view, roles, values, sides, previous, job.noise.read_sigma)
    written = choose_type(job, denoiser, view, roles, original, levels=levels, nodata=holed.value, previous=previous)
    return _Opened(
        begun, computing, original, tiled, holed, sides, values, denoiser, leveled, levels, photons, striped, written
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
            overlap=self.overlap,
            channels_last=convolves and channels_last_of(tile, computing.device, computing.precision),
            io_threads=self.io_threads,
            seals=self.seals,
        )
        return task, self.footprint_of(task, tuned)

    def in_larger_shards(self) -> Iterator[Self]:
        """Return the same for a volume that is cut into larger blocks."""
        for shard in larger_shards(self.job, self.geometry, self.layout):
            layout = replace(self.layout, shard=shard)
            yield replace(self, layout=layout, unit=block_unit(self.geometry, shard))

    def footprint_of(self, task: DenoiseTask, tuned: Tuned | None = None) -> Footprint:
        """Return the memory that a worker needs for a task."""
        original = self.opened.original
        return footprint_of(task, original.chunks if not original.mapped else (1,), tuned)


def _size(opened: _Opened, request: PlanRequest) -> _Sized:
    computing, previous, roles = opened.computing, opened.begun.previous, opened.roles
    job, denoiser = computing.job, opened.denoiser
    image = tuple(opened.source.shape[i] for i in roles.spatial)
    # Its noise level is a side input in each round.
    tile = replace(job.tile, depth="auto") if opened.photons else job.tile
    sides = ["sigma"] if opened.photons else [*opened.all_sides]
    own_code, halo = tried(denoiser, tile, image, previous, run=job.run, report=request.report, sides=sides)
    seals = seals_of(denoiser, own_code)
    if halo.probed:
        denoiser = denoiser.probed(*halo.probed)
    if own_code and previous is None and job.tile.seams != "allow":
        choose = partial(choose_samples, opened.view(opened.source), roles, opened.values, halo.depth, halo.align)
        halo = compared_on_image(halo, denoiser, choose, job.tile, run=job.run, report=request.report, sides=sides)
    if opened.photons:
        denoiser, halo = opened.photons.in_rounds(denoiser, halo, job.tile, len(image))
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
        seals,
        halo,
        geometry,
        layout,
        rim_of(job.tile, denoiser, roles),
        unit,
        overlap=computing.on_gpu or overlap_pays(job.run),
        io_threads=io_threads_for(job.run, computing.cluster, computing.device),
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
        with report_if_slow(request.report, trying(chosen[0])):
            return choose_tiles(job, chosen[0], sized.geometry, previous, probe=request.probe)

    def fits(_: tuple[DenoiseTask, Footprint], chosen_tiles: ChosenTiles) -> bool:
        needed = sized.footprint_of(chosen_tiles.task, chosen_tiles.tuned)
        return sum(needed.values()) <= allowed_bytes(job.run, computing.machine_bytes)

    is_free = computing.on_gpu and job.tile.block == "auto" and previous is None
    (task, needed), chosen_tiles = chosen_with_tiles(choose, settle, fits, is_free=is_free)
    if chosen_tiles is not None:
        task, needed = chosen_tiles.task, sized.footprint_of(chosen_tiles.task, chosen_tiles.tuned)
    halo = compared(sized.halo, task, job.tile, previous, run=job.run, report=request.report)
    tuned, note = (chosen_tiles.tuned, chosen_tiles.note) if chosen_tiles else (None, "")
    return _Settled(sized, task, needed, tuned, note, halo)


def _identify(settled: _Settled) -> Planned:
    sized, opened = settled.sized, settled.sized.opened
    job, begun = sized.job, opened.begun
    task = as_it_went(settled.task, begun.previous)
    allowed, machine = parse_bytes(job.run.memory_per_worker), opened.computing.machine_bytes
    output = OutputArray(begun.output, task.writer.layout, task.grid, job.output.overwrite)
    is_named = isinstance(job.denoiser, DenoiserChoice)
    return Planned(
        computing=replace(opened.computing, job=job, requested=sized.requested),
        work=DenoiseWork(output, task, settled.tuned, opened.striped.text),
        sources=(opened.original, *opened.sides.values()),
        files=(*task.denoiser.files(), *map(Path, job.input.sides.values())),
        identity=_identity(settled),
        needs=(need_of(task, settled.needed, allowed, machine),),
        smaller=SMALLER,
        smaller_output="a smaller output.dtype",
        given={} if is_named else {"denoiser": describe_denoiser(opened.given)},
        decided=decided_parts(task) | {"noise": decided_noise(job.noise, opened.photons)},
        figures=figures_of(job, task, settled.halo, settled.tuned)
        | {"dtype": str(opened.source.dtype), "stripes": opened.striped.text},
        notes=_notes(settled),
    )


def _notes(settled: _Settled) -> tuple[str, ...]:
    sized, opened, task = settled.sized, settled.sized.opened, settled.task
    return (
        *opened.original.remarks,
        *opened.tiled.notes,
        *opened.holed.notes,
        *opened.striped.notes,
        *notes_of(
            opened.original,
            opened.source.dtype,
            layout=task.writer.layout,
            roles=opened.roles,
            grid=task.grid,
            halo=settled.halo,
            levels=opened.levels,
            values=opened.values,
            of_trial=settled.note,
        ),
        *opened.written.notes,
        *([opened.photons.note(opened.roles)] if opened.photons else []),
        *note_of_files(task.writer.layout, sized.job.output, opened.roles),
        *notes_of_place(opened.begun.output, opened.begun.directory),
    )


def _identity(settled: _Settled) -> dict[str, Any]:
    """Return everything that can change a bit of the output."""
    sized, opened, task = settled.sized, settled.sized.opened, settled.task
    return {
        "input": opened.original.fingerprint(),
        "sides": {name: side.fingerprint() for name, side in opened.sides.items()},
        "denoiser": describe_denoiser(opened.given),
        "weights": {path.name: task.seals[str(path)] for path in opened.given.files()},
        "range": list(opened.values) if opened.values else None,
        "tiled_axes": "".join(task.roles.axes[i] for i in task.roles.spatial),
        "depth": [list(pair) for pair in task.tiling.depth],
        "boundary": list(task.rim.rules),
        "precision": task.precision,
        **on_device(task, opened.begun.previous),
        "on_nan": task.on_nan,
        "holes": asdict(task.holes) if task.holes else None,
        "stripes": asdict(opened.striped.lines) if opened.striped.lines else None,
        "layout": task.writer.layout.to_json(),
        "block": list(task.grid.block),
        "code": {**code_versions(), **sized.own_code},
        "noise_level": None if opened.levels is None else opened.levels.tolist(),
        "noise": opened.photons.to_json() if opened.photons else None,
        "probed": list(settled.halo.probed) if settled.halo.probed else None,
    }
