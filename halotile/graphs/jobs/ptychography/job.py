"""Ptychography as a job: its sections, and the rules that their values have to keep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from halotile.graphs.kinds.base import Check, Figures, Row
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.rows import cost_rows
from halotile.graphs.rules.values import Above, AtLeast, Faults, seed, workers_of_slots
from halotile.graphs.words import counted, shape_text
from halotile.storage.lengths import shown_length, shown_resolution
from halotile.storage.scans.scan import fault_of_name
from halotile.storage.spacing import signed_metres
from halotile.tasks.options import Auto, OwnPath, ReadPath
from halotile.tasks.ptychography.recipe import PARTS, SOLVER_TRAITS, VARYING, warning_of_halves


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
    """Learning rate: of adam the change of a value of about 1 in a step, such as of the object, or of a position in pixels. auto: 0.02, for few counts 0.01, for poisson_nll 0.005 (0.02 where pixels of few counts are held out), of rpie 0.5, of lbfgs 0.1; sgd needs one."""
    batch: int | Auto = "auto"
    """Patterns of a step. auto: 20, of lbfgs all."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate by part, such as {positions: 0.5}."""
    hold_positions: int | Auto = "auto"
    """Epochs of the stage before refined positions begin to move: until object and probe are about right, they would follow their errors. auto: half of the first stage, at most 100, unless lr_factors names positions or the job starts from a result; 0 in later stages."""
    alpha: float = 0.1
    """rpie: near 0, the step of each pixel is scaled by its own illumination; at 1, by the maximum, which is ePIE."""
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
    stages: tuple[StageOptions, ...] = (StageOptions(epochs=150), StageOptions(epochs=20, lr=0.005, batch=50))
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


# The loss without a zero: the `amplitude_mse` of its result is compared with that of the noise.
LIKELIHOOD = "poisson_nll"
FAR_ABOVE = 2  # loss, relative to that of the noise, above which the outcome names possible causes
HELD_OUT = "{:.0%} of the pixels of each pattern are held out: their loss decides which epoch of a stage is kept"
MORE_EPOCHS = "the loss on the held-out pixels still falls: more epochs may give a better object"
LOST = 5e-3  # share of the light of a mode that was not found
# Loss, relative to that of the noise in as many pixels as were not needed to fit the model, below which the noise
# itself was fitted.
BELOW = 0.95
CAUSES = (
    "unless the object looks right, write more epochs or modes, refine intensities if the beam varied, or check the geometry (order and signs of the "
    "positions' axes, focus, near or far field, pixels that do not count)"
)


def title(job: Ptychography) -> str:
    """Describe a job in a few words."""
    return f"ptychography of {job.input.path}"


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    epochs, workers = counted(figures["epochs"], "epoch"), counted(figures["workers"], "worker")
    return f"{counted(figures['positions'], 'pattern')} of {shape_text(figures['pattern'])}: {epochs}, {workers}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    height, width = figures["pixel"]
    return [
        ("input", str(figures["input"])),
        ("", f"{counted(figures['positions'], 'pattern')} of {shape_text(figures['pattern'])}"),
        ("output", str(figures["output"])),
        ("object", f"{shape_text(figures['object'])} pixels of {shown_length(height)} × {shown_length(width)}"),
        ("model", f"{figures['module'] or _own_model(figures)}, {figures['loss']}"),
        *([("", HELD_OUT.format(figures["held_out"]))] if figures["held_out"] else []),
        ("refined", ", ".join(figures["refine"])),
        *([("in memory", f"{counted(figures['window'], 'pattern')} a slot at a time")] if figures["window"] else []),
        ("", ""),
        *[("stages" if n == 0 else "", stage) for n, stage in enumerate(figures["stages"])],
        *(
            [("resolution", "of two halves of the positions, which takes twice the time")]
            if figures["resolution"]
            else []
        ),
        ("", ""),
        *cost_rows(figures),
    ]


