"""The plan of a ptychographic reconstruction: how its scan fits into the memory of workers and their GPUs; and its passes, stages of epochs and the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.graphs.iterations.rank_programs import ProgramFiles, ProgramWork
from halotile.graphs.jobs.ptychography.job import LIKELIHOOD, Ptychography, StageOptions, result_rows
from halotile.graphs.kinds.base import Inspection, Need, OutputFile, OutputState, Planned, PlanRequest, RunView, kind_of
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.choices import allow_imports, check_decoding, check_paths
from halotile.graphs.plans.identity import as_stored, code_versions, fingerprint
from halotile.graphs.plans.needs import IMPORTS_BYTES, MIB, PROCESS
from halotile.graphs.plans.plan import place_ranks
from halotile.graphs.words import counted
from halotile.storage.grid import Region
from halotile.storage.lengths import shown_length
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.scans.scan import StartValues, open_scan, open_summary, worst_patterns
from halotile.storage.sharded.output import FileLayout
from halotile.storage.spacing import signed_metres
from halotile.tasks.block import ONE_BLOCK
from halotile.tasks.ptychography.recipe import (
    PROGRAM,
    SOLVER_TRAITS,
    VARYING,
    Optics,
    ScanRecipe,
    SolverStage,
    checkpoints_of,
    stages_begun,
)
from halotile.tasks.ptychography.result import covered
from halotile.tasks.user_code import imported_digest

COMPLEX = 8  # bytes of a number
OBJECTS = 4  # copies of the object at once: itself, its gradient, and two while a step is made; a solver keeps more
LOADED_COPIES = 3  # copies of a checkpoint while ranks get it from the one that reads it
# Checkpoints on the disk at once: the newest, the two that may be returned to, and one while it is written; and those
# of the stage before.
FILES, FILES_OF_STAGE = 4, 2
# The same of each slot, whose patterns may see all of it: its gradient, and two while ranks exchange it.
SLOT_OBJECTS = 3
FEW_COUNTS = 0.5  # mean of a pixel below which most have no count
HELD_OUT = 0.05  # share of the pixels that are held out where counts are few
SOME_POSITIONS = 1000  # approximate number of positions whose nearest neighbours are found
FARTHEST = 10**9  # sizes of a pattern beyond which all positions are as far away
MOST_HELD = 100  # epochs, at most, in which positions are held unless the job says how many
SMALLER = "a smaller batch, fewer modes, or a larger pixel (recon-cli convert --bin 2)"


def plan_ptychography(job: Ptychography, state: OutputState, request: PlanRequest) -> Planned:
    """Decide the size of the object and the memory of the workers."""
    placement = place_ranks(job, job.slots)
    job = placement.job
    recipe = recipe_of(job)
    scan, patterns, model = recipe.scan, recipe.patterns, job.model
    check_paths(patterns.path, state.output)
    if job.input.start is not None:
        check_paths(job.input.start, state.output)
    check_decoding((patterns,), job.run)
    count, pattern = len(scan.positions), recipe.pattern
    if count < job.run.count:
        raise ConfigError(
            f"the scan has {counted(count, 'pattern')}, too few for {counted(job.run.count, 'worker')}. Write run.workers: {count}, or fewer."
        )
    object_bytes = COMPLEX * math.prod(recipe.shape)
    modes = model.modes + model.variations
    small = (
        COMPLEX * (math.prod(recipe.frame) * (modes + 1) + 5 * math.prod(pattern))
        + (160 + 4 * model.variations) * count
    )
    output = OutputFile(
        Path(str(state.output)), FileLayout(object_bytes + small + MIB), ONE_BLOCK, job.output.overwrite
    )
    sent = SentRecipe.from_recipe(recipe, job.input.start)
    identity = as_stored(_identity(job, recipe, sent, placement.device))
    digest = fingerprint(identity, without=kind_of(job).revision)
    checkpoints = FILES + (FILES_OF_STAGE if len(recipe.stages) > 1 else 0)
    return Planned(
        placement=placement,
        work=PtychographyWork(sent.recipe, output, placement.device, sent.digests, digest, recipe.shape),
        sources=(patterns,),
        identity=identity,
        needs=(_need(recipe),),
        smaller=SMALLER,
        scratch_bytes=checkpoints * (1 + _kept_objects(recipe)) * len(recipe.halves) * (object_bytes + small),
        decided={"window": recipe.window},
        figures=_figures(job, recipe),
        notes=tuple(text for label, text in scan.remarks if label == "note"),
        notes_of_resumed=partial(note_of_stages, state, digest, identity),
    )


def recipe_of(job: Ptychography) -> ScanRecipe:
    """Open the scan of a job; return what has to be done."""
    if job.model.import_ is not None:
        allow_imports("model", {"import": job.model.import_}, job)
    scan, patterns = open_scan(job.input.path)
    _, rows, columns = patterns.shape
    model = job.model
    focus = None if model.focus is None else signed_metres(model.focus)
    if scan.angles and model.field == "near":
        raise ConfigError(
            "the scan gives its pixels as angles, without the distance of the detector that a near field needs. Convert it again with --distance, and with --pixel as a length."
        )
    optics = Optics.from_scan(scan, (rows, columns), model.field, focus)
    margin = max(4, max(rows, columns) // 10) if model.margin == "auto" else model.margin
    refined = (*model.refine, *(VARYING if model.variations else ()))
    moves = "positions" in refined and job.input.start is None and model.import_ is None
    recipe = ScanRecipe(scan, patterns, optics, model.loss, model.modes, refined, (), job.slots, job.seed, margin)
    few = (mean_count(job.input.path) or FEW_COUNTS) < FEW_COUNTS
    usual = HELD_OUT if few and model.import_ is None else 0.0
    recipe = replace(
        recipe,
        few_counts=few,
        held_out=usual if job.held_out == "auto" else job.held_out,
        support=model.support,
        variations=model.variations,
        oversampling=model.oversampling,
        resolution=job.resolution,
        module=model.import_,
        module_options=model.options,
        import_folder=job.import_folder,
    )
    stages = tuple(stage_of(stage, recipe, holds=moves and n == 0) for n, stage in enumerate(job.stages))
    recipe = replace(recipe, stages=stages)
    _check_overlap(recipe)
    recipe = replace(recipe, window=_window(job, recipe), start=_start(job, recipe))
    if optics.focus and recipe.first_probe is not None:
        raise ConfigError(
            "model.focus is for a probe that is guessed, but the scan or input.start has a probe. Leave model.focus out."
        )
    check_used(recipe)
    return recipe


def _check_overlap(recipe: ScanRecipe) -> None:
    """Refuse positions whose patterns coincide or do not overlap: they are usually in another unit."""
    from scipy.spatial import KDTree

    pixels = recipe.scan.positions / recipe.optics.pixel
    if len(pixels) < 2 or recipe.module:
        return
    span, (rows, columns) = np.ptp(pixels, axis=0), recipe.frame
    remedy = "Are the positions in metres? Convert the scan with --position-unit, or correct them in the file."
    if span.max() < 1:
        raise ConfigError(
            f"the positions span only {span.max():.2g} pixels of the object, and a pixel is {shown_length(recipe.optics.pixel[0])}. {remedy}"
        )
    in_patterns = np.divide(pixels, (rows, columns), out=pixels)  # one array for both: there may be millions
    some = in_patterns[:: 1 + len(pixels) // SOME_POSITIONS]
    distance = np.median(KDTree(in_patterns).query(some, 2, p=np.inf)[0][:, 1])
    if distance >= 1:
        raise ConfigError(
            f"a pattern sees {rows} × {columns} pixels of the object, and its nearest neighbour is {distance:.3g} times as far away: they do not overlap. {remedy}"
        )
    _check_strays(recipe, in_patterns)


def _check_strays(recipe: ScanRecipe, in_patterns: NDArray[np.float64]) -> None:
    """Refuse a position, in sizes of a pattern, far from all others, which would make the object as large as the way to it."""
    from scipy.spatial import KDTree

    # One number for each cell of the size of a pattern.
    cells = np.clip(np.floor(in_patterns - in_patterns.min(axis=0)), 0, FARTHEST).astype(np.int64)
    keys = cells[:, 0] * (FARTHEST + 1) + cells[:, 1]
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    if len(first) == 1:
        return
    occupied = cells[first]
    alone = (counts == 1) & (KDTree(occupied).query(occupied, 2, p=np.inf)[0][:, 1] > 1)
    if alone.any():
        stray = int(first[alone].min())
        away = recipe.scan.positions[stray] - np.median(recipe.scan.positions, axis=0)
        place = " and ".join(shown_length(abs(length)) for length in away)
        raise ConfigError(
            f"pattern {recipe.scan.numbers[stray]} overlaps no other: along rows and columns it is {place} from the middle of the scan. Correct its position in the file, or remove it there."
        )


def _start(job: Ptychography, recipe: ScanRecipe) -> StartValues | None:
    if job.input.start is None:
        return None
    start = StartValues.read(job.input.start)
    count = len(recipe.scan.positions)
    shapes: dict[str, tuple[int, ...]] = {"object": recipe.shape, "probe": recipe.frame, "background": recipe.pattern}
    shapes |= {"first_pixel": (count, 2), "amplitude": (count,)}
    if recipe.variations:
        shapes |= {"variations": (recipe.variations, *recipe.frame), "shares": (count, recipe.variations)}
    start.check(job.input.start, shapes)
    return start


def check_used(recipe: ScanRecipe) -> None:
    """Refuse patterns that are not there, batches that leave a slot without one, and halves without a resolution."""
    for stage in recipe.stages:
        if recipe.window and stage.batch < recipe.slots:
            raise ConfigError(
                f"a batch is {stage.batch}, and each of the {recipe.slots} slots draws from a window of its own. Write a batch of {recipe.slots} or more, or fewer slots."
            )
        missing: list[int] = np.setdiff1d(stage.subset, recipe.scan.numbers).tolist() if stage.subset else []
        if missing or stage.subset == ():
            raise ConfigError(
                f"subset names {missing[0] if missing else 'no pattern'}, but the scan has patterns with numbers up to {recipe.scan.numbers.max()}, except those that were left out. Write some of these."
            )
    if recipe.resolution:
        covered(recipe)
        if not all(recipe.used(epoch, half).any() for epoch in _stage_begins(recipe) for half in (0, 1)):
            raise ConfigError(
                "a resolution needs two halves, every second position each, and a stage uses no pattern of one. Write resolution: false, or a larger subset."
            )
    if recipe.window:
        least = min(len(np.unique(np.flatnonzero(recipe.used(n)) // recipe.chunk)) for n in _stage_begins(recipe))
        if least < recipe.slots:
            raise ConfigError(
                f"a stage uses {counted(least, 'chunk')} of patterns, and each of the {recipe.slots} slots draws from chunks of its own: steps would have fewer patterns than batch. Write window: 0 where all patterns fit into memory, or slots: {least}."
            )


def _stage_begins(recipe: ScanRecipe) -> list[int]:
    """The first epoch of each stage."""
    return list(itertools.accumulate((stage.epochs for stage in recipe.stages[:-1]), initial=0))


def stage_of(options: StageOptions, recipe: ScanRecipe, *, holds: bool) -> SolverStage:
    """Return a stage of a reconstruction as ranks take it; auto, one that ``holds`` positions does so at its beginning."""
    usual = SOLVER_TRAITS[options.solver]
    rate = usual.rate if options.lr == "auto" else options.lr
    if options.lr == "auto" and recipe.loss == "poisson_nll":
        # Held-out pixels decide before the noise of few counts is fitted: steps may be as large as usual.
        rate = rate if recipe.few_counts and recipe.held_out else usual.of_likelihood or rate
    elif options.lr == "auto" and recipe.few_counts:
        rate = usual.of_few or rate
    batch = (usual.batch or len(recipe.scan.positions)) if options.batch == "auto" else options.batch
    held = options.hold_positions
    if held == "auto":
        held = min(options.epochs // 2, MOST_HELD) if holds and "positions" not in options.lr_factors else 0
    decided = replace(options, lr=rate, batch=batch, hold_positions=held)
    return SolverStage(**asdict(decided))


def _window(job: Ptychography, recipe: ScanRecipe) -> int:
    """Decide how many patterns a slot draws from at a time: the same for any number of workers."""
    count = len(recipe.scan.positions)
    if job.window != "auto":
        window = -(-job.window // recipe.chunk) * recipe.chunk
    else:
        free = parse_bytes(job.run.memory_per_worker) - _fixed_bytes(recipe)
        kept = count if free < 0 else free // _pattern_bytes(recipe)  # too little for the object is said later
        if kept >= count:
            return 0
        # The window of each slot and the next one, and one more chunk of each, were they all on one worker.
        window = max(1, (kept // (recipe.slots * recipe.chunk) - 1) // 2) * recipe.chunk
    return window


def _pattern_bytes(recipe: ScanRecipe) -> int:
    return math.prod(recipe.pattern) * recipe.patterns.dtype.itemsize


def _fixed_bytes(recipe: ScanRecipe) -> int:
    """Memory of a rank without its patterns: copies of the object, and the waves of a slot."""
    batch = max(min(recipe.at_once, -(-stage.batch // recipe.slots)) for stage in recipe.stages)
    return IMPORTS_BYTES + _object_bytes(recipe) + batch * recipe.wave_bytes


def _object_bytes(recipe: ScanRecipe) -> int:
    """Memory of all copies of the object; the same for any number of workers, since the window follows from it."""
    kept = _kept_objects(recipe)
    halves = (1 + kept) * (len(recipe.halves) - 1)
    slots = SLOT_OBJECTS * recipe.slots
    loading = LOADED_COPIES * (1 + kept) * len(recipe.halves)
    return max(loading, OBJECTS + kept + halves + slots) * COMPLEX * math.prod(recipe.shape)


def _kept_objects(recipe: ScanRecipe) -> int:
    """Copies of the object that solvers keep: those of an earlier stage stay."""
    of_solvers = sum(SOLVER_TRAITS[solver].objects for solver in {stage.solver for stage in recipe.stages})
    return of_solvers + (recipe.held_out > 0)


def _need(recipe: ScanRecipe) -> Need:
    """Return the memory of a rank."""
    count = len(recipe.scan.positions)
    kept = count
    if recipe.window:
        kept = min(count, recipe.slots * (2 * recipe.window + recipe.chunk))
    objects = _object_bytes(recipe)
    parts = {
        PROCESS: IMPORTS_BYTES,
        "the object with its gradient and moments": objects,
        "the waves": _fixed_bytes(recipe) - IMPORTS_BYTES - objects,
        "the patterns": kept * _pattern_bytes(recipe),
    }
    what = f"an object of {recipe.shape[0]} × {recipe.shape[1]} and {counted(kept, 'pattern')} on each worker"
    return Need(what, parts, SMALLER)


def _figures(job: Ptychography, recipe: ScanRecipe) -> dict[str, Any]:
    return {
        "input": job.input.path,
        "positions": len(recipe.scan.positions),
        "pattern": list(recipe.pattern),
        "object": list(recipe.shape),
        "pixel": list(recipe.optics.pixel),
        "field": recipe.optics.field,
        "focus": job.model.focus,
        "modes": recipe.modes,
        "loss": recipe.loss,
        "refine": ["all parameters"] if recipe.module else list(recipe.refined),
        "module": recipe.module,
        "window": recipe.window,
        "epochs": recipe.epochs,
        "held_out": recipe.held_out,
        "resolution": recipe.resolution,
        "stages": [_stage_text(stage) for stage in recipe.stages],
    }


def _stage_text(stage: SolverStage) -> str:
    text = (
        f"{counted(stage.epochs, 'epoch')} of {stage.solver}, lr {stage.lr:g}, {counted(stage.batch, 'pattern')} a step"
    )
    return f"{text}, positions held for {stage.hold_positions}" if stage.hold_positions else text


def _identity(job: Ptychography, recipe: ScanRecipe, sent: SentRecipe, device: str) -> dict[str, Any]:
    """Return everything that can change a bit of the result."""
    scan, start = (*sent.digests.values(), None)[:2]
    return {
        "patterns": recipe.patterns.fingerprint(),
        "scan": scan,
        "start": start,
        "model": asdict(job.model),
        "module": recipe.module and imported_digest(recipe.module, None),
        "margin": recipe.margin,
        "stages": [asdict(stage) for stage in recipe.stages],
        "slots": job.slots,
        "held_out": recipe.held_out,
        "window": recipe.window,
        "seed": job.seed,
        "resolution": job.resolution,
        "device": device,
        "program": PROGRAM,
        "code": code_versions(),
    }


def kept_stages(directory: RunDirectory, digest: str, identity: Mapping[str, Any]) -> int:
    """Return the number of stages, the first ones, of whose last one a run without a result has a checkpoint."""
    checkpoint = ProgramFiles.from_run(directory, digest).checkpoint
    kept = stages_begun(checkpoints_of(checkpoint, identity["stages"]))
    return 0 if kept and _has_result(directory) else kept


def _has_result(directory: RunDirectory) -> bool:
    """Return True where the result was written; whoever was killed then had no time to say so."""
    with suppress(FileNotFoundError, DamagedData):
        if Journal.open_any(directory.journal_path).done:
            return True
    outputs = (directory.read_valid_plan() or {}).get("outputs", [])
    paths = (Path(output["path"]) for output in outputs)
    return any(path.is_file() and path.stat().st_size > 0 for path in paths)


def note_of_stages(state: OutputState, digest: str, identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where an earlier run goes on with other stages."""
    if state.previous is None or state.previous["identity"]["stages"] == identity["stages"]:
        return ()
    kept = counted(kept_stages(state.directory, digest, identity), "stage")
    return (f"stages are not those of the earlier run: it goes on from what that computed of the first {kept}",)


