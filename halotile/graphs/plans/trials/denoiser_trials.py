"""Trials of a denoiser while planning: its code, its receptive field, and whether its tiles give the whole image."""

import hashlib
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.clusters.workers.fork_server import NoAnswer, call_bounded, ensure_forks
from halotile.graphs.kinds.sections import Run, Tile, TiledJob, parse_bytes
from halotile.graphs.plans.cutting import DIFFER, Halo, is_cut_at_edge, rehearsed, resolve_halo
from halotile.graphs.waiting import Report, report_if_slow
from halotile.graphs.words import bytes_text
from halotile.storage.cache import read_cached, write_cached
from halotile.storage.grid import Depth
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import ROUNDING, Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.devices.device import is_out_of_memory, torch_threads
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.trials import rehearsal
from halotile.tasks.trials.probe import check_user_code
from halotile.tasks.trials.provenance import build_digest, is_own, opened_files, surroundings
from halotile.tasks.trials.trial import Sample, sides_as_channels
from halotile.tasks.user_code import loaded_code

T = TypeVar("T")
MOST_THREADS = 4  # threads of a trial: its windows are small
UNCOMPARED = "tiles were not compared with larger windows"
UNTRIED = "tiles were not compared on parts of the image"
SAMPLE_SECONDS = 60.0  # longest time that a trial on parts of the image may take


# Seconds that are left for trials; None: no limit.
_left: ContextVar[list[float] | None] = ContextVar("trial_seconds", default=None)


class TrialTooLong(Exception):
    """A trial was ended by the limit of :func:`trials_within`."""


@contextmanager
def trials_within(seconds: float) -> Iterator[None]:
    """Limit the trials of all plans in this context to so many seconds together; the one that exceeds them raises TrialTooLong."""
    token = _left.set([seconds])
    try:
        yield
    finally:
        _left.reset(token)


class CodeEnded(ConfigError):
    """The code that was tried ended its process."""


class DenoiserTrial(NamedTuple):
    """Results of the trial of a denoiser."""

    code: Mapping[str, str]  # digests of the user's own code, by its name
    halo: Halo


def expect_trial(denoiser: Denoiser | None) -> None:
    """Start importing the modules that a trial needs, while other parts are planned."""
    if denoiser is not None and denoiser.tried_apart:
        ensure_forks()


def try_denoiser(
    denoiser: Denoiser,  # denoiser, with the noise level set
    tile: Tile,  # tile section of the job
    image: tuple[int, ...],  # lengths of the tiled axes
    previous: Mapping[str, Any] | None,  # plan of the run that is resumed: its results are kept
    *,
    run: Run,
    report: Report,
    sides: Collection[str] = (),  # names of the side inputs of the job
) -> DenoiserTrial:
    """Check a denoiser, and try what it does not declare; a user's own code in a process with a worker's memory."""
    before = previous["identity"] if previous else None
    on_trial = sides_as_channels(denoiser, sides)
    call = partial(_try_code, on_trial, tile, image, before and before.get("probed"), is_new=previous is None)
    if not denoiser.tried_apart:
        return call()
    with report_if_slow(report, f"trying {denoiser.title} on small images, in tiles and whole"):
        return bounded(call, denoiser.title, run)


