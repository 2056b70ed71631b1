"""The planner: every size of a job decided, checked against memory and disk, or refused with the numbers."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from halotile.graphs.checks import check_job
from halotile.graphs.identity import code_versions, differences, may_be_same, pictures_of
from halotile.graphs.job import Job, Size, parse_bytes
from halotile.graphs.memory import Footprint, footprint, machine_bytes, share_bytes
from halotile.graphs.notes import notes_of
from halotile.graphs.plan import Plan, existing_parent, run_directory_of, tile_window
from halotile.graphs.reach import Reach, resolve_reach
from halotile.graphs.resolve import (
    assign_axes,
    check_paths,
    describe_denoiser,
    make_denoiser,
    open_sides,
    settle_noise_level,
    value_range,
)
from halotile.graphs.sizes import (
    SMALL_CONVOLUTION,
    Geometry,
    block_unit,
    candidate_blocks,
    candidate_tiles,
    check_block,
    choose_chunk,
    choose_shard,
    fit_tile,
    least_window,
)
from halotile.storage.arrays import Source, open_source
from halotile.storage.grid import Grid
from halotile.storage.ome_metadata import carried
from halotile.storage.output import Layout, ShardWriter
from halotile.storage.place import check_parents
from halotile.storage.rim import Readable, Rim
from halotile.storage.rundir import RunDirectory
from halotile.tasks.denoise import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.probe import check_own_code, check_ragged
from halotile.tasks.roles import Roles
from halotile.tasks.weights import file_sha256
from halotile.tasks.window import Tiling


def make_plan(job: Job, *, fresh: bool = False, refuse: bool = True, same_input: bool = False) -> Plan:
    """Decide every size of a job and check that it fits.

    Reads metadata, not pixels, unless a noise level or a receptive field has to be found out.

    Parameters
    ----------
    job : Job
        What is asked for.
    fresh : bool
        Plan anew, even where a run directory of an unfinished run stands.
    refuse : bool
        Whether to raise for a plan that does not fit; otherwise :meth:`Plan.check_fits` says so.
    same_input : bool
        Take what is read for the pictures of the run that stands there, mended, copied or moved, if their
        shapes, types and axes agree. It is remembered.

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
    previous = None if fresh else RunDirectory(run_directory_of(output)).whole_plan()
    original = open_source(
        job.input.path, level=job.input.level, dataset=job.input.dataset, axes=job.input.axes
    )
    check_paths(original, output)
    denoiser = make_denoiser(job)
    own_code = denoiser.check()
    roles, source = assign_axes(job, denoiser, original)
    sides = open_sides(job, denoiser, source, roles)
    values = value_range(job, source.dtype)
    if own_code:
        check_own_code(denoiser, len(roles.spatial))
    asked = denoiser
    denoiser, noise_level = settle_noise_level(denoiser, source, values, previous)
    reach = resolve_reach(job, denoiser, len(roles.spatial), previous)
    if reach.probed:
        denoiser = denoiser.probed(*reach.probed)
    if denoiser.alignment > 1 and previous is None:
        check_ragged(denoiser, tuple(source.shape[i] for i in roles.spatial))
    geometry = _geometry(source, denoiser, roles, reach)
    layout = _layout(job, original, geometry, roles)
    rim = _rim(job, denoiser, roles)
    unit = block_unit(geometry, layout.shard)

    def with_sizes(block: tuple[int, ...], size: Size) -> tuple[DenoiseTask, Footprint]:
        tile = fit_tile(geometry, size, block)
        tiling = _tiling(job, denoiser, roles, reach, geometry, size, tile, values, source.dtype)
        grid = _grid(geometry, roles, reach, block, tiling)
        task = DenoiseTask(
            source=source,
            sides=sides,
            writer=ShardWriter(output, layout),
            grid=grid,
            rim=rim,
            roles=roles,
            denoiser=denoiser,
            tiling=tiling,
            channels_out=denoiser.channels[1],
            precision=job.run.precision,
            on_nan=job.run.on_nan,
            overlap=_overlap_pays(job),
        )
        return task, _footprint(task, layout, denoiser, original.chunks if not original.mapped else (1,))

    machine = machine_bytes() if job.cluster.kind == "local" else None
    task, needed = _choose_block(job, geometry, unit, previous, machine, with_sizes)
    identity = _identity(job, original, asked, task, layout) | {
        "code": {**code_versions(), **own_code},
        "noise_level": noise_level,
        "probed": list(reach.probed) if reach.probed else None,
    }
    same_inputs: list[dict[str, Any]] = previous.get("same_inputs", []) if previous else []
    if previous and may_be_same(previous["identity"], identity):
        pictures = pictures_of(identity)
        if same_input and pictures not in [pictures_of(previous["identity"]), *same_inputs]:
            same_inputs = [*same_inputs, pictures]
        if pictures in same_inputs:
            identity |= pictures_of(previous["identity"])
    differs = tuple(differences(previous["identity"], identity)) if previous else ()
    free = shutil.disk_usage(existing_parent(output)).free
    plan = Plan(
        job=job,
        task=task,
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
        notes=notes_of(
            original,
            source.dtype,
            layout=layout,
            roles=roles,
            grid=task.grid,
            reach=reach,
            noise_level=noise_level,
        ),
    )
    if refuse:
        plan.check_fits()
    return plan


