"""Tile and batch for a GPU: tried on it once, in a process of its own. The driver does not touch CUDA, and the run remembers."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from halotile.errors import HalotileError
from halotile.graphs.clusters.detection.cluster_kind import kind_of
from halotile.graphs.clusters.detection.gpus import gpus_here
from halotile.graphs.jobs.sections import Tile, TiledJob
from halotile.graphs.plans.devices import chosen
from halotile.graphs.plans.sizes import Geometry, candidate_tiles, fit_tile
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.devices.memory_limits import allow_memory
from halotile.tasks.trials.gpu_findings import TrialRequest, Tuned

T = TypeVar("T", DenoiseTask, Denoised)
C = TypeVar("C")

LIMIT_SECONDS = 300.0
"""A trial that takes longer hangs."""
APART_BYTES = 64 * 2**20
"""What two trials may tell differently of a process's memory."""
REQUEST, REPLY = "request", "reply"
BATCH = "batch"
"""In what a run directory keeps of a plan: how many tiles at once a run came down to."""
_CHILD = "import sys; from halotile.graphs.plans.gpu_trials import answer; answer(sys.argv[1])"


class NotTried(Exception):
    """Why there was no trial, in words that end a sentence."""


def remembered(previous: Mapping[str, Any]) -> Tuned | None:
    """What was found for a run that began earlier."""
    found = previous.get("summary", {}).get("tuned")
    return Tuned.from_json(found) if found else None


@dataclass(frozen=True)
class ChosenTiles:
    """A task whose tile, batch and memory layout are decided.

    Parameters
    ----------
    task : DenoiseTask
        With these.
    tuned : Tuned, optional
        What a trial found, of this run or for the one that it goes on with.
    note : str
        What is to be said where there was no trial, and should have been one.
    """

    task: DenoiseTask
    tuned: Tuned | None = None
    note: str = ""


def channels_last_of(tile: Tile, device: str, precision: str) -> bool:
    """The memory layout that a network begins with: as written, or what suits most of its kind.

    On GPUs that is channels last in half precision; in float32 most of their convolutions are faster the other way.
    """
    if device == "cpu":
        return True
    return precision != "float32" if tile.channels_last == "auto" else tile.channels_last


def as_it_went(tiled: T, previous: Mapping[str, Any] | None) -> T:
    """With as few tiles at once as the run that it goes on with came down to, for want of memory."""
    batch = min(tiled.tiling.batch, (previous or {}).get(BATCH, tiled.tiling.batch))
    return replace(tiled, tiling=replace(tiled.tiling, batch=batch))


def sized_as(denoised: Denoised, task: DenoiseTask) -> Denoised:
    """A denoised image with the tile, batch and memory layout of a task."""
    tiling = replace(denoised.tiling, tile=task.tiling.tile, batch=task.tiling.batch)
    return replace(denoised, tiling=tiling, channels_last=task.channels_last, records=task.records)


