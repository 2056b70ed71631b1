"""The job ``ptychography`` as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from halotile.graphs.kinds.sections import Job
from halotile.tasks.options import Auto, OwnPath, ReadPath


@dataclass(frozen=True, kw_only=True)
class ScanInput:
    """The scan."""

    path: ReadPath
    """Zarr group that recon-cli convert makes of a scan."""
    start: ReadPath | None = None
    """Result of an earlier reconstruction of this scan to begin with, or an HDF5 file with object or probe; null: a first guess."""


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """Object, probe, positions and losses."""

    path: OwnPath
    """Path of the file to write, .cxi or .h5."""
    overwrite: bool = False
    """Replace an existing file at this path."""


_NO_OPTIONS: Any = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a pattern."""

    field: Literal["far", "near"] = "far"
    """far: the detector sees a Fourier transform; near: a wave that was propagated by the angular spectrum method."""
    focus: float | str | None = None
    """Distance from the focus of the beam to the sample, such as 3.65 mm. near: where the beam diverges; null: it is parallel. far: of the
    first guess of the probe, below 0 where the sample comes before the focus; null: it is in focus."""
    modes: int = 1
    """Modes of the probe, whose intensities add."""
    variations: int = 0
    """Modes that are added to the first one, with a share of each pattern's own: a beam whose shape changes during the scan."""
    oversampling: int = 1
    """far: samples of the wave along each axis of a pixel of the detector; the probe is as many times wider, for a beam that fills its frame."""
    import_: str | None = None
    """A function of your own, "package.module:name", that returns a torch module in place of this model; null: none."""
    options: Mapping[str, Any] = _NO_OPTIONS
    """Keyword arguments for it."""
    support: float | None = None
    """Radius in pixels of the circle outside which the probe is 0; null: it may be anywhere."""
    loss: Literal["amplitude_mse", "intensity_mse", "poisson_nll"] = "amplitude_mse"
    """amplitude_mse: squared differences of roots of counts; intensity_mse: of counts; poisson_nll: the likelihood of photon counts."""
    refine: tuple[Literal["object", "probe", "background", "positions", "intensities"], ...] = (
        "object",
        "probe",
        "background",
        "positions",
    )
    """Parts that are changed: object, probe, background, positions, and the intensities of the beam at each of them."""
    margin: int | Auto = "auto"
    """Pixels around the scanned part of the object, as far as positions may move; auto: a tenth of a pattern's edge."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Epochs with one solver."""

    solver: Literal["adam", "sgd", "rpie", "lbfgs"] = "adam"
    """adam; sgd, steepest descent; rpie, the regularised ptychographic iterative engine; lbfgs, limited-memory BFGS of all patterns at once."""
    epochs: int
    """Number of times that each pattern is used."""
    lr: float | Auto = "auto"
    """Learning rate: of adam the change of a value of about 1 in a step, such as of the object, or of a position in pixels. auto: 0.02, for few counts 0.01, for poisson_nll 0.005 unless pixels of few counts are held out, of rpie 0.5, of lbfgs 0.1; sgd needs one."""
    batch: int | Auto = "auto"
    """Patterns of a step. auto: 20, of lbfgs all."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate by part, such as {positions: 0.5}."""
    hold_positions: int | Auto = "auto"
    """Epochs of the stage before positions that are refined begin to move: until object and probe are about right, they would follow their errors. auto: half of the first stage, at most 100, unless lr_factors names positions or a result is begun with; none of later ones."""
    alpha: float = 0.1
    """rpie: near 0, each place steps by its own light; at 1, all by that of the brightest, which is ePIE."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam: shares of the earlier mean and of the earlier mean square of the gradients that a step keeps."""
    amsgrad: bool = False
    """adam: divide a step by the largest mean square of the gradients so far, in place of the last one."""
    momentum: float = 0.0
    """sgd: share of the last step's direction that is added to the next one."""
    smoothness: float = 0.0
    """Weight of the squared differences between neighbouring pixels of the object, such as 1e-3: for few counts. The loss that is shown is without them. 0: none."""
    plateau: bool = False
    """Divide the learning rate by 5 where the loss has not fallen for more than 10 epochs."""
    subset: tuple[int, ...] | None = None
    """Numbers of the only patterns that are used, as in the file that the scan came from, from 0; null: all."""


@dataclass(frozen=True, kw_only=True)
class Ptychography(Job):
    """A ptychographic reconstruction: object, probe and positions from the patterns of a scan."""

    kind: ClassVar[str] = "ptychography"

    input: ScanInput
    output: ResultFile
    model: ModelOptions = field(default_factory=ModelOptions)
    stages: tuple[StageOptions, ...] = (
        StageOptions(epochs=150),
        StageOptions(epochs=20, lr=0.005, batch=50),
    )
    """One after the other."""
    slots: int = 4
    """Parts of a batch that workers share: no more workers can take part. The result depends on it, and not on the number of workers."""
    resolution: bool = False
    """Measure the resolution: two halves of the positions are reconstructed by themselves as well, which takes twice the time."""
    window: int | Auto = "auto"
    """Patterns that a slot draws from at a time, where not all of them fit into memory; auto: all, or else as many as fit; 0: all."""
    held_out: float | Auto = "auto"
    """Share of the pixels of each pattern that take no part in the fit. Each stage ends with the state of the epoch that had the lowest loss on them, so that the noise of few counts is not fitted. auto: 0.05 below 0.5 counts a pixel, else 0; 0: a stage ends with its last epoch."""
    seed: int = 0
    """The order of the patterns follows from it."""

    @property
    def place(self) -> str:
        """Path of the result."""
        return self.output.path

    def moved_to(self, place: str) -> Self:
        """Return the same job with its result at another path."""
        return replace(self, output=replace(self.output, path=place))


def shortened(job: Ptychography, rows: int) -> Ptychography:
    """Return the reconstruction of so many epochs, each a row of its curve; positions that are held until the middle are so there too."""
    stages, left = [], rows
    for stage in job.stages:
        stages.append(replace(stage, epochs=min(stage.epochs, left)))
        left -= stages[-1].epochs
    return replace(job, stages=tuple(stage for stage in stages if stage.epochs))