def compare_tiles(
    halo: Halo, task: DenoiseTask | None, job: TiledJob, previous: Mapping[str, Any] | None, report: Report
) -> Halo:
    """Compare tiles of a new job's own sizes with larger windows, for a network on the CPU; return the halo.

    A resumed run keeps the result that it began with. Where the comparison fails, for a worker's memory or
    otherwise, a note reports it: the job itself may succeed.
    """
    if task is None:
        return halo
    if previous is not None:
        notes_then = previous["summary"].get("notes", ())
        kept = (note for note in notes_then if note.startswith((DIFFER, UNCOMPARED, UNTRIED)))
        return replace(halo, notes=(*halo.notes, *kept))
    if job.tile.seams == "allow" or not task.denoiser.convolutional or task.device != "cpu":
        return halo
    title = task.denoiser.title
    on_trial = sides_as_channels(task.denoiser, task.sides)
    sizes = replace(task, denoiser=on_trial, source=RandomImage(task.grid.shape, np.dtype("float32"), 0), sides={})
    with report_if_slow(report, f"comparing tiles of {title} with larger windows"):
        known = _known(on_trial, _question_of_bits(sizes))
        for at_once in (True, False):
            try:
                measure = partial(_measure_difference, sizes, at_once=at_once)
                difference = bounded(measure, title, job.run) if known is None else known
            except (MemoryRefused, CodeEnded, rehearsal.ReferenceFailed) as error:
                note = f"{UNCOMPARED}: {error}"
                continue
            found = rehearsal.Rehearsal(task.denoiser.alignment, difference)
            if halo.probed is not None and not found.agrees:
                raise rehearsal.tiling_error(task.denoiser, found, task.tiling.image)
            return replace(halo, difference=max(difference, halo.difference))
    return replace(halo, notes=(*halo.notes, note))


def compared_on_image(
    halo: Halo, denoiser: Denoiser, choose: Callable[[], list[Sample]], job: TiledJob, report: Report, sides: list[str]
) -> Halo:
    """Compare tiles of a user's code with larger parts of the image itself; return the halo.

    ``denoiser``: with its known alignment; ``choose``: reads the samples of the image; ``sides``: names of the side inputs of the job.
    """
    is_cut, title = is_cut_at_edge(job.tile, denoiser), denoiser.title
    with report_if_slow(report, f"trying {title} on parts of the image, in tiles and whole"):
        on_trial = sides_as_channels(denoiser, sides)
        if not (samples := choose()):
            return replace(halo, notes=(*halo.notes, f"{UNTRIED}: they cannot be read, or would be too large"))
        measure = partial(_measure_samples, on_trial, halo.depth, samples, is_cut)
        try:
            difference = bounded(measure, title, job.run, seconds=SAMPLE_SECONDS)
        except (MemoryRefused, CodeEnded, _SampleFailed) as error:
            # A run names the blocks that fail, and does the others.
            return replace(halo, notes=(*halo.notes, f"{UNTRIED}: {error}"))
    is_declared = halo.probed is None and not isinstance(denoiser, ArrayDenoiser)
    if difference > ROUNDING and not is_declared:
        raise rehearsal.sample_error(title, difference, halo.depth)
    return replace(halo, difference=max(difference, halo.difference))


class _SampleFailed(ConfigError):
    """The code fails on a part of the image."""


def _measure_samples(denoiser: Denoiser, depth: Depth, samples: Sequence[Sample], is_cut: bool) -> float:
    pixels = hashlib.sha256(b"".join(sample.tobytes() for sample in samples)).hexdigest()
    question = ("samples", depth, is_cut, pixels, [sample.shape for sample in samples])

    try:
        return _kept(denoiser, question, lambda: rehearsal.sample_difference(denoiser, depth, samples, is_cut=is_cut))
    except ConfigError as error:
        raise _SampleFailed(str(error)) from None


def _known(denoiser: Denoiser, question: Sequence[Any]) -> Any:
    """Return a stored answer about a denoiser of halotile, which takes no process of its own nor torch; None if there is none."""
    origin = build_digest(denoiser, *question) if is_own(denoiser) else None
    return None if origin is None else read_cached(origin)


def _kept(denoiser: Denoiser, question: Sequence[Any], measure: Callable[[], T]) -> T:
    """Return a stored answer, or measure it.

    The answer about foreign code is not cached if code is imported meanwhile, or a file is opened that the denoiser is not built from: neither
    is in the key.
    """
    opened = opened_files()
    origin = build_digest(denoiser, *question)
    if origin is not None and not is_own(denoiser):
        around = surroundings(denoiser, frozenset(opened))
        origin = around and hashlib.sha256(f"{origin} {around}".encode()).hexdigest()
    if origin is not None and (stored := read_cached(origin)) is not None:
        return cast(T, stored)
    loaded, read = loaded_code(), frozenset(opened)
    answer = measure()
    all_in_key = is_own(denoiser) or (loaded_code() == loaded and opened == read)
    if origin is not None and all_in_key:
        write_cached(origin, answer)
    return answer