@dataclass(frozen=True)
class PtychographyWork(ProgramWork):
    """A reconstruction, and the file of its result."""

    # without the arrays of the scan and of the start: the driver does not need them any more
    recipe: ScanRecipe
    digests: Mapping[str, str]  # those of the arrays, by their files
    digest: str  # that of the job without its stages
    shape: tuple[int, int]  # shape of the object
    phase = "reconstruct"
    word = "epoch"
    titles = (" while the object was reconstructed", " while the result was written")

    @property
    def steps(self) -> int:
        """Number of epochs."""
        return self.recipe.epochs

    def files(self, at: RunView) -> ProgramFiles:
        """Return the files of a run, whatever its stages."""
        return ProgramFiles.from_run(at.directory, self.digest)

    def in_files(self, files: ProgramFiles, drawing: Path) -> ScanRecipe:
        return replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, drawing=drawing)

    def end_of(self, recipe: ScanRecipe) -> Path:
        """Return the checkpoint of the last stage."""
        return recipe.checkpoints[-1]

    def most_kept(self, recipe: ScanRecipe) -> int:
        """Return the number of epochs up to the end of the newest checkpoint's stage."""
        return sum(stage.epochs for stage in recipe.stages[: stages_begun(recipe.checkpoints)])

    def program(self, recipe: ScanRecipe) -> Callable[[Any], None]:
        """Return the program of a rank."""
        return SentRecipe(recipe, self.digests).program

    def encode(self, recipe: ScanRecipe) -> Callable[[], bytes]:
        """Return a function that encodes the result."""
        return partial(_encode, SentRecipe(recipe, self.digests))

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> Inspection:
        """Return the last figures of the curve."""
        last, drawing = self.last_row()
        figures: dict[str, Any] = {
            name: value
            for name, value in last.items()
            if name in ("loss", "kept", "loss_of_kept", "resolution", "resolution_bound", "loss_of_halves")
        }
        with suppress(InputError, OSError, KeyError):  # the result may be elsewhere by now
            figures |= worst_patterns(str(self.output.path))
        noise, recipe = None, self.recipe
        if recipe.loss in ("amplitude_mse", LIKELIHOOD):
            noise = photon_loss_of(str(Path(recipe.patterns.path).parent))
        counted = math.prod(recipe.patterns.shape)
        free = 2 * (math.prod(self.shape) + recipe.modes * math.prod(recipe.frame)) / counted
        return Inspection(figures, result_rows(last | figures, drawing, recipe.loss, noise, min(free, 0.5)))