def _own_model(figures: Figures) -> str:
    length = figures["focus"]
    focus = "" if length is None else f", {length if isinstance(length, str) else f'{length:g} m'} from the focus"
    return f"{figures['field']} field{focus}, {counted(figures['modes'], 'mode')}"


def result_rows(
    # last row of the curve; beside it `worst_patterns` and `worst_losses`, lists, `median_loss` and `mean_loss`
    last: Mapping[str, Any],
    drawing: Path,  # drawing of the object
    loss: str = "",  # name of what was minimised
    noise: float | None = None,  # about the `amplitude_mse` that the noise of photons alone gives
    free: float = 0.0,  # numbers that the fit is free to choose, relative to the counts
) -> list[Row]:
    """Return the end of a reconstruction as a table.

    >>> result_rows({"loss": 0.25}, Path("scan.png"))
    [('loss', '0.25'), ('drawing', 'scan.png')]
    >>> result_rows({"loss": 0.25}, Path("scan.png"), "amplitude_mse", 0.2)[0]
    ('loss', '0.25; for these counts the noise of photons alone gives about 0.2')
    >>> result_rows({"loss": 0.5}, Path("scan.png"), "amplitude_mse", 0.2)[1][1][:52]
    'the loss is 2.5 times that of photons alone: unless '
    >>> result_rows({"loss": 0.17}, Path("scan.png"), "amplitude_mse", 0.2, 0.04)[1][1][:70]
    'the loss is 15 % below that of photons alone: the object follows noise'
    >>> result_rows({"loss": -13.0, "mean_loss": 0.17}, Path("scan.png"), "poisson_nll", 0.2, 0.04)[1][1][:79]
    'the amplitude_mse is 15 % below that of photons alone: the object follows noise'
    >>> result_rows({"loss": 0.17, "kept": 9, "loss_of_kept": 0.19}, Path("scan.png"), "amplitude_mse", 0.2)[:2]
    [('loss', '0.19; for these counts the noise of photons alone gives about 0.2'), ('kept', 'epoch 9, which had the lowest loss on the held-out pixels')]
    >>> result_rows({"loss": 0.25, "loss_of_halves": 0.8, "resolution": 2e-7}, Path("scan.png"))[1]
    ('warning', 'the two halves are not done, with a loss of 0.8: the object of all positions may be finer. More epochs will show it')
    >>> result_rows({"worst_patterns": [12345, 2], "worst_losses": [0.8, 0.5], "median_loss": 0.25}, Path("scan.png"))[0]
    ('worst', 'patterns 12345, 2 with amplitude_mse of 0.8, 0.5; the median is 0.25')
    """
    rows = []
    if "loss" in last:
        last = {**last, "loss": last.get("loss_of_kept", last["loss"])}
        what = "amplitude_mse" if loss == LIKELIHOOD else "loss"
        misfit = last.get("mean_loss", noise or 0.0) if loss == LIKELIHOOD else last["loss"]
        of_noise = noise if what == "loss" else None
        about = f"; for these counts the noise of photons alone gives about {of_noise:.2g}" if of_noise else ""
        rows.append(("loss", f"{last['loss']:.4g}{about}"))
        if noise and misfit > FAR_ABOVE * noise:
            rows.append(("warning", f"the {what} is {misfit / noise:.2g} times that of photons alone: {CAUSES}"))
        if "kept" in last:
            rows.append(("kept", f"epoch {last['kept']:,.0f}, which had the lowest loss on the held-out pixels"))
            if last["kept"] == last.get("iteration"):
                rows.append(("note", MORE_EPOCHS))
        elif noise and misfit < BELOW * (1 - free) * noise:
            below = f"the {what} is {100 * (1 - misfit / noise):.0f} % below that of photons alone: the object follows noise"
            rows.append(("warning", f"{below}. Write held_out: 0.05"))
    if last.get("faintest_mode", 1) < LOST:
        lost = f"a mode of the probe has {last['faintest_mode']:.2g} of the light: the patterns do not distinguish it from changes of the object, or it is not there"
        rows.append(("warning", f"{lost}. Write fewer modes, or give the modes as input.start"))
    of_halves = last.get("loss_of_halves")
    if of_halves is not None and (warning := warning_of_halves(last["loss"], of_halves, loss)):
        rows.append(("warning", warning))
    if "resolution" in last:
        rows.append(
            (
                "resolution",
                f"{shown_resolution(last['resolution'], last.get('resolution_bound', 0))} (half a period: Fourier ring correlation at 1/2 bit)",
            )
        )
    if "worst_patterns" in last:
        numbers = ", ".join(map(str, last["worst_patterns"]))
        losses = ", ".join(f"{loss:.4g}" for loss in last["worst_losses"])
        worst = f"patterns {numbers} with amplitude_mse of {losses}; the median is {last['median_loss']:.4g}"
        rows.append(("worst", worst))
    return [*rows, ("drawing", str(drawing))]