def _geometry(source: Readable, denoiser: Denoiser, roles: Roles, reach: Reach) -> Geometry:
    output_shape = [n * f for n, f in zip(source.shape, roles.per_axis(denoiser.scale, 1), strict=True)]
    if roles.channel is not None:
        output_shape[roles.channel] = denoiser.channels[1]
    return Geometry(source.shape, tuple(output_shape), roles, denoiser.scale, reach.align)


def _layout(job: Job, source: Source, geometry: Geometry, roles: Roles) -> Layout:
    chunk = choose_chunk(geometry, job.output.chunk)
    # A mask is smoothed to values between 0 and 1.
    own = "float32" if source.dtype == np.bool_ else str(source.dtype)
    dtype = own if job.output.dtype == "auto" else job.output.dtype
    added = len(roles.axes) - len(source.axes)
    factor = roles.per_axis(geometry.scale, 1)
    scale = (1.0,) * added + tuple(source.scale)
    channels = geometry.output_shape[roles.axes.index("c")] if "c" in roles.axes else None
    return Layout(
        shape=geometry.output_shape,
        dtype=dtype,
        shard=choose_shard(geometry, job.output.shard, chunk),
        chunk=chunk,
        codec=job.output.codec,
        axes=roles.axes,
        scale=tuple(s / f for s, f in zip(scale, factor, strict=True)),
        units=(None,) * added + tuple(source.units),
        **carried(source.ome, roles.axes, scale=scale, factor=factor, channels=channels),
    )


def _rim(job: Job, denoiser: Denoiser, roles: Roles) -> Rim:
    rule = denoiser.boundary if job.tile.boundary == "auto" else job.tile.boundary
    return Rim(tuple(rule if i in roles.spatial else "cut" for i in range(len(roles.axes))))