@dataclass(frozen=True)
class SentRecipe:
    """A recipe on its way to a worker, which reads positions, mask, a start and the like from their files: they may be more than a message should be."""

    recipe: ScanRecipe  # with a scan that has nothing but its geometry
    # digest of the whole scan, and that of the values to begin with, by their paths
    digests: Mapping[str, str]

    @classmethod
    def from_recipe(cls, recipe: ScanRecipe, start: str | None = None) -> SentRecipe:
        """Leave out what is read again; ``start`` is the file of the values to begin with."""
        scan = recipe.scan
        digests = {str(Path(recipe.patterns.path).parent): scan.digest()}
        if start is not None and recipe.start is not None:
            digests[start] = recipe.start.digest()
        return cls(replace(recipe, scan=scan.without_arrays(), start=None), digests)

    def opened(self) -> ScanRecipe:
        """Return the whole recipe, without what it begins with once it has begun."""
        (scan_path, *start_paths) = self.digests
        scan, _ = open_scan(scan_path)
        begins = start_paths and not self.recipe.newest_checkpoint
        start = StartValues.read(start_paths[0]) if begins else None
        for path, values in zip(self.digests, (scan, start), strict=False):
            if values is not None and values.digest() != self.digests[path]:
                raise InputError(
                    f"{path} has changed since it was opened. Restore the original file, or start over (a run with --fresh)."
                )
        return replace(self.recipe, scan=scan, start=start)

    @property
    def program(self) -> Callable[[Any], None]:
        """The program of a rank."""
        return partial(_reconstruct, self)


