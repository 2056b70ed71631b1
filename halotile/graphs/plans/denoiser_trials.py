"""What planning finds out about a denoiser by running it: its code, how far it looks, whether its tiles give the whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.clusters.workers.bounded_call import NoAnswer, call_bounded
from halotile.graphs.clusters.workers.fork_server import ensure_forks
from halotile.graphs.jobs.sections import Run, Tile, parse_bytes
from halotile.graphs.plans.receptive_field import DIFFER, Reach, rehearsed, resolve_reach
from halotile.graphs.waiting import Report, report_if_slow
from halotile.storage.cache import read_cached, write_cached
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.devices.device import is_out_of_memory, torch_threads
from halotile.tasks.devices.memory_limits import no_more_than_free
from halotile.tasks.noise.draws import RandomImage
from halotile.tasks.trials.bits import ReferenceFailed, tile_difference
from halotile.tasks.trials.probe import check_user_code
from halotile.tasks.trials.provenance import build_digest
from halotile.tasks.trials.user_code import loaded_code

T = TypeVar("T")
MOST_THREADS = 4
"""Windows on trial are small."""
UNCOMPARED = "tiles were not compared with larger windows"


class CodeEnded(ConfigError):
    """The code that was tried ended its process."""


class Tried(NamedTuple):
    """What was found out about a denoiser."""

    code: Mapping[str, str]
    """Digests of the user's own code, by its name."""
    reach: Reach


def expect_trial(denoiser: Denoiser | None) -> None:
    """Let what a trial imports be imported, while other things are planned."""
    if denoiser is not None and denoiser.tried_apart:
        ensure_forks()


def tried(
    denoiser: Denoiser,
    tile: Tile,
    image: tuple[int, ...],
    previous: Mapping[str, Any] | None,
    *,
    run: Run,
    report: Report,
) -> Tried:
    """Check a denoiser, and try what it does not declare; a network of the user's own in a process with a worker's memory.

    Parameters
    ----------
    denoiser : Denoiser
        Told the noise level.
    tile : Tile
        What the job says of tiles.
    image : tuple of int
        Lengths of the tiled axes.
    previous : mapping, optional
        The plan of the run that goes on: what was found then is kept.

    Raises
    ------
    ConfigError, WeightsError
        When it cannot be tiled, or not be built.
    MemoryRefused
        When it takes more memory than a worker has.
    """
    begun = previous["identity"] if previous else None
    call = partial(_tried, denoiser, tile, image, begun and begun.get("probed"), is_new=previous is None)
    if not denoiser.tried_apart:
        with no_more_than_free():
            return call()
    with report_if_slow(report, f"trying {denoiser.title} on small images, in tiles and whole"):
        return bounded(call, denoiser.title, run)


def compared(
    reach: Reach,
    task: DenoiseTask | None,
    tile: Tile,
    previous: Mapping[str, Any] | None,
    *,
    run: Run,
    report: Report,
) -> Reach:
    """The reach after tiles of the job's own sizes were compared with larger windows, for a new run of a network on the CPU.

    A run that goes on keeps what was found when it began. Where that fails, for a worker's memory or otherwise, a note says so: the job itself may do well.
    """
    if task is None:
        return reach
    if previous is not None:
        found_then = (note for note in previous["summary"].get("notes", ()) if note.startswith(DIFFER))
        return replace(reach, notes=(*reach.notes, *found_then))
    if tile.seams == "allow" or not task.denoiser.convolutional or task.device != "cpu":
        return reach
    sizes = replace(task, source=RandomImage(task.grid.shape, np.dtype("float32"), 0), sides={})
    title = task.denoiser.title
    with report_if_slow(report, f"comparing tiles of {title} with larger windows"):
        for at_once in (True, False):
            try:
                found = bounded(partial(_difference, sizes, at_once=at_once), title, run)
            except (MemoryRefused, CodeEnded, ReferenceFailed) as error:
                note = f"{UNCOMPARED}: {error}"
            else:
                return replace(reach, difference=max(found, reach.difference))
    return replace(reach, notes=(*reach.notes, note))


def bounded(call: Callable[[], T], title: str, run: Run) -> T:
    """The result of a call of somebody's code, in a process with a worker's memory.

    Raises
    ------
    MemoryRefused
        When the code takes more than that.
    ConfigError
        When it ends its process.
    """
    limit_bytes = parse_bytes(run.memory_per_worker)
    try:
        return call_bounded(partial(_told, call), limit_bytes)
    except MemoryError as error:
        raise _refusal(title, limit_bytes, "needs more than that to be tried") from error
    except NoAnswer as error:
        if error.code == -signal.SIGKILL:  # as the kernel does where memory runs out
            raise _refusal(title, limit_bytes, f"{error} while it was tried") from None
        # A library also ends the process where it gets no memory for its threads.
        raise CodeEnded(
            f"{title} {error} while it was tried. Correct the code that ends it; or write more memory, if that was short: "
            f"run.memory_per_worker is {bytes_text(limit_bytes)}."
        ) from None


def _told(call: Callable[[], T]) -> T:
    """Turn any library's word for memory that ran out into one that leaves this process."""
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryRefused from error
        raise


def _difference(task: DenoiseTask, *, at_once: bool) -> float:
    question = (task.grid, task.rim, task.roles, task.tiling, task.channels_last)
    origin = build_digest(task.denoiser, "bits", *question)
    if origin is not None and (known := read_cached(origin)) is not None:
        return float(known)
    loaded = loaded_code()
    found = tile_difference(task, at_once=at_once)
    if origin is not None and loaded_code() == loaded:
        write_cached(origin, found)
    return found


def _tried(
    denoiser: Denoiser,
    tile: Tile,
    image: tuple[int, ...],
    probed: list[int] | None,
    *,
    is_new: bool,
) -> Tried:
    code = denoiser.check()
    if not denoiser.tried_apart:
        return Tried(code, _reach(denoiser, tile, image, probed, code, is_new))
    # What is imported only while it runs is not in the key: nothing is kept of it.
    loaded = loaded_code()
    origin = build_digest(denoiser, code, tile.depth, tile.seams, image, probed, is_new)
    if origin is not None and (known := read_cached(origin)) is not None:
        return Tried(code, Reach.from_json(known))
    with torch_threads(min(cores_here(), MOST_THREADS)):
        reach = _reach(denoiser, tile, image, probed, code, is_new)
    if origin is not None and loaded_code() == loaded:
        write_cached(origin, asdict(reach))
    return Tried(code, reach)


def _reach(
    denoiser: Denoiser,
    tile: Tile,
    image: tuple[int, ...],
    probed: list[int] | None,
    code: Mapping[str, str],
    is_new: bool,
) -> Reach:
    if code:
        check_user_code(denoiser, len(image))
    known = (probed[0], probed[1]) if probed else None
    reach = resolve_reach(tile, denoiser, len(image), known)
    return rehearsed(tile, denoiser, reach, image) if code and is_new else reach


def _refusal(title: str, limit_bytes: int, how: str) -> MemoryRefused:
    return MemoryRefused(
        f"run.memory_per_worker is {bytes_text(limit_bytes)}, and {title} {how}. Write more memory, if it needs "
        "that; otherwise correct it."
    )