def _tiling(
    job: Job,
    denoiser: Denoiser,
    roles: Roles,
    reach: Reach,
    geometry: Geometry,
    size: Size,
    tile: tuple[int, ...],
    values: tuple[float, float] | None,
    dtype: np.dtype[Any],
) -> Tiling:
    wide = dtype.itemsize >= 4 and dtype != np.float32 and not denoiser.convolutional
    least = least_window(geometry, denoiser.convolutional)
    window = math.prod(t + a + b for t, (a, b) in zip(tile, reach.depth, strict=True))
    # As many pixels at once as one tile of the size asked for: blocks may be smaller than it.
    at_once = math.prod(geometry.spread("tile.size", size, geometry.shape)[i] for i in roles.spatial)
    batch = max(1, at_once // window) if job.tile.batch == "auto" else job.tile.batch
    if math.prod(least) <= SMALL_CONVOLUTION and denoiser.convolutional:
        batch = 1  # several images at once go to the other library
    return Tiling(
        tile=tile,
        depth=reach.depth,
        align=(reach.align,) * len(roles.spatial),
        least=least,
        picture=tuple(geometry.shape[i] for i in roles.spatial),
        scale=denoiser.scale,
        batch=batch,
        range=values,
        work_dtype="float64" if wide else "float32",
    )


def _grid(geometry: Geometry, roles: Roles, reach: Reach, block: tuple[int, ...], tiling: Tiling) -> Grid:
    depth = dict(zip(roles.spatial, reach.depth, strict=True))
    # The halo beyond the picture does not count where the window is cut there.
    least = {i: n + max(depth[i]) for i, n in zip(roles.spatial, tiling.least, strict=True) if n > 1}
    return Grid(
        shape=geometry.shape,
        block=tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)),
        depth=tuple(depth.get(i, (0, 0)) for i in range(len(geometry.shape))),
        align=roles.per_axis(reach.align, 1),
        least=tuple(least.get(i, 1) for i in range(len(geometry.shape))),
    )


def _overlap_pays(job: Job) -> bool:
    """Whether there are cores to spare for reading and writing beside the computation."""
    return (os.cpu_count() or 1) > job.run.workers


def _footprint(task: DenoiseTask, layout: Layout, denoiser: Denoiser, piece: tuple[int, ...]) -> Footprint:
    tiling = task.tiling
    middle = task.grid.block_at(len(task.grid) // 2)
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
        itemsize_out=np.dtype(layout.dtype).itemsize,
        stored_piece=piece,
        sides=len(task.sides),
        bytes_per_pixel=denoiser.bytes_per_pixel(),
        weights_bytes=2 * sum(path.stat().st_size for path in denoiser.files()),
        overlap=task.overlap,
    )


def _choose_block(
    job: Job,
    geometry: Geometry,
    unit: tuple[int, ...],
    previous: dict[str, Any] | None,
    machine: int | None,
    with_sizes: Callable[[tuple[int, ...], Size], tuple[DenoiseTask, Footprint]],
) -> tuple[DenoiseTask, Footprint]:
    """The largest tile and super-block that fit the memory of a worker, or else the smallest.

    A resumed run keeps its super-block.
    """
    if job.tile.block != "auto":
        candidates = [check_block(geometry, job.tile.block, unit)]
    elif previous is not None and _fits_unit(tuple(previous["block"]), unit, geometry.shape):
        candidates = [tuple(previous["block"])]
    else:
        candidates = candidate_blocks(geometry, unit, job.run.workers)
    allowed = parse_bytes(job.run.memory_per_worker)
    if machine is not None:
        allowed = min(allowed, share_bytes(machine, job.run.workers))
    for size, block in itertools.product(candidate_tiles(geometry, job.tile.size), candidates):
        task, needed = with_sizes(block, size)
        if needed.total_bytes <= allowed:
            return task, needed
    return task, needed  # the smallest, which Plan.check_fits refuses


def _fits_unit(block: tuple[int, ...], unit: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(block) == len(unit) and all(
        b % u == 0 or b >= n for b, u, n in zip(block, unit, shape, strict=True)
    )


def _identity(
    job: Job, source: Source, denoiser: Denoiser, task: DenoiseTask, layout: Layout
) -> dict[str, Any]:
    return {
        "input": source.fingerprint(),
        "sides": {name: open_source(path).fingerprint() for name, path in sorted(job.input.sides.items())},
        "denoiser": describe_denoiser(denoiser),
        "weights": {path.name: file_sha256(path) for path in denoiser.files()},
        "range": list(task.tiling.range) if task.tiling.range else None,
        "tiled_axes": "".join(task.roles.axes[i] for i in task.roles.spatial),
        "depth": [list(pair) for pair in task.tiling.depth],
        "boundary": list(task.rim.rules),
        "precision": task.precision,
        "on_nan": task.on_nan,
        "layout": layout.to_json(),
        "block": list(task.grid.block),
    }