def program_of(recipe: ScanRecipe) -> Callable[[Any], None]:
    """Return the program of a rank that begins with a checkpoint."""
    return SentRecipe.from_recipe(recipe).program


def _reconstruct(sent: SentRecipe, group: Any) -> None:
    """Reconstruct on one rank; only workers load torch."""
    from halotile.tasks.ptychography.program import refinement_of

    refinement_of(sent.opened(), group).run()


def _encode(sent: SentRecipe) -> bytes:
    """Encode the result; only workers load torch."""
    from halotile.tasks.ptychography.result import encoded_result

    return encoded_result(sent.opened())


# Mean counts between which it is summed over numbers of photons; of fewer it is twice their mean, of more it is LIMIT.
FEWEST, MANY = 1e-6, 100.0
LIMIT = 0.25
SHAPES = (0.05, 1e6)  # smallest and largest shape of the gamma distributions
PARTS = 8  # parts of a distribution, each with its mean count
SOME_BYTES = 2**27  # most bytes of patterns that are read to examine their counts


def photon_loss(mean: NDArray[np.floating]) -> float:
    """Return the mean squared difference between roots of counts and the roots of their means.

    >>> round(photon_loss(np.array([1e-8])), 9), round(photon_loss(np.array([1.0])), 3), photon_loss(np.array([1e6]))
    (2e-08, 0.453, 0.25)
    """
    from scipy.special import gammaln

    means, counts = np.geomspace(FEWEST, MANY, 200), np.arange(300)
    chances = np.exp(counts * np.log(means)[:, None] - means[:, None] - gammaln(counts + 1))
    losses = 2 * (means - np.sqrt(means) * (chances @ np.sqrt(counts)))
    known = np.interp(np.log(np.maximum(mean, FEWEST)), np.log(means), losses, right=LIMIT)
    return float(np.where(mean < FEWEST, 2 * mean, known).mean(dtype=np.float64))


