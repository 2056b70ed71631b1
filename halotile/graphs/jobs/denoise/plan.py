"""The planner: every size of a job decided, checked against memory and disk, or refused with the numbers."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halotile.graphs.jobs.sections import Job, Size
from halotile.graphs.plans.cutting import (
    allowed_bytes,
    choose_block,
    geometry_of,
    grid_of,
    layout_of,
    overlap_pays,
    rim_of,
    tiling_of,
)
from halotile.graphs.plans.denoiser_trials import compared, expect_trial, tried
from halotile.graphs.plans.devices import (
    check_device,
    cluster_for,
    device_of,
    io_threads_for,
    is_here,
    note_of_cluster,
)
from halotile.graphs.plans.gpu_trials import (
    ChosenTiles,
    as_it_went,
    channels_last_of,
    choose_tiles,
    chosen_with_tiles,
    on_device,
    trying,
)
from halotile.graphs.plans.memory import Footprint, footprint, gpu_bytes, machine_bytes
from halotile.graphs.plans.notes import note_of_files, note_of_locks, notes_of
from halotile.graphs.plans.opening import (
    assign_axes,
    check_paths,
    check_units,
    choose_noise_level,
    computed_by,
    describe_denoiser,
    make_denoiser,
    open_sides,
    value_range,
)
from halotile.graphs.plans.plan import Plan, existing_parent, run_directory_of, tile_window
from halotile.graphs.plans.sizes import block_unit
from halotile.graphs.plans.worker_count import no_more_than, with_workers
from halotile.graphs.rules.values import check_job
from halotile.graphs.runs.identity import code_versions, differences, inputs_of, may_be_same
from halotile.graphs.waiting import Report, no_report, report_if_slow
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.place import check_parents
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.trials.gpu_findings import Tuned
from halotile.tasks.trials.provenance import seals_of


def make_plan(
    job: Job,
    *,
    fresh: bool = False,
    refuse: bool = True,
    same_input: bool = False,
    probe: bool = False,
    report: Report = no_report,
) -> Plan:
    """Decide every size of a job and check that it fits.

    Reads metadata, not pixels, unless a noise level or a receptive field has to be found out, or a GPU is tried.

    Parameters
    ----------
    job : Job
        What is asked for.
    fresh : bool
        Plan anew, even where a run directory of an unfinished run stands.
    refuse : bool
        Whether to raise for a plan that does not fit; otherwise :meth:`Plan.check_fits` says so.
    same_input : bool
        Take what is read for the images of the run that stands there, mended, copied or moved, if their
        shapes, types and axes agree. It is remembered.
    probe : bool
        Try the device also where nothing is to be decided, and every precision on it: see :attr:`Plan.tuned`.
    report : callable
        Told in a line what is being done, where it takes a while.

    Raises
    ------
    ConfigError, InputError, WeightsError
        When the job cannot be run as it is written.
    MemoryRefused, DiskRefused
        When it does not fit.
    """
    check_job(job)
    output = Path(os.path.abspath(job.output.path))
    check_parents(output)
    previous = None if fresh else RunDirectory(run_directory_of(output)).read_valid_plan()
    denoiser = make_denoiser(job.denoiser, job)
    expect_trial(denoiser)
    original = open_source(
        job.input.path, level=job.input.level, dataset=job.input.dataset, axes=job.input.axes
    )
    check_paths(original, output)
    device, precision, ignored = computed_by(denoiser, device_of(job.run, job.cluster), job.run.precision)
    check_device(job.run, job.cluster, device)
    cluster = cluster_for(job.cluster, device)
    job, requested = with_workers(job, cluster, device)
    roles, source = assign_axes(job, denoiser, original)
    sides = open_sides(job, denoiser, source, roles)
    values = value_range(job, source.dtype)
    given = denoiser
    check_units(denoiser, values, sides)
    denoiser, noise_level = choose_noise_level(denoiser, source, values, previous)
    image = tuple(source.shape[i] for i in roles.spatial)
    own_code, reach = tried(denoiser, job.tile, image, previous, run=job.run, report=report)
    seals = seals_of(denoiser, own_code)
    if reach.probed:
        denoiser = denoiser.probed(*reach.probed)
    geometry = geometry_of(source, denoiser, roles, reach)
    layout = layout_of(job, original, geometry, roles, previous)
    rim = rim_of(job.tile, denoiser, roles)
    unit = block_unit(geometry, layout.shard)
    job, requested = no_more_than(job, requested, geometry.shape, unit)

    convolves = denoiser.convolutional and geometry.dims == 2

    def with_sizes(
        block: tuple[int, ...], size: Size, tuned: Tuned | None = None
    ) -> tuple[DenoiseTask, Footprint]:
        tiling = tiling_of(job.tile, denoiser, roles, reach, geometry, size, block, values, source.dtype)
        grid = grid_of(geometry, roles, reach, block, tiling)
        task = DenoiseTask(
            source=source,
            sides=dict(sides),
            writer=ShardWriter(output, layout),
            grid=grid,
            rim=rim,
            roles=roles,
            denoiser=denoiser,
            tiling=tiling,
            channels_out=denoiser.channels[1],
            device=device,
            precision=precision,
            on_nan=job.run.on_nan,
            overlap=device != "cpu" or overlap_pays(job.run),
            channels_last=convolves and channels_last_of(job.tile, device, precision),
            io_threads=io_threads_for(job.run, cluster, device),
            seals=seals,
        )
        return task, _footprint(task, layout, stored_piece, tuned)

    machine = machine_bytes() if is_here(cluster) else None
    stored_piece = original.chunks if not original.mapped else (1,)
    on_gpu = device != "cpu"

    def choose(known: Tuned | None) -> tuple[DenoiseTask, Footprint]:
        sized = partial(with_sizes, tuned=known)
        return choose_block(job, geometry, unit, previous, machine, sized, on_gpu=on_gpu)

    def settled(chosen: tuple[DenoiseTask, Footprint]) -> ChosenTiles:
        with report_if_slow(report, trying(chosen[0])):
            return choose_tiles(job, chosen[0], geometry, previous, probe=probe)

    def fits(_: tuple[DenoiseTask, Footprint], made: ChosenTiles) -> bool:
        needed = _footprint(made.task, layout, stored_piece, made.tuned)
        return needed.total_bytes <= allowed_bytes(job.run, machine)

    is_free = on_gpu and job.tile.block == "auto" and previous is None
    (task, needed), made = chosen_with_tiles(choose, settled, fits, is_free=is_free)
    if made is not None:
        task, needed = made.task, _footprint(made.task, layout, stored_piece, made.tuned)
    reach = compared(reach, task, job.tile, previous, run=job.run, report=report)
    identity = _identity(job, original, given, task, layout, previous) | {
        "code": {**code_versions(), **own_code},
        "noise_level": noise_level,
        "probed": list(reach.probed) if reach.probed else None,
    }
    same_inputs: list[dict[str, Any]] = previous.get("same_inputs", []) if previous else []
    if previous and may_be_same(previous["identity"], identity):
        images = inputs_of(identity)
        if same_input and images not in [inputs_of(previous["identity"]), *same_inputs]:
            same_inputs = [*same_inputs, images]
        if images in same_inputs:
            identity |= inputs_of(previous["identity"])
    differs = tuple(differences(previous["identity"], identity)) if previous else ()
    free = shutil.disk_usage(existing_parent(output)).free
    plan = Plan(
        job=job,
        cluster=cluster,
        task=as_it_went(task, previous),
        sources=(original, *sides.values()),
        layout=layout,
        reach=reach,
        output=output,
        run_directory=run_directory_of(output),
        identity=identity,
        same_inputs=tuple(same_inputs),
        differs=differs,
        resumes=previous is not None and not differs,
        fresh=fresh,
        footprint=needed,
        free_disk_bytes=free,
        machine_bytes=machine,
        requested=requested,
        tuned=made.tuned if made else None,
        notes=notes_of(
            original,
            source.dtype,
            layout=layout,
            roles=roles,
            grid=task.grid,
            reach=reach,
            noise_level=noise_level,
            of_trial=made.note if made else "",
        )
        + ignored
        + note_of_cluster(job, cluster, device)
        + note_of_files(layout, job.output, roles)
        + note_of_locks(output),
    )
    if refuse:
        plan.check_fits()
    return plan


def _footprint(
    task: DenoiseTask, layout: Layout, piece: tuple[int, ...], tuned: Tuned | None = None
) -> Footprint:
    tiling, denoiser = task.tiling, task.denoiser
    middle = task.grid.middle
    channels = max(denoiser.channels) if task.roles.channel is not None else 1
    window = math.prod(tile_window(task)[1])
    read = tuple(
        min(w, n) if rule == "cut" else w
        for w, n, rule in zip(middle.window.shape, task.grid.shape, task.rim.rules, strict=True)
    )
    core_out = task.roles.output_region(middle.core, tiling.scale, task.channels_out)
    return footprint(
        window=read,
        core_out=core_out.shape,
        shard=layout.shard,
        tile_window_pixels=window * channels * tiling.scale ** len(tiling.tile),
        batch=tiling.batch,
        itemsize_in=task.source.dtype.itemsize,
        itemsize_work=np.dtype(tiling.work_dtype).itemsize,
        itemsize_out=np.dtype(layout.dtype).itemsize,
        stored_piece=piece,
        sides=len(task.sides),
        bytes_per_pixel=denoiser.bytes_per_pixel(),
        weights_bytes=2 * sum(path.stat().st_size for path in denoiser.files()),
        overlap=task.overlap,
        io_threads=task.io_threads,
        gpu_bytes=None if task.device == "cpu" else gpu_bytes(tuned.host_bytes if tuned else None),
    )


def _identity(
    job: Job,
    source: Source,
    denoiser: Denoiser,
    task: DenoiseTask,
    layout: Layout,
    previous: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "input": source.fingerprint(),
        "sides": {name: open_source(path).fingerprint() for name, path in sorted(job.input.sides.items())},
        "denoiser": describe_denoiser(denoiser),
        "weights": {path.name: task.seals[str(path)] for path in denoiser.files()},
        "range": list(task.tiling.range) if task.tiling.range else None,
        "tiled_axes": "".join(task.roles.axes[i] for i in task.roles.spatial),
        "depth": [list(pair) for pair in task.tiling.depth],
        "boundary": list(task.rim.rules),
        "precision": task.precision,
        **on_device(task, previous),
        "on_nan": task.on_nan,
        "layout": layout.to_json(),
        "block": list(task.grid.block),
    }
