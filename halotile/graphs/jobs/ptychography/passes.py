"""The passes of a ptychographic reconstruction: the ranks reconstruct, then the result is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.graphs.iterations.rank_programs import ProgramFiles, ProgramWork
from halotile.graphs.jobs.ptychography.job import LIKELIHOOD, result_rows
from halotile.graphs.kinds.base import Inspection, RunView
from halotile.storage.grid import Region
from halotile.storage.scans.export import worst_patterns
from halotile.storage.scans.scan import open_scan, open_summary
from halotile.storage.scans.start import StartValues
from halotile.tasks.ptychography.recipe import ScanRecipe, stages_begun


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
        return ProgramFiles.of(at.directory, self.digest)

    def in_files(self, files: ProgramFiles, drawing: Path) -> ScanRecipe:
        return replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, drawing=drawing)

    def end_of(self, recipe: ScanRecipe) -> Path:
        """Return the checkpoint of the last stage."""
        return recipe.checkpoints[-1]

    def most_kept(self, recipe: ScanRecipe) -> int:
        """Return the number of epochs up to the end of the newest checkpoint's stage."""
        begun = stages_begun(recipe.checkpoints)
        return sum(stage.epochs for stage in recipe.stages[:begun])

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
    def of(cls, recipe: ScanRecipe, start: str | None = None) -> SentRecipe:
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
                    f"{path} has changed since it was opened. Give back what was there, or start over (a run with --fresh)."
                )
        return replace(self.recipe, scan=scan, start=start)

    @property
    def program(self) -> Callable[[Any], None]:
        """The program of a rank."""
        return partial(_reconstruct, self)


def program_of(recipe: ScanRecipe) -> Callable[[Any], None]:
    """Return the program of a rank that begins with a checkpoint."""
    return SentRecipe.of(recipe).program


def _reconstruct(sent: SentRecipe, group: Any) -> None:
    """Reconstruct on one rank; only workers load torch."""
    from halotile.tasks.ptychography.module_program import refinement_of

    refinement_of(sent.opened(), group).run()


def _encode(sent: SentRecipe) -> bytes:
    """Encode the result; only workers load torch."""
    from halotile.tasks.ptychography.result import encoded_result

    return encoded_result(sent.opened())


FEWEST, MANY = 1e-6, 100.0
"""Mean counts between which it is summed over numbers of photons; of fewer it is twice their mean, of more it is LIMIT."""
LIMIT = 0.25
SHAPES = (0.05, 1e6)
"""Smallest and largest shape of the gamma distributions."""
PARTS = 8
"""Parts of a distribution, each with its mean count."""
SOME_BYTES = 2**27
"""Most bytes of patterns that are read to examine their counts."""


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
    """Return the same of pixels whose means vary from pattern to pattern, as a gamma distribution does.

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
    """Return about that of a scan, by some of its patterns; None as of :func:`mean_count`."""
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