def photon_loss_of_varying(mean: NDArray[np.floating], variance: NDArray[np.floating]) -> float:
    """Return the photon loss of pixels whose mean varies from pattern to pattern, by a gamma distribution.

    ``mean, variance``: of the counts of each pixel over all patterns: beyond the mean, the variance is that of the pixel's means.
    """
    from scipy.stats import gamma

    shapes = np.geomspace(*SHAPES, 100)
    factors = gamma.ppf((np.arange(PARTS)[:, None] + 0.5) / PARTS, shapes) / shapes
    beyond = np.maximum(variance - mean, mean**2 / SHAPES[1] + FEWEST**2)
    at = np.log(np.clip(mean**2 / beyond, *SHAPES))
    losses = [photon_loss(mean * np.interp(at, np.log(shapes), each)) for each in factors / factors.mean(0)]
    return float(np.mean(losses))


def mean_count(path: str) -> float | None:
    """Return the mean count of a pixel of a scan; None where patterns are no counts, or not there any more."""
    with suppress(Exception):  # what is damaged is found when it is needed
        scan, _ = open_scan(path)
        mean, most = open_summary(path)
        if np.array_equal(most, np.rint(most)):
            return float(mean[... if scan.mask is None else scan.mask].mean())
    return None


def photon_loss_of(path: str) -> float | None:
    """Estimate the photon loss of a scan from a sample of its patterns; None as in :func:`mean_count`."""
    if mean_count(path) is None:
        return None
    with suppress(Exception):  # it is no part of the result
        scan, patterns = open_scan(path)
        count, *pattern = patterns.shape
        most = max(1, SOME_BYTES // (8 * math.prod(pattern)))
        some = np.linspace(0, count - 1, min(count, most)).astype(int)
        read = [patterns.read(Region((n, 0, 0), (n + 1, *pattern)))[0] for n in some.tolist()]
        counts = np.asarray(read, np.float32)[:, ... if scan.mask is None else scan.mask]
        return photon_loss_of_varying(counts.mean(0), counts.var(0))
    return None
