"""Everything that defines a ptychographic reconstruction. Declaring one imports nothing heavy."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.storage.arrays import Source
from halotile.storage.scans.scan import Scan, StartValues

# Parts that can be refined.
PARTS = ("object", "probe", "background", "positions", "intensities", "variations", "shares")
VARYING = ("variations", "shares")  # parts of a probe that changes from pattern to pattern


PROGRAM = 9  # version of the order of patterns and of checkpoints: a run that another one has begun does not go on
WAVES = 14  # waves of each pattern and mode that a slot holds at once, as measured
WAVES_BYTES = 2**26  # most bytes of waves at once; of more patterns the gradients are computed some at a time
# Loss of a half, relative to that of all positions, beyond which its object is not done: with fewer patterns it takes
# fewer steps in an epoch.
UNFINISHED = 1.5


def warning_of_halves(loss: float, of_halves: float, kind: str) -> str | None:
    """Return a warning where the halves of the positions need more epochs, by a loss of a kind.

    >>> warning_of_halves(0.25, 0.8, "amplitude_mse")
    'the two halves are not done, with a loss of 0.8: the object of all positions may be finer. More epochs will show it'
    >>> warning_of_halves(-13.0, 20.0, "poisson_nll")  # it has no zero to be relative to
    """
    if kind == "poisson_nll" or of_halves <= UNFINISHED * loss:
        return None
    return f"the two halves are not done, with a loss of {of_halves:.4g}: the object of all positions may be finer. More epochs will show it"


@dataclass(frozen=True)
class PatternSolverTraits:
    """Facts about a solver for a plan."""

    rate: float = 0.02  # usual learning rate; 0: it depends on the scale of the loss
    # of_few, of_likelihood: usual ones where single photons make the gradients: of few counts, and of the likelihood
    # of counts unless pixels of few counts are held out
    of_few: float | None = None
    of_likelihood: float | None = None
    batch: int = 20  # usual patterns of a step; 0: all
    objects: int = 2  # copies of the object that it keeps
    any_model: bool = True  # true: it needs gradients alone
    losses: tuple[str, ...] | None = None  # only ones whose curvature it knows; None: it needs none
    options: tuple[str, ...] = ()  # options of a stage that are for it and a few others alone


SOLVER_TRAITS: Mapping[str, PatternSolverTraits] = {
    "adam": PatternSolverTraits(of_few=0.01, of_likelihood=0.005, options=("betas", "amsgrad")),
    "sgd": PatternSolverTraits(rate=0.0, objects=1, options=("momentum",)),
    "rpie": PatternSolverTraits(rate=0.5, any_model=False, losses=("amplitude_mse",), options=("alpha", "betas")),
    "lbfgs": PatternSolverTraits(rate=0.1, batch=0, objects=14),
}


@dataclass(frozen=True, kw_only=True)
class SolverStage:
    """Epochs with one solver."""

    solver: str = "adam"  # one of `SOLVER_TRAITS`
    epochs: int  # number of times that each pattern is used
    lr: float  # learning rate
    batch: int  # patterns of a step
    lr_factors: Mapping[str, float] = field(default_factory=dict)  # factors of the learning rate, by part
    # true: the learning rate is divided by 5 where the loss has not fallen for more than 10 epochs
    plateau: bool = False
    hold_positions: int = 0  # epochs in which positions stay where they are
    alpha: float = 0.1  # rpie: near 0, each place by its own light; at 1, all by that of the brightest: ePIE
    # adam: shares of the earlier mean and mean square of the gradients that a step keeps
    betas: tuple[float, float] = (0.9, 0.999)
    amsgrad: bool = False  # adam: True: steps are by the largest mean square so far
    momentum: float = 0.0  # sgd: share of the last step's direction that is added to the next one
    # weight of the squared differences between neighbouring pixels of the object, by the light of the probe
    smoothness: float = 0.0
    # only patterns that are used, by their numbers in the file that the scan came from; None: all
    subset: tuple[int, ...] | None = None


def checkpoints_of(checkpoint: Path, stages: Sequence[Mapping[str, Any]]) -> tuple[Path, ...]:
    """Return the checkpoint of each stage, named by all stages up to it: it is the same whatever follows.

    >>> first, second = checkpoints_of(Path("a.checkpoint"), [{"lr": 0.1}, {"lr": 1}])
    >>> (first, second) == checkpoints_of(Path("a.checkpoint"), [{"lr": 0.1}, {"lr": 1.0}, {"lr": 0.01}])[:2]
    True
    >>> second.suffix
    '.checkpoint'
    """
    digest, paths = hashlib.sha256(), []
    for stage in stages:
        plain = json.loads(json.dumps(stage), parse_int=float)  # 1 is 1.0 in a job
        digest.update(json.dumps(plain, sort_keys=True).encode())
        name = f"{checkpoint.stem}-{digest.hexdigest()[:12]}{checkpoint.suffix}"
        paths.append(checkpoint.with_name(name))
    return tuple(paths)


def stages_begun(checkpoints: Sequence[Path]) -> int:
    """Return the number of stages up to the last one that has a checkpoint."""
    return max((number for number, path in enumerate(checkpoints, 1) if path.is_file()), default=0)


@dataclass(frozen=True)
class Optics:
    """The way from the sample to the detector.

    References
    ----------
    D. M. Paganin, Coherent X-Ray Optics, appendix B: the Fresnel scaling theorem.
    """

    field: Literal["far", "near"]  # far: a Fourier transform; near: the angular spectrum method
    # wavelength, distance: in metres; that distance over which waves with the pixels of the object propagate
    wavelength: float
    distance: float
    pixel: tuple[float, float]  # size of a pixel of the object along rows and columns, in metres
    # far: distance from the focus of the beam to the sample in metres, for the first guess of the probe
    focus: float | None = None

    @classmethod
    def from_scan(
        cls, scan: Scan, shape: tuple[int, int], field: Literal["far", "near"], focus: float | None
    ) -> Optics:
        """The optics of a scan, whose patterns have a shape; ``focus`` is the distance from the focus of the beam to the sample.

        >>> scan = Scan(1e-10, 1.0, (5e-5, 5e-5), np.zeros((1, 2)), np.zeros(1, int))
        >>> optics = Optics.from_scan(scan, (100, 100), "near", 0.25)
        >>> optics.distance, optics.pixel[0] * 1e6
        (0.2, 10.0)
        >>> round(Optics.from_scan(scan, (100, 100), "far", None).pixel[0] * 1e9, 3)
        20.0
        """
        if field == "far":
            edges = [n * size for n, size in zip(shape, scan.pixel, strict=True)]
            height, width = (scan.wavelength * scan.distance / edge for edge in edges)
            return cls(field, scan.wavelength, scan.distance, (height, width), focus)
        larger = 1.0 if focus is None else (focus + scan.distance) / focus
        height, width = (size / larger for size in scan.pixel)
        return cls(field, scan.wavelength, scan.distance / larger, (height, width))


@dataclass(frozen=True)
class ScanRecipe:
    """A reconstruction."""

    scan: Scan  # positions and everything else that is small
    patterns: Source  # patterns, (positions, rows, columns)
    optics: Optics  # way from the sample to the detector
    loss: str  # one of `LOSSES`
    modes: int  # modes of the probe
    refined: tuple[str, ...]  # those of `PARTS` that change
    stages: tuple[SolverStage, ...]  # one after the other
    # slots, seed: parts of a batch for the ranks to share, and the number from which the order of the patterns
    # follows
    slots: int
    seed: int
    margin: int  # pixels around the scanned part of the object, as far as positions may move
    few_counts: bool = False  # true where most pixels of the patterns counted nothing
    window: int = 0  # patterns that a slot draws from at a time, a number of whole chunks; 0: all
    # share of the pixels of each pattern that no gradient has, whose loss decides which epoch of a stage is kept; 0:
    # the last one
    held_out: float = 0.0
    support: float | None = None  # radius in pixels of the circle outside which the probe is 0
    variations: int = 0  # modes that are added to the first one with a share of each pattern's own
    # samples of the far field along each axis of a pixel of the detector: the probe has as many pixels for one of a
    # pattern
    oversampling: int = 1
    # `package.module:name` of a function that returns the model as a torch module, with its options and the folder
    # that is searched first; None: halotile's own
    module: str | None = None
    module_options: Mapping[str, Any] = field(default_factory=dict)
    import_folder: str | None = None
    start: StartValues | None = None  # object, probe and the like to begin with
    # true: two halves of the positions are reconstructed by themselves as well, for the resolution
    resolution: bool = False
    # checkpoint, curve, drawing: files on a disk that all ranks see; there is a checkpoint for each stage, whose name
    # begins with this one
    checkpoint: Path = Path("checkpoint")
    curve: Path = Path()
    drawing: Path | None = None
    requests: Path | None = None  # file of the epochs that a loop asks for; None: all are computed

    @property
    def pattern(self) -> tuple[int, int]:
        """Shape of a pattern."""
        _, rows, columns = self.patterns.shape
        return rows, columns

    @property
    def frame(self) -> tuple[int, int]:
        """Shape of the probe."""
        rows, columns = self.pattern
        return self.oversampling * rows, self.oversampling * columns

    @property
    def first_probe(self) -> NDArray[Any] | None:
        """The probe that is begun with, where the scan or an earlier result has one."""
        return self.scan.probe if self.start is None or self.start.probe is None else self.start.probe

    @property
    def chunk(self) -> int:
        """Patterns of a chunk."""
        return self.patterns.chunks[0]

    @property
    def chunks(self) -> int:
        return -(-len(self.scan.positions) // self.chunk)

    @property
    def at_once(self) -> int:
        """Patterns of a slot whose waves are in memory at once."""
        fitting = max(1, WAVES_BYTES // self.wave_bytes)
        return min(fitting, self.window) if self.window else fitting

    @property
    def wave_bytes(self) -> int:
        """Memory of the waves of a pattern."""
        return WAVES * 8 * (self.modes + self.variations) * math.prod(self.frame)

    @property
    def epochs(self) -> int:
        """Epochs of all stages."""
        return sum(stage.epochs for stage in self.stages)

    @cached_property
    def checkpoints(self) -> tuple[Path, ...]:
        """Checkpoints of all stages; a loop has one for all."""
        if self.requests is not None:
            return len(self.stages) * (self.checkpoint,)
        return checkpoints_of(self.checkpoint, [asdict(stage) for stage in self.stages])

    @property
    def newest_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; None before the first one."""
        begun = stages_begun(self.checkpoints)
        return self.checkpoints[begun - 1] if begun else None

    @property
    def halves(self) -> tuple[int | None, ...]:
        """The parts of the scan, each reconstructed by itself: all positions, and their halves."""
        return (None, 0, 1) if self.resolution else (None,)

    def used(self, epoch: int, half: int | None = None) -> NDArray[np.bool_]:
        """Boolean mask (positions,) of the patterns of this epoch; ``half`` selects even or odd positions."""
        _, stage = self.stage_of(epoch)
        used = np.ones(len(self.scan.positions), bool)
        if stage.subset is not None:
            used = np.isin(self.scan.numbers, stage.subset)
        if half is not None:
            used[1 - half :: 2] = False
        return used

    def stage_of(self, epoch: int) -> tuple[int, SolverStage]:
        """Number of the first epoch of the stage that an epoch belongs to, and the stage."""
        number = self.stage_number(epoch)
        return sum(stage.epochs for stage in self.stages[:number]), self.stages[number]

    def stage_number(self, epoch: int) -> int:
        """Number of the stage that an epoch belongs to."""
        ends = itertools.accumulate(stage.epochs for stage in self.stages)
        return next(number for number, end in enumerate(ends) if epoch < end)

    @property
    def places(self) -> NDArray[np.float64]:
        """First pixel of the object that each pattern sees, with fractions, (positions, 2); not kept, since there may be many."""
        return self.places_of(slice(None))

    def places_of(self, numbers: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """Positions of the given patterns."""
        return np.asarray(self.scan.positions[numbers] / self.optics.pixel - self._least + self.margin)

    @cached_property
    def _least(self) -> NDArray[np.float64]:
        """The smallest position along each axis, in pixels of the object."""
        return np.asarray(self.scan.positions.min(0) / self.optics.pixel)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Shape of the object."""
        # Of the greatest position alone, with the bits that its place has among all.
        greatest = self.scan.positions.max(0) / self.optics.pixel - self._least + self.margin
        rows, columns = (
            math.ceil(place) + edge + self.margin for place, edge in zip(greatest, self.frame, strict=True)
        )
        return rows, columns