def bounded(call: Callable[[], T], title: str, run: Run, *, seconds: float | None = None) -> T:
    """Return the result of a call of foreign code, in a process with a worker's memory."""
    limit_bytes, left = parse_bytes(run.memory_per_worker), _left.get()
    try:
        timed = partial(_timed, call, left[0] if left else 0.0)
        result, taken = call_bounded(timed, limit_bytes, seconds)
        if left:
            left[0] = max(left[0] - taken, 0.01)  # 0 would be no limit
        return result
    except MemoryError as error:
        raise _refusal(title, limit_bytes, "needs more than that to be tried") from error
    except NoAnswer as error:
        if error.code == -signal.SIGKILL:  # as the kernel does where memory runs out
            raise _refusal(title, limit_bytes, f"{error} while it was tried") from None
        if left and error.code == -signal.SIGALRM:
            raise TrialTooLong(f"trying {title} takes longer than") from None
        # A library also ends the process where it gets no memory for its threads.
        raise CodeEnded(
            f"{title} {error} while it was tried. Correct the code that ends it; or write more memory, if that was short: "
            f"run.memory_per_worker is {bytes_text(limit_bytes)}."
        ) from None


def _timed(call: Callable[[], T], limit_seconds: float) -> tuple[T, float]:
    """Return the result of a call, and its time; a limit other than 0 ends this process, also where the code holds Python's lock.

    Any library's error for exhausted memory becomes one that can leave this process.
    """
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    try:
        return call(), time.monotonic() - began
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryRefused from error
        raise


def _measure_difference(task: DenoiseTask, *, at_once: bool) -> float:
    return _kept(task.denoiser, _question_of_bits(task), lambda: rehearsal.tile_difference(task, at_once=at_once))


def _question_of_bits(task: DenoiseTask) -> tuple[Any, ...]:
    return ("bits", task.grid, task.rim, task.roles, task.tiling, task.channels_last)


def _try_code(
    denoiser: Denoiser, tile: Tile, image: tuple[int, ...], probed: list[int] | None, *, is_new: bool
) -> DenoiserTrial:
    code = denoiser.check()

    def find_halo() -> Halo:
        if code:
            check_user_code(denoiser, len(image))
        halo = resolve_halo(tile, denoiser, len(image), (probed[0], probed[1]) if probed else None)
        return rehearsed(tile, denoiser, halo, image) if code and is_new else halo

    if not denoiser.tried_apart:
        return DenoiserTrial(code, find_halo())

    def find() -> dict[str, Any]:
        with torch_threads(min(cores_here(), MOST_THREADS)):
            try:
                return {"halo": asdict(find_halo())}
            except ConfigError as error:
                if not _is_verdict(error):
                    raise
                return {"refusal": str(error)}

    question = (code, tile.depth, tile.seams, tile.boundary, image, probed, is_new)
    found = _kept(denoiser, question, find)
    if "refusal" in found:
        raise ConfigError(found["refusal"])
    return DenoiserTrial(code, Halo.from_json(found["halo"]))


def _is_verdict(error: BaseException) -> bool:
    """Return True where the code itself is refused: another exception may have had a cause outside, such as a missing file or memory."""
    origin = error.__cause__ or error.__context__
    return isinstance(error, ConfigError) and (origin is None or _is_verdict(origin))


def _refusal(title: str, limit_bytes: int, how: str) -> MemoryRefused:
    return MemoryRefused(
        f"run.memory_per_worker is {bytes_text(limit_bytes)}, and {title} {how}. Write more memory, if it needs "
        "that; otherwise correct it."
    )