def on_device(tiled: DenoiseTask | Denoised, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """What else decides about bits where it is not a CPU that computes: its libraries choose by shape.

    A run may go on with fewer tiles at once than it began with: it has to where memory runs out.
    """
    if tiled.device == "cpu":
        return {}
    begun: int = previous["identity"].get("batch", 0) if previous else 0
    return {
        "device": tiled.device,
        "tile": list(tiled.tiling.tile),
        "batch": max(begun, tiled.tiling.batch),
        "channels_last": tiled.channels_last,
    }


def trying(task: DenoiseTask) -> str:
    """What is going on meanwhile, in a few words."""
    return f"trying {task.denoiser.title} on {'this CPU' if task.device == 'cpu' else 'a GPU'}"


def written_tiles(tiled: DenoiseTask | Denoised) -> dict[str, Any]:
    """The tiles as a job file would write them."""
    layout = {} if tiled.device == "cpu" else {"channels_last": tiled.channels_last}
    return {"size": list(tiled.tiling.tile), "batch": tiled.tiling.batch, **layout}


def choose_tiles(
    job: TiledJob, task: DenoiseTask, geometry: Geometry, previous: Mapping[str, Any] | None, *, probe: bool
) -> ChosenTiles:
    """Decide tile, batch and memory layout: a GPU is tried for a new run, anything where that is asked for.

    The parameters are those of :func:`tuned_for`, and:

    Parameters
    ----------
    previous : mapping, optional
        The plan of the run that it goes on with, as it began but for what the job says by now.
    probe : bool
        Whether to try the device whatever is known, and every precision on it.
    """
    known = None
    begun = previous["identity"] if previous is not None else {}
    if previous is not None and "tile" in begun and begun["device"] == task.device:
        known = remembered(previous)
        task = _as_started(task, job.tile, geometry, begun, known)
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
    choose: Callable[[Tuned | None], C],
    settled: Callable[[C], ChosenTiles | None],
    fits: Callable[[C, ChosenTiles], bool],
    *,
    is_free: bool,
) -> tuple[C, ChosenTiles | None]:
    """Blocks, and how they are computed.

    Parameters
    ----------
    choose : callable
        The largest that a worker has room for, by what a trial told of its memory, or what is allowed for that.
    settled : callable
        How they are computed; None where there is nothing to settle.
    fits : callable
        Whether a worker has room for that.
    is_free : bool
        Whether others may be chosen. A GPU's libraries may keep more than was allowed for them.
    """
    chosen = choose(None)
    first = settled(chosen)
    if not is_free or first is None or first.tuned is None or fits(chosen, first):
        return chosen, first
    most = first.tuned.host_bytes
    chosen = choose(replace(first.tuned, host_bytes=most + APART_BYTES))
    again = settled(chosen)
    assert again is not None
    if again.tuned is None:  # what was found of larger blocks will do where these cannot be tried
        again = ChosenTiles(_with_tuned(again.task, first.tuned), first.tuned)
    tuned = again.tuned or first.tuned
    return chosen, replace(again, tuned=replace(tuned, host_bytes=max(most, tuned.host_bytes)))


def _with_tuned(task: DenoiseTask, tuned: Tuned) -> DenoiseTask:
    """The task with what was found."""
    tiling = replace(task.tiling, tile=tuned.tile, batch=tuned.batch)
    return replace(task, tiling=tiling, channels_last=tuned.channels_last, records=tuned.records)


def _as_started(
    task: DenoiseTask, tile: Tile, geometry: Geometry, begun: Mapping[str, Any], known: Tuned | None
) -> DenoiseTask:
    """The task as the run began, but for what the job says by now: what is another job then is for others to tell."""
    # As a trial would be asked for what is written, or as the rule made it.
    edges, batch = task.tiling.tile, task.tiling.batch
    if tile.size == "auto":
        edges = tuple(begun["tile"])
    elif known is not None:
        edges = fit_tile(geometry, tile.size, task.grid.block)
    if tile.batch == "auto":
        batch = begun["batch"]
    elif known is not None:
        batch = tile.batch
    is_laid_out = tile.channels_last != "auto" and _has_layouts(task, geometry)
    return replace(
        task,
        tiling=replace(task.tiling, tile=edges, batch=batch),
        channels_last=task.channels_last if is_laid_out else begun["channels_last"],
        records=known is not None and known.records,
    )


def _has_layouts(task: DenoiseTask, geometry: Geometry) -> bool:
    """Whether there is a memory layout to be chosen."""
    return task.denoiser.convolutional and geometry.dims == 2