OURS = ("focus", "modes", "variations", "oversampling", "support", "refine")  # keys of halotile's own model


def _result_path(path: str) -> str | None:
    if "://" in path:
        return f"{path} is in an object store, and results are written to a disk; write a path"
    return fault_of_name(path)


def _focus(length: float | str | None) -> str | None:
    known = length is None or signed_metres(length)
    return None if known else f"is {length}; write a length in metres or with its unit, such as 3.65 mm"


def _share(alpha: float) -> str | None:
    return None if 0 < alpha <= 1 else f"is {alpha:g}; write more than 0, such as 0.1, and at most 1"


def _kept_share(share: float) -> str | None:
    return None if 0 <= share < 1 else f"is {share}; write 0 or more and less than 1"


def _held_share(share: float | Auto) -> str | None:
    right = share == "auto" or 0 <= share <= 0.5
    return None if right else f"is {share}; write 0, or a share up to 0.5 such as 0.05"


def _betas(shares: Sequence[float]) -> str | None:
    right = len(shares) == 2 and not any(map(_kept_share, shares))
    return None if right else f"is {list(shares)}; write two numbers, each 0 or more and less than 1"


def _factors(factors: Mapping[str, float]) -> str | None:
    wrong = next((name for name, factor in factors.items() if not 0 <= factor < math.inf), None)
    return None if wrong is None else f"gives {wrong} {factors[wrong]:g}; write 0 or more, such as 0.5"


CHECKS: Mapping[tuple[str, str], Check] = {
    ("output", "path"): _result_path,
    ("model", "modes"): AtLeast(1),
    ("model", "variations"): AtLeast(0),
    ("model", "oversampling"): AtLeast(1),
    ("model", "focus"): _focus,
    ("model", "support"): Above(0),
    ("model", "margin"): AtLeast(1),
    ("stages", "epochs"): AtLeast(1),
    ("stages", "batch"): AtLeast(1),
    ("stages", "lr"): Above(0),
    ("stages", "lr_factors"): _factors,
    ("stages", "hold_positions"): AtLeast(0),
    ("stages", "alpha"): _share,
    ("stages", "betas"): _betas,
    ("stages", "momentum"): _kept_share,
    ("stages", "smoothness"): AtLeast(0),
    ("", "slots"): AtLeast(1),
    ("", "window"): AtLeast(0),
    ("", "held_out"): _held_share,
    ("", "seed"): seed,
}


def optics(model: ModelOptions) -> Faults:
    """Yield a focus behind the sample in a near field, and nothing to refine."""
    if model.field == "near" and model.focus is not None and (signed_metres(model.focus) or 1) < 0:
        yield ("model", "focus"), f"is {model.focus}; write a length above 0: a beam in a near field diverges"
    if model.oversampling > 1 and model.field == "near":
        yield ("model", "oversampling"), "is for field: far; leave it out"
    yield from _only_keys_of_own_model(model)
    if "object" not in model.refine:
        yield ("model", "refine"), "does not name the object; write [object, probe] or more"


