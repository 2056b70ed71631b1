"""Choice of tile and batch for a GPU: tried once in another process, as the driver must not touch CUDA."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from halotile.errors import HalotileError
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import chosen, gpus_here
from halotile.graphs.clusters.workers.fork_server import NoAnswer, call_bounded
from halotile.graphs.kinds.sections import Tile, TiledJob
from halotile.graphs.plans.cutting import Geometry, candidate_tiles, fit_tile
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.image_task import Denoised
from halotile.tasks.trials.gpu_trial import TrialRequest, Tuned, tune

T = TypeVar("T", DenoiseTask, Denoised)
C = TypeVar("C")

LIMIT_SECONDS = 300.0  # a trial that takes longer hangs
APART_BYTES = 64 * 2**20  # largest difference between two trials in the measured memory of a process
BATCH = "batch"  # key under which a run directory keeps the number of tiles at once that a run was reduced to


class NotTried(Exception):
    """Reason why there was no trial, in words that end a sentence."""


def remembered(previous: Mapping[str, Any]) -> Tuned | None:
    """Return the trial result of a run that began earlier."""
    stored = previous.get("summary", {}).get("tuned")
    return Tuned.from_json(stored) if stored else None


@dataclass(frozen=True)
class ChosenTiles:
    """A task whose tile, batch and memory layout are decided."""

    task: DenoiseTask  # task with these values
    tuned: Tuned | None = None  # result of the trial, of this run or of the run that it resumes
    note: str = ""  # note where there should have been a trial and was none


def channels_last_of(tile: Tile, device: str, precision: str) -> bool:
    """Return the memory layout that a network begins with: as the job sets it, or what suits most networks.

    On GPUs that is channels last in half precision; in float32 most of their convolutions are faster the other way.
    """
    if device == "cpu":
        return True
    return precision != "float32" if tile.channels_last == "auto" else tile.channels_last


def with_reduced_batch(tiled: T, previous: Mapping[str, Any] | None) -> T:
    """Return the task or image with the smaller batch that the resumed run was reduced to for lack of memory."""
    batch = min(tiled.tiling.batch, (previous or {}).get(BATCH, tiled.tiling.batch))
    return replace(tiled, tiling=replace(tiled.tiling, batch=batch))


def sized_as(tiled: T, task: DenoiseTask) -> T:
    """Return a task or image with the tile, batch and memory layout of a task; beside a network, only other networks have a layout."""
    tiling = replace(tiled.tiling, tile=task.tiling.tile, batch=task.tiling.batch)
    has_layout = tiled.denoiser.convolutional or not task.denoiser.convolutional
    return replace(tiled, tiling=tiling, channels_last=task.channels_last and has_layout, records=task.records)


def on_device(tiled: DenoiseTask | Denoised, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return further settings that affect the bits of the result on a GPU: its libraries choose algorithms by shape.

    A run may be resumed with fewer tiles at once than it began with: it has to be where memory runs out.
    """
    if tiled.device == "cpu":
        return {}
    first_batch: int = previous["identity"].get("batch", 0) if previous else 0
    return {
        "device": tiled.device,
        "tile": list(tiled.tiling.tile),
        "batch": max(first_batch, tiled.tiling.batch),
        "channels_last": tiled.channels_last,
    }


def trial_text(task: DenoiseTask) -> str:
    """Describe a trial in a few words, for the time that it takes."""
    return f"trying {task.denoiser.title} on {'this CPU' if task.device == 'cpu' else 'a GPU'}"


def written_tiles(tiled: DenoiseTask | Denoised) -> dict[str, Any]:
    """Return the tiles as a job file would have them."""
    layout = {} if tiled.device == "cpu" else {"channels_last": tiled.channels_last}
    return {"size": list(tiled.tiling.tile), "batch": tiled.tiling.batch, **layout}


def tile_figures(tiled: DenoiseTask | Denoised, tuned: Tuned | None) -> dict[str, Any]:
    """Return the figures of a plan on tiles and their device."""
    return {
        "device": tiled.device,
        "precision": tiled.precision,
        "tile": list(tiled.tiling.tile),
        "batch": tiled.tiling.batch,
        "device_memory_bytes": tuned.device_bytes if tuned and tiled.device != "cpu" else None,
        "tuned": tuned.to_json() if tuned else None,
    }


def choose_tiles(
    job: TiledJob, task: DenoiseTask, geometry: Geometry, previous: Mapping[str, Any] | None, *, probe: bool
) -> ChosenTiles:
    """Decide tile, batch and memory layout: a GPU is tried for a new run, any device where a probe is asked for.

    The parameters are those of :func:`tuned_for`, and:

    ``previous``: plan of the run that is resumed, as it began except for what the job sets now; ``probe``: try the device whatever is known, and
    every precision on it.
    """
    known = None
    identity = previous["identity"] if previous is not None else {}
    if previous is not None and "tile" in identity and identity["device"] == task.device:
        known = remembered(previous)
        task = _task_as_started(task, job.tile, geometry, identity, known)
    if not probe and (task.device == "cpu" or previous is not None):
        return ChosenTiles(task, known)
    if previous is not None and task.device != "cpu":  # a probe of a run that has begun changes nothing
        tiling = task.tiling
        sized = replace(job.tile, size=tiling.tile, batch=tiling.batch, channels_last=task.channels_last)
        job = replace(job, tile=sized)
    try:
        tuned = tuned_for(job, task, geometry, compare=probe)
    except NotTried as why:
        which = "by rule" if known is None else "as they were found, and not tried again"
        return ChosenTiles(task, known, f"tile and batch are {which}: {why}")
    if previous is None and task.device != "cpu":
        task = _with_tuned(task, tuned)
    return ChosenTiles(task, tuned)