def tuned_for(job: TiledJob, task: DenoiseTask, geometry: Geometry, *, compare: bool) -> Tuned:
    """Try tiles and batches on the first GPU that the workers would use; on a CPU, the tile of the task.

    Parameters
    ----------
    job : Job
        What is given there is not changed.
    task : DenoiseTask
        The job with a tile that fits.
    geometry : Geometry
        What tiles must heed.
    compare : bool
        Whether all precisions are tried.

    Raises
    ------
    NotTried
        When there is no GPU here, or the trial broke.
    HalotileError
        What a run would say.
    """
    # It may import what this process can.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if task.device != "cpu":
        here = gpus_here()
        if not here.names:
            raise NotTried(f"there is no GPU here to try them on ({here.why_none})")
        if kind_of(job.cluster).traits.has_worker_per_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = chosen(job.cluster, here)[0]
    return _in_a_process_of_its_own(job, task, _request(job, task, geometry, compare), environment)


def _request(job: TiledJob, task: DenoiseTask, geometry: Geometry, compare: bool) -> TrialRequest:
    if task.device == "cpu":
        return TrialRequest(tiles=(task.tiling.tile,), batch=task.tiling.batch, compare=compare)
    sizes = candidate_tiles(geometry, job.tile.size, on_gpu=True)
    return TrialRequest(
        tiles=tuple(dict.fromkeys(fit_tile(geometry, size, task.grid.block) for size in sizes)),
        batch=None if job.tile.batch == "auto" else job.tile.batch,
        # Workers of one machine that are not told of a GPU each all use the first.
        sharing=job.run.count if kind_of(job.cluster).traits.gpus == "shared" else 1,
        layouts=job.tile.channels_last == "auto" and _has_layouts(task, geometry),
        compare=compare,
    )


def _in_a_process_of_its_own(
    job: TiledJob, task: DenoiseTask, request: TrialRequest, environment: Mapping[str, str]
) -> Tuned:
    with tempfile.TemporaryDirectory(prefix="halotile-tuning-") as made:
        folder = Path(made)
        # A model that a script defines is in no module: it goes along as it is.
        requested = cloudpickle.dumps((task, request))
        (folder / REQUEST).write_bytes(pickle.dumps((sys.path, job.import_folder, requested)))
        try:
            ended = subprocess.run(
                [sys.executable, "-c", _CHILD, made],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotTried(f"a trial did not end within {LIMIT_SECONDS:.0f} s") from None
        if ended.returncode or not (folder / REPLY).exists():
            last = _error_in(ended.stderr) or f"exit code {ended.returncode}"
            raise NotTried(f"a trial broke: {last}")
        found = pickle.loads((folder / REPLY).read_bytes())
    if isinstance(found, HalotileError):
        raise found
    assert isinstance(found, Tuned)
    return found


def _error_in(said: str) -> str:
    r"""The line of a traceback that names its error: what CUDA adds after it says nothing.

    Examples
    --------
    >>> _error_in("Traceback ...\nRuntimeError: CUDA error: misaligned address\nCompile with `TORCH_USE_CUDA_DSA` ...\n")
    'RuntimeError: CUDA error: misaligned address'
    """
    named = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*", said, re.MULTILINE)
    lines = said.strip().splitlines()
    return str(named[-1]) if named else lines[-1] if lines else ""


def answer(folder: str) -> None:
    """What the process does: read a request from a folder, and write what was found beside it."""
    search_path, import_folder, requested = pickle.loads((Path(folder) / REQUEST).read_bytes())
    sys.path[:] = search_path
    allow_memory(None)  # what a GPU's driver needs is not known
    import halotile.graphs.runs.worker_setup  # noqa: F401 - a worker's memory is measured, with all that it imports
    from halotile.tasks.devices.device import prepare_process
    from halotile.tasks.options import import_from
    from halotile.tasks.trials.gpu_trial import tune

    import_from(import_folder)
    prepare_process(threads=1)
    found: Tuned | HalotileError
    try:
        found = tune(*pickle.loads(requested))
    except HalotileError as error:
        found = error
    (Path(folder) / REPLY).write_bytes(pickle.dumps(found))