def _only_keys_of_own_model(model: ModelOptions) -> Faults:
    """Yield what a user's own model has no use for."""
    usual = ModelOptions()
    if model.import_ is None:
        if model.options:
            yield ("model", "options"), "is for a model that import names; leave it out"
        return
    for name in OURS:
        if getattr(model, name) != getattr(usual, name):
            yield (
                ("model", name),
                "is for the model of halotile, and import names another one; write it in options, or leave it out",
            )


def starts(input: ScanInput, model: ModelOptions, resolution: bool) -> Faults:  # noqa: A002 - the section
    """Yield a start where there must be none."""
    if input.start is not None and resolution:
        yield (
            ("input", "start"),
            "is not for a resolution, whose halves would begin with the same object; leave one of them out",
        )
    if input.start is not None and model.import_ is not None:
        yield ("input", "start"), "is for the model of halotile; leave it out"


def parts_of_factors(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield factors of parts that are not refined; those of a user's own model are known when it is built."""
    refined = (*model.refine, *(VARYING if model.variations else ()))
    for number, stage in enumerate(stages if model.import_ is None else ()):
        for part in stage.lr_factors:
            if part not in PARTS:
                yield ("stages", number, "lr_factors"), f"names {part}; write some of {', '.join(refined)}"
            elif part not in refined:
                yield (
                    ("stages", number, "lr_factors"),
                    f"names {part}, which is not refined; leave it out, or add it to model.refine",
                )


def import_of_model(
    model: ModelOptions, stages: Sequence[StageOptions], resolution: bool, held_out: float | Auto
) -> Faults:
    """Yield what there is not for a user's own model."""
    if model.import_ is None:
        return
    if held_out not in ("auto", 0):
        yield ("held_out",), "is for the model of halotile; leave it out"
    if resolution:
        yield ("resolution",), "is not there for a model of your own; leave it out"
    for number, stage in enumerate(stages):
        if not SOLVER_TRAITS[stage.solver].any_model:
            yield (("stages", number, "solver"), f"is {stage.solver}, which needs the model of halotile; write adam")
        if stage.smoothness:
            yield ("stages", number, "smoothness"), "is for the model of halotile; leave it out"


def smooth_objects(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield a smoothness of an object that does not change."""
    for number, stage in enumerate(stages):
        if stage.smoothness and "object" not in model.refine:
            yield (("stages", number, "smoothness"), "is for the object, which refine does not name; leave it out")


def options_of_others(stages: Sequence[StageOptions]) -> Faults:
    """Yield options that another solver has."""
    users = {
        option: [name for name, traits in SOLVER_TRAITS.items() if option in traits.options]
        for option in ("alpha", "betas", "amsgrad", "momentum")
    }
    for number, stage in enumerate(stages):
        usual = StageOptions(epochs=stage.epochs)
        for option, names in users.items():
            if stage.solver not in names and getattr(stage, option) != getattr(usual, option):
                yield (
                    ("stages", number, option),
                    f"is for solver: {' or '.join(names)}, and the solver is {stage.solver}; leave it out",
                )


def solvers(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield losses, rates and batches that a solver cannot do with."""
    if not stages:
        yield ("stages",), "is empty; write one such as {epochs: 50}"
    for number, stage in enumerate(stages):
        losses = SOLVER_TRAITS[stage.solver].losses
        if losses and model.loss not in losses:
            yield (
                ("stages", number, "solver"),
                f"is {stage.solver}, which is for loss: {' or '.join(losses)}, and the loss is {model.loss}; write adam",
            )
        if not SOLVER_TRAITS[stage.solver].rate and stage.lr == "auto":
            yield (
                ("stages", number, "lr"),
                f"is needed: that of {stage.solver} depends on the counts; begin with 0.001",
            )
        if not SOLVER_TRAITS[stage.solver].batch and stage.batch != "auto":
            yield (
                ("stages", number, "batch"),
                f"is {stage.batch}, and {stage.solver} uses all patterns at once; leave it out",
            )


RULES = (
    optics,
    starts,
    import_of_model,
    parts_of_factors,
    smooth_objects,
    solvers,
    options_of_others,
    workers_of_slots,
)