def chosen_with_tiles(
    # returns the largest blocks that a worker has memory for, by the memory that a trial measured, or an allowance
    choose: Callable[[Tuned | None], C],
    # returns the tiles that compute them; None where there is nothing to decide
    settled: Callable[[C], ChosenTiles | None],
    fits: Callable[[C, ChosenTiles], bool],  # returns True where a worker has memory for that
    *,
    # other blocks may be chosen. The libraries of a GPU may keep more memory than was allowed for them
    is_free: bool,
) -> tuple[C, ChosenTiles | None]:
    """Return the blocks, and the tiles that compute them."""
    chosen = choose(None)
    first = settled(chosen)
    if not is_free or first is None or first.tuned is None or fits(chosen, first):
        return chosen, first
    most = first.tuned.host_bytes
    chosen = choose(replace(first.tuned, host_bytes=most + APART_BYTES))
    second = settled(chosen)
    assert second is not None
    if second.tuned is None:  # the result for larger blocks is used where these cannot be tried
        second = ChosenTiles(_with_tuned(second.task, first.tuned), first.tuned)
    tuned = second.tuned or first.tuned
    return chosen, replace(second, tuned=replace(tuned, host_bytes=max(most, tuned.host_bytes)))


def _with_tuned(task: DenoiseTask, tuned: Tuned) -> DenoiseTask:
    """Return the task with the result of the trial."""
    tiling = replace(task.tiling, tile=tuned.tile, batch=tuned.batch)
    return replace(task, tiling=tiling, channels_last=tuned.channels_last, records=tuned.records)


def _task_as_started(
    task: DenoiseTask, tile: Tile, geometry: Geometry, identity: Mapping[str, Any], tuned: Tuned | None
) -> DenoiseTask:
    """Return the task as the run began, except for what the job sets now; differences are checked elsewhere."""
    # As a trial would be asked for with what is written, or as the rule decided.
    edges, batch = task.tiling.tile, task.tiling.batch
    if tile.size == "auto":
        edges = tuple(identity["tile"])
    elif tuned is not None:
        edges = fit_tile(geometry, tile.size, task.grid.block)
    if tile.batch == "auto":
        batch = identity["batch"]
    elif tuned is not None:
        batch = tile.batch
    is_laid_out = tile.channels_last != "auto" and _has_layouts(task, geometry)
    return replace(
        task,
        tiling=replace(task.tiling, tile=edges, batch=batch),
        channels_last=task.channels_last if is_laid_out else identity["channels_last"],
        records=tuned is not None and tuned.records,
    )


def _has_layouts(task: DenoiseTask, geometry: Geometry) -> bool:
    """Return True where there is a memory layout to choose."""
    return task.denoiser.convolutional and geometry.dims == 2


def tuned_for(job: TiledJob, task: DenoiseTask, geometry: Geometry, *, compare: bool) -> Tuned:
    """Try tiles and batches on the first GPU that the workers would use; on a CPU, only the tile of the task.

    ``job``: job; values that it sets are not changed; ``task``: task with a tile that fits; ``geometry``: constraints on the tiles; ``compare``: try
    all precisions.
    """
    environment = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}  # as in workers
    if task.device != "cpu":
        gpus = gpus_here()
        if not gpus.names:
            raise NotTried(f"there is no GPU here to try them on ({gpus.why_none})")
        if cluster_kind_of(job.cluster).traits.has_worker_per_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = chosen(job.cluster, gpus)[0]
    return _in_a_process_of_its_own(task, _request(job, task, geometry, compare), environment)


def _request(job: TiledJob, task: DenoiseTask, geometry: Geometry, compare: bool) -> TrialRequest:
    if task.device == "cpu":
        return TrialRequest(tiles=(task.tiling.tile,), batch=task.tiling.batch, compare=compare)
    sizes = candidate_tiles(geometry, job.tile.size, on_gpu=True)
    return TrialRequest(
        tiles=tuple(dict.fromkeys(fit_tile(geometry, size, task.grid.block) for size in sizes)),
        batch=None if job.tile.batch == "auto" else job.tile.batch,
        # Workers of one machine that are not assigned a GPU each all use the first.
        sharing=job.run.count if cluster_kind_of(job.cluster).traits.gpus == "shared" else 1,
        layouts=job.tile.channels_last == "auto" and _has_layouts(task, geometry),
        compare=compare,
    )


def _in_a_process_of_its_own(task: DenoiseTask, request: TrialRequest, environment: Mapping[str, str]) -> Tuned:
    try:
        # The memory that a GPU driver needs is unknown: no limit.
        return call_bounded(partial(_tune, task, request, environment), None, LIMIT_SECONDS)
    except NoAnswer as error:
        raise NotTried(f"a trial {error}") from None
    except HalotileError:
        raise
    except RuntimeError as error:  # the text that CUDA adds in further lines is of no help
        raise NotTried(f"a trial broke: {error}".partition("\n")[0]) from None


def _tune(task: DenoiseTask, request: TrialRequest, environment: Mapping[str, str]) -> Tuned:
    """Try tiles in the separate process."""
    os.environ.update(environment)
    import halotile.graphs.runs.passes.worker_setup  # noqa: F401 - a worker's memory is measured, with all that it imports
    from halotile.tasks.devices.device import prepare_process

    prepare_process(threads=1)
    return tune(task, request)
